"""What a GPU achieves under a software stack: `Profile` (framework and release) and `Rates` (work per second).

The numbers are fitted by `python -m shardwise.planner.fit` to published runs and stored in ``data/efficiency.toml``:
efficiencies per GPU type, per network link and per software profile, nothing per model or per run.  A GPU type without an
entry takes its architecture's, a profile without an entry its framework's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from shardwise.planner.comm import Links
from shardwise.spec.cluster import Cluster, Gpu

DEFAULT_PROFILE = "megatron-bridge"
LINE_RATE = 0.95  # of a network's bandwidth, at most
CEILING = 0.86  # of the peak: large products run into the power limit before they reach more, whatever a fit says
_MATMUL = {
    "fp32": "matmul_bf16",
    "fp16": "matmul_bf16",
    "bf16": "matmul_bf16",
    "nvfp4": "matmul_fp4",
}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A software stack.

    speed: multiplies the rate of kernels. launch: host seconds per kernel. step: host seconds per step (data, logging,
    gradient norm). moe: multiplies the rate of shuffling and sending tokens to experts. attention: multiplies the rate of attention.
    network: multiplies the bandwidth between domains. fragmentation: reserved over allocated memory.
    workspace: bytes the framework keeps besides the model (cuBLAS, Transformer Engine, user buffers).
    logit_bytes: bytes per logit at the peak of an unfused loss. weight_gradients: 1 if weight gradients are accumulated by the
    matrix product kernels, which then keep one unused bf16 gradient per distinct weight shape (Transformer Engine).
    """

    name: str
    speed: float
    launch: float
    step: float
    moe: float
    attention: float
    network: float
    fragmentation: float
    workspace: float
    logit_bytes: float
    weight_gradients: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Work per second of one GPU for one precision under one profile, and the links as used.

    exchange: the links for tokens on their way to experts, whose small messages to many GPUs reach less of a network than rings do.
    """

    matmul: float
    grouped: float
    wide: float
    attention: float
    memory: float
    permute: float
    quantise: float
    scan: float
    accumulate: float
    moe: float
    launch: float
    step: float
    links: Links
    exchange: Links
    exposed_tp: float
    exposed_tp_overlapped: float
    exposed_ep: float
    exposed_ep_overlapped: float
    exposed_cp: float
    exposed_pp: float
    hidden_dp: float
    optimizer: float


Table = Mapping[str, Mapping[str, float]]


def _load(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("shardwise.planner").joinpath("data", name).read_text(encoding="utf-8"))


@cache
def efficiency() -> dict[str, dict[str, dict[str, float]]]:
    """Contents of ``data/efficiency.toml``: what was fitted."""
    return _load("efficiency.toml")


@cache
def frameworks() -> dict[str, dict[str, float]]:
    """Contents of ``data/frameworks.toml``: what stacks keep in memory."""
    return _load("frameworks.toml")


def _entry(tables: Mapping[str, Mapping[str, float]], keys: tuple[str, ...]) -> dict[str, float]:
    merged: dict[str, float] = {}
    for key in keys:
        merged.update(tables.get(key, {}))
    return merged


def profile_names() -> tuple[str, ...]:
    return tuple(efficiency()["profile"])


def profile(name: str = DEFAULT_PROFILE, data: Mapping[str, Table] | None = None) -> Profile:
    """The profile called ``name`` (``framework`` or ``framework/release``); unknown releases take the framework's numbers."""
    tables = (data or efficiency())["profile"]
    framework = name.split("/", maxsplit=1)[0]
    keys = ("default", framework, name)
    entry = _entry(tables, keys) | _entry(frameworks(), keys)
    return Profile(
        name=name,
        speed=entry["speed"],
        launch=entry["launch_us"] * 1e-6,
        step=entry["step_ms"] * 1e-3,
        moe=entry["moe"],
        attention=entry["attention"],
        network=entry["network"],
        fragmentation=entry["fragmentation"],
        workspace=entry["workspace_gib"] * 2**30,
        logit_bytes=entry["logit_bytes"],
        weight_gradients=entry["weight_gradients"],
    )


def rates(cluster: Cluster, precision: str, stack: Profile, data: Mapping[str, Table] | None = None) -> Rates:
    """Rates of the GPUs and links of ``cluster`` for matrix products in ``precision``."""
    tables = data or efficiency()
    gpu: Gpu = cluster.gpu
    entry = _entry(tables["gpu"], ("default", gpu.arch, gpu.name))
    common = tables["common"]["all"]
    exposed = tables["common"]["exposed"]
    bf16 = gpu.bf16_flops or gpu.peak("bf16")
    wide = bf16 * min(CEILING, entry["matmul_bf16"] * stack.speed)
    matmul = gpu.peak(precision) * min(CEILING, entry[_MATMUL.get(precision, "matmul_fp8")] * stack.speed)
    near = cluster.intra.bandwidth * common["near"]
    link = tables["link"].get(cluster.inter.name, tables["link"]["default"])["efficiency"]
    far = cluster.network_bandwidth * min(LINE_RATE, link * stack.network)
    links = Links(near=near, far=far, near_latency=common["near_latency_us"] * 1e-6, far_latency=common["far_latency_us"] * 1e-6)
    return Rates(
        matmul=matmul,
        grouped=matmul * min(1.0, entry["grouped"]),
        wide=wide,
        attention=bf16 * min(CEILING, entry["attention"] * stack.speed * stack.attention),
        memory=gpu.bandwidth * entry["memory"] * stack.speed,
        permute=gpu.bandwidth * entry["permute"] * stack.moe * stack.speed,
        quantise=gpu.bandwidth * entry["quantise"] * stack.speed,
        scan=gpu.bandwidth * entry["scan"] * stack.speed,
        accumulate=gpu.bandwidth * entry["accumulate"] * stack.speed,
        moe=stack.moe,
        launch=stack.launch,
        step=stack.step,
        links=links,
        exchange=replace(links, far=far * tables["common"]["exchange"]["far"]),
        exposed_tp=exposed["tp"],
        exposed_tp_overlapped=exposed["tp_overlapped"],
        exposed_ep=exposed["ep"],
        exposed_ep_overlapped=exposed["ep_overlapped"],
        exposed_cp=exposed["cp"],
        exposed_pp=exposed["pp"],
        hidden_dp=exposed["dp_hidden"],
        optimizer=gpu.bandwidth * entry["memory"],
    )

"""GPUs, links and clusters by name, from `gpus.toml` and `links.toml`."""

from __future__ import annotations

from functools import cache

from shardwise.errors import ShardwiseError
from shardwise.spec.catalog.tables import table, unknown
from shardwise.spec.cluster import Cluster, Gpu, Link

GIB = 2**30


@cache
def _gpu_names() -> dict[str, str]:
    names = {}
    for key, entry in table("gpus").items():
        for name in (key, *entry["aliases"]):
            names[name] = key
    return names


def gpu_names() -> tuple[str, ...]:
    return tuple(table("gpus"))


def gpu_aliases() -> tuple[str, ...]:
    """Every name that `gpu` knows, without spaces and in lower case."""
    return tuple(_gpu_names())


def _gpu_key(name: str) -> str:
    try:
        return _gpu_names()[name.strip().lower().replace("_", "-").replace(" ", "-")]
    except KeyError:
        raise ShardwiseError(unknown("GPU", name, _gpu_names(), "shardwise hardware")) from None


@cache
def gpu(name: str) -> Gpu:
    """The GPU called `name` (any catalog name or alias, case ignored). Raises `ShardwiseError` with the nearest names."""
    key = _gpu_key(name)
    entry = table("gpus")[key]

    def peak(precision: str) -> float | None:
        value = entry.get(f"{precision}_tflops")
        return None if value is None else value * 1e12

    return Gpu(
        name=key,
        arch=entry["arch"],
        capability=tuple(entry["capability"]) if "capability" in entry else None,
        memory=round(entry["memory_gib"] * GIB),
        bandwidth=entry["bandwidth_gbs"] * 1e9,
        sms=entry["sms"],
        bf16_flops=peak("bf16"),
        fp16_flops=peak("fp16"),
        tf32_flops=peak("tf32"),
        fp32_flops=entry["fp32_tflops"] * 1e12,
        fp8_flops=peak("fp8"),
        fp4_flops=peak("fp4"),
        power=float(entry["power_w"]),
        link=entry["link"],
        source=entry["source"],
    )


def link_names() -> tuple[str, ...]:
    return tuple(table("links"))


@cache
def link(name: str) -> Link:
    """The link called `name`. Raises `ShardwiseError` with the nearest names."""
    key = name.strip().lower().replace("_", "-")
    try:
        entry = table("links")[key]
    except KeyError:
        raise ShardwiseError(unknown("interconnect", name, link_names(), "shardwise hardware")) from None
    return Link(
        name=key, bandwidth=entry["gbs"] * 1e9, latency=entry["latency_us"] * 1e-6, switched=entry["switched"], source=entry["source"]
    )


def cluster(
    gpu_name: str, gpus: int, *, gpus_per_node: int | None = None, interconnect: str | None = None, nics_per_gpu: float | None = None
) -> Cluster:
    """`gpus` GPUs of one type in the usual systems of that type; what is given replaces the usual."""
    entry = table("gpus")[_gpu_key(gpu_name)]
    found = gpu(gpu_name)
    node = gpus_per_node or entry["gpus_per_node"]
    if entry["domain"] > entry["gpus_per_node"]:  # a rack
        domain = entry["domain"]
    elif entry["domain"] < entry["gpus_per_node"]:  # bridged boards
        domain = min(entry["domain"], node)
    else:
        domain = node
    return Cluster(
        gpu=found,
        gpus=gpus,
        gpus_per_node=node,
        domain=domain,
        intra=link(found.link),
        inter=link(entry["network"] if interconnect is None else interconnect),
        nics_per_gpu=nics_per_gpu or entry["nics_per_gpu"],
    )

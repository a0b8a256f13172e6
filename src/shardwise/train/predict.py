"""What the planner predicts for a run on this machine, and what the run takes: step time and memory of the heaviest rank.

On a GPU of the catalog the planner's own rates are used. Elsewhere a few kernels are timed on all ranks at once and the planner prices its
model of the step with those.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from shardwise.planner.comm import Links
from shardwise.planner.estimator import Estimator
from shardwise.planner.rates import Rates
from shardwise.spec.catalog.hardware import cluster, gpu_aliases
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec

GIB = 2.0**30
_SIDE, _STREAM, _MESSAGE = 384, 1 << 21, 1 << 18  # of the timed matrix product; elements of the timed sum and of the timed message


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one training step: seconds, and peak bytes on the heaviest rank."""

    seconds: float
    memory: float


def catalog_name(device_name: str) -> str | None:
    """The GPU of the catalog that a device's own name speaks of; None for an unknown one."""
    words = set(device_name.lower().replace("-", " ").split())
    known = [alias for alias in gpu_aliases() if set(alias.split("-")) <= words]
    return max(known, key=lambda alias: alias.count("-"), default=None)


def predict(model: ModelSpec, layout: Layout, seq_len: int, device: torch.device) -> Cost:
    """The planner's estimate of one step. Communication: a few small all-reduces where the machine is timed; all ranks together."""
    name = catalog_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if device.type == "cuda" and dist.get_world_size() > 1:  # cards may differ from rank to rank
        known = torch.tensor(int(name is not None), device=device)
        dist.all_reduce(known, dist.ReduceOp.MIN)
        name = name if known else None
    model = model.replace(vocab_divisor=1)  # the runtime does not pad the vocabulary
    estimator = Estimator(model, cluster(name or "h100-sxm", layout.world), seq_len=seq_len, stack="shardwise")
    if name is None:
        estimator.reprice({layout.precision: _timed_rates(device)})
    terms = max(estimator.memory(layout).stages, key=lambda stage: sum(stage.values()))
    absent = () if device.type == "cuda" else ("framework", "weight_gradient_buffers")  # of GPU libraries
    memory = sum(size for term, size in terms.items() if term not in absent)
    return Cost(seconds=estimator.step_time(layout).seconds, memory=memory)


def _timed_rates(device: torch.device) -> Rates:
    """Work per second of one rank while all ranks work."""
    matrix, long = torch.ones(_SIDE, _SIDE, device=device), torch.ones(_STREAM, device=device)
    message, small = torch.ones(_MESSAGE, device=device), torch.ones(1, device=device)
    alone = dist.get_world_size() == 1
    seconds = [_best(lambda: matrix @ matrix, device), _best(lambda: long + long, device), _best(lambda: small + small, device)]
    seconds += [0.0, 0.0] if alone else [_best(partial(dist.all_reduce, each), device) for each in (message, small)]
    mean = torch.tensor(seconds, dtype=torch.float64, device=device)
    if not alone:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    product, stream, launch, send, latency = mean.tolist()
    matmul, memory = 2 * _SIDE**3 / product, 3 * long.element_size() * _STREAM / stream
    wire = memory if alone else 2 * message.element_size() * _MESSAGE / send
    links = Links(near=wire, far=wire, near_latency=latency, far_latency=latency)
    return Rates(
        matmul=matmul, grouped=matmul, wide=matmul, attention=matmul, memory=memory, permute=memory, quantise=memory, scan=memory,
        accumulate=memory, moe=1.0, launch=launch, step=0.0,
        links=links, exchange=links,
        exposed_tp=1.0, exposed_tp_overlapped=1.0, exposed_ep=1.0, exposed_ep_overlapped=1.0, exposed_cp=1.0, exposed_pp=1.0, hidden_dp=0.0,
        optimizer=memory,
    )  # fmt: skip


def _best(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the least of five."""
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return min(times)


class PeakMemory:
    """Peak bytes of this process since it was made: of tensors on a GPU, of resident memory on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before = 0 if device.type == "cuda" else self._now()

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def heaviest(self) -> float:
        """Communication: one all-reduce."""
        peak = torch.tensor(float(self._now() - self._before), dtype=torch.float64, device=self._device)
        if dist.get_world_size() > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        return float(peak)


def beside(predicted: Cost, measured: Cost) -> str:
    return (
        f" step time (seconds): {predicted.seconds:.3f} predicted, {measured.seconds:.3f} measured | "
        f"peak memory of the heaviest rank (GiB): {predicted.memory / GIB:.2f} predicted, {measured.memory / GIB:.2f} measured"
    )

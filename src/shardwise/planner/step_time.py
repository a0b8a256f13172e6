"""Step time of a layout, term by term.

A micro batch on a pipeline stage costs its kernels (or the host time to launch them, whichever is longer) plus the
communication that is not hidden.  The pipeline turns stage times into a step, and the end of the step adds what is left
of gradient reduction and parameter gathering, the optimizer, and fixed host work.
Sources: Narayanan et al. 2021, arXiv:2104.04473 (pipeline bubble); Qi et al. 2024, arXiv:2401.10241 (zero bubble);
DeepSeek-V3, arXiv:2412.19437 (DualPipe); Rajbhandari et al. 2020, arXiv:1910.02054 (sharded data parallel volumes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.planner import comm
from shardwise.planner.kernels import Work
from shardwise.planner.layer_work import LayerWork
from shardwise.planner.rates import Rates
from shardwise.spec.layout import DTYPE_BYTES, Layout
from shardwise.spec.schedules import StageTimes, makespan

TERMS = ("matmul", "experts", "attention", "memory_bound", "accumulation", "host", "tp", "cp", "ep", "fsdp")
GRAPHED = 0.2  # host time of a kernel inside a CUDA graph, relative to one outside
ZERO = (0.0,) * len(TERMS)
Cost = tuple[float, ...]  # seconds per term, in the order of TERMS


@dataclass(frozen=True, kw_only=True)
class StepTimeEstimate:
    """Predicted seconds of one training step.

    terms: seconds by cause, summing to ``seconds``: kernels of the critical stage over all micro batches, exposed
    communication by axis, pipeline bubble, point-to-point, data parallel remainder, optimizer, fixed.
    stages: forward and backward seconds of one micro batch on each pipeline rank.
    mfu: model FLOPs (causal attention counted once, no recompute) over the bf16 peak, or the FP8/FP4 peak of the run.
    """

    seconds: float
    terms: dict[str, float]
    stages: tuple[tuple[float, float], ...]
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float


def add(left: Cost, right: Cost, times: float = 1.0) -> Cost:
    return tuple(a + b * times for a, b in zip(left, right))


def kernel_cost(work: Work, rates: Rates, *, graphed: bool = False) -> Cost:
    """Seconds of a set of kernels; the host term is what launching them takes beyond running them.

    graphed: CUDA graphs launch everything but the expert products.
    """
    matmul = work.matmul / rates.matmul + work.wide / rates.wide
    grouped = work.grouped / rates.grouped
    attention = work.attention / rates.attention
    memory = work.stream / rates.memory + work.permute / rates.permute + work.quantise / rates.quantise
    memory += work.scan / rates.scan
    accumulation = work.accumulate / rates.accumulate
    launches = work.launches * (GRAPHED if graphed else 1.0) + work.eager
    host = max(0.0, launches * rates.launch - (matmul + grouped + attention + memory + accumulation))
    return (matmul, grouped, attention, memory, accumulation, host, 0.0, 0.0, 0.0, 0.0)


def _tp_seconds(work: LayerWork, layout: Layout, domain: int, rates: Rates) -> float:
    """One pass through a layer's tensor parallel regions: a gather and a scatter (or an all-reduce) of each."""
    if layout.tp == 1:
        return 0.0
    exposed = rates.exposed_tp_overlapped if layout.overlap_tp and layout.sp else rates.exposed_tp
    return 2 * comm.gather_seconds(work.tp_bytes, layout.tp, 1, domain, rates.links) * exposed


def _ep_seconds(work: LayerWork, layout: Layout, domain: int, rates: Rates) -> float:
    """Dispatch and combine of one pass."""
    if work.ep_bytes == 0.0 or layout.ep * layout.etp == 1:
        return 0.0
    reached = None
    if layout.dispatcher in ("deepep", "hybridep"):
        _, across = comm.placement(layout.ep, layout.etp, domain)
        reached = across * (1 - (1 - 1 / across) ** work.copies) / work.copies if across > 1 else None
    seconds = 2 * comm.exchange_seconds(work.ep_bytes, layout.ep, layout.etp, domain, rates.exchange, reached=reached)
    if layout.etp > 1:
        seconds += 2 * comm.gather_seconds(work.etp_bytes, layout.etp, 1, domain, rates.links)
    return seconds / rates.moe * (rates.exposed_ep_overlapped if layout.overlap_moe else rates.exposed_ep)


def _cp_seconds(work: LayerWork, layout: Layout, domain: int, rates: Rates, attention: float, passes: float) -> float:
    """Context parallel traffic of one pass that attention does not hide."""
    if layout.cp == 1 or work.cp_bytes == 0.0:
        return 0.0
    if layout.cp_comm == "a2a":
        seconds = comm.exchange_seconds(work.cp_bytes + work.cp_query_bytes, layout.cp, layout.tp, domain, rates.links)
        return seconds * passes
    seconds = comm.gather_seconds(work.cp_bytes * layout.cp, layout.cp, layout.tp, domain, rates.links) * passes
    if layout.cp_comm == "all_gather":
        return seconds
    return max(seconds * rates.exposed_cp, seconds - attention)


def layer_costs(
    work: LayerWork, layout: Layout, domain: int, rates: Rates, recomputed: tuple[str, ...] | None, frozen: bool = False
) -> tuple[Cost, Cost]:
    """Forward and backward seconds of one layer for one micro batch.

    recomputed: names of the parts run again in backward, None for the whole layer. frozen: no weight gradients (LoRA).
    """
    forward = kernel_cost(work.forward(), rates, graphed=layout.cuda_graphs)
    backward_work = work.backward()
    if frozen:
        backward_work = backward_work._replace(
            matmul=backward_work.matmul / 2, grouped=backward_work.grouped / 2, wide=backward_work.wide / 2, accumulate=0.0
        )
    again = work.forward() if recomputed is None else work.select(recomputed)
    backward = kernel_cost(backward_work.plus(again), rates, graphed=layout.cuda_graphs)
    tp = _tp_seconds(work, layout, domain, rates)
    ep = _ep_seconds(work, layout, domain, rates)
    whole = recomputed is None
    moe_again = recomputed is None or "moe" in recomputed
    regather = 0.0
    if layout.tp > 1 and layout.sp:
        regather = comm.gather_seconds(work.tp_regathers, layout.tp, 1, domain, rates.links) * rates.exposed_tp_overlapped * 0.5
    forward_comm = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, tp, _cp_seconds(work, layout, domain, rates, forward[2], 1.0), ep, 0.0)
    backward_comm = (
        0.0,
        0.0,
        0.0,
        0.0,
        0.0,
        0.0,
        tp * (2 if whole else 1) + regather,
        _cp_seconds(work, layout, domain, rates, backward[2], 3.0 if whole else 2.0),
        ep * (2 if moe_again else 1),
        0.0,
    )
    return add(forward, forward_comm), add(backward, backward_comm)


def pipeline_seconds(layout: Layout, stages: Sequence[tuple[float, float]], send: float) -> tuple[float, float, float]:
    """(busy, bubble, point-to-point) seconds of all micro batches under 1F1B or GPipe, plain or interleaved.

    Closed forms of what their action lists take. ``send`` is one boundary message in one direction.
    """
    m, p, v = max(1, layout.microbatches), layout.pp, layout.vpp
    totals = [forward + backward for forward, backward in stages]
    slowest = max(totals)
    busy = m * slowest
    if p == 1:
        return busy, 0.0, 0.0
    bubble = sum(totals) - slowest if v == 1 else (p - 1) * sum(totals) / p / v
    exposed = 2.0 * send * (p - 1)
    if v == 1 or not layout.overlap_p2p:
        exposed += 2.0 * send * m * v
    return busy, bubble, exposed


def scheduled_seconds(layout: Layout, stages: Sequence[tuple[Cost, Cost]], busy: float, send: float) -> tuple[float, float, float]:
    """The same for any schedule, by running its action lists; ``stages`` are the virtual stages in token order.

    Half of the matrix products of a backward pass, and adding them up, are weight gradients; the rest of it is needed upstream.
    """
    products = [TERMS.index("matmul"), TERMS.index("experts")]
    times = []
    for forward, backward in stages:
        weight = sum(backward[index] for index in products) / 2 + backward[TERMS.index("accumulation")]
        times.append(StageTimes(forward=sum(forward), input_grad=sum(backward) - weight, weight_grad=weight))
    return busy, makespan(layout, times, send) - busy, 0.0


def data_parallel_seconds(layout: Layout, dense: float, expert: float, domain: int, rates: Rates, window: float) -> float:
    """Exposed seconds of gradient reduction and parameter gathering at the end of a step (not FSDP, which does both per layer).

    dense, expert: parameters of the rank. window: seconds of compute that may hide it.
    """
    if layout.sharding in ("fsdp2", "megatron_fsdp"):
        return 0.0
    per_byte = comm.gather_seconds(dense, layout.dp * layout.cp, layout.tp, domain, rates.links)
    per_byte += comm.gather_seconds(expert, layout.edp, layout.ep * layout.etp, domain, rates.links)
    reduce = per_byte * DTYPE_BYTES[layout.grad_dtype]
    gather = reduce if layout.sharding == "none" else per_byte * DTYPE_BYTES[layout.param_dtype]  # none: an all-reduce
    exposed = 0.0
    for seconds, overlapped in ((reduce, layout.overlap_grad_reduce), (gather, layout.overlap_param_gather)):
        hidden = min(seconds * rates.hidden_dp, window) if overlapped and layout.sharding != "none" else 0.0
        exposed += seconds - hidden
    return exposed


def optimizer_bytes(layout: Layout, dense: float, expert: float) -> float:
    """Bytes the optimizer reads and writes on one rank in a step."""
    sharded = layout.sharding != "none"
    local = (dense / layout.shard_size if sharded else dense) + (expert / layout.expert_shard_size if sharded else expert)
    moments = 2 * DTYPE_BYTES[layout.moment_dtype] if layout.optimizer == "adam" else DTYPE_BYTES[layout.moment_dtype]
    master = DTYPE_BYTES[layout.master_dtype] if layout.master_dtype else 0
    per_param = 2 * moments + 2 * master + 2 * DTYPE_BYTES[layout.grad_dtype] + DTYPE_BYTES[layout.param_dtype]
    norm_and_zero = 2 * DTYPE_BYTES[layout.grad_dtype]
    return local * per_param + (dense + expert) * norm_and_zero

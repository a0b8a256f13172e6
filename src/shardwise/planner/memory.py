"""Memory of the heaviest rank, term by term, for every pipeline stage.

Terms are bytes: weights, gradients, optimizer state, activations in flight, the loss, the largest temporary of a backward
pass, gathered parameters of fully sharded layers, and what the framework keeps.  `allocated` is what
`torch.cuda.max_memory_allocated` reports, `reserved` what the caching allocator holds.
Sources: Rajbhandari et al. 2020, arXiv:1910.02054 (sharded state); Korthikanti et al. 2022, arXiv:2205.05198
(activations); Narayanan et al. 2021, arXiv:2104.04473 (micro batches in flight); Qi et al. 2024, arXiv:2401.10241 (zero bubble).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwise.planner.activations import Saved
from shardwise.spec.cluster import Gpu
from shardwise.spec.layout import DTYPE_BYTES, Layout
from shardwise.spec.schedules import actions, peak_held

GIB = 2**30
CONTEXT = 0.9 * GIB  # CUDA context and communicator buffers outside the allocator
TIGHT = 1.03  # reserved over allocated when the allocator is short of memory and gives unused blocks back
FSDP = ("fsdp2", "megatron_fsdp")
_PER_TENSOR = ("fp8-delayed", "fp8-current")
# Bytes per weight of the copies that products read, by rows and by columns, with their scales: one byte per 32 elements in MXFP8, per 16 in
# NVFP4. Kept for all micro batches of a step (Transformer Engine caches them with `is_first_microbatch`).
WEIGHT_COPIES = {
    "fp8-delayed": 2.0,
    "fp8-current": 2.0,
    "fp8-rowwise": 2.0,
    "fp8-blockwise": 2.0,
    "mxfp8": 2 * (1 + 1 / 32),
    "nvfp4": 2 * (1 / 2 + 1 / 16),
}
LOW_PRECISION_SCRATCH = 0.05 * GIB  # scales, maxima and cast buffers
# Bytes per logit at the peak of a loss: fused (bf16 logits and gradient), in place (the gradient overwrites the logits), in chunks.
LOSS = {"fused": 4.0, "te": 2.0, "chunked": 0.5}


def needed(allocated: float) -> float:
    """Device memory, bytes, that a rank with this allocated peak has to have."""
    return allocated * TIGHT + CONTEXT


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Predicted peak memory of the heaviest rank.

    terms: bytes by cause on the heaviest stage, summing to the allocated peak. stages: the same for every pipeline rank.
    """

    stage: int
    terms: dict[str, float]
    stages: tuple[dict[str, float], ...]
    allocated_gib: float
    reserved_gib: float
    capacity_gib: float
    fits: bool

    @property
    def needed_gib(self) -> float:
        """Device memory the heaviest rank has to have; it fits when that is at most the capacity."""
        return needed(self.allocated_gib * GIB) / GIB


@lru_cache(maxsize=1 << 12)
def in_flight(schedule: str, pp: int, vpp: int, group: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Micro batches whose activations each pipeline rank keeps at its peak, per virtual stage it runs.

    1F1B and GPipe in closed form (equal to their action lists), other schedules from the action lists.
    """
    if schedule in ("1f1b", "gpipe"):
        return tuple(_one_f_one_b(rank, pp, vpp, group, microbatches, schedule == "gpipe") for rank in range(pp))
    capped = min(microbatches, 4 * pp)  # steady state
    layout = Layout(pp=pp, vpp=vpp, schedule=schedule, gbs=capped)  # type: ignore[arg-type]
    held = [peak_held(each, [1.0] * layout.stages) for each in actions(layout)]
    chunks = 2 if schedule in ("zbv", "dualpipev", "dualpipe") else 1
    return tuple((min(microbatches, -(-round(kept) // chunks)),) * chunks for kept in held)


def _one_f_one_b(rank: int, pp: int, vpp: int, group: int, microbatches: int, gpipe: bool) -> tuple[int, ...]:
    if gpipe:
        return (microbatches,) * vpp
    if vpp == 1:
        return (min(microbatches, pp - rank),)
    total = min(microbatches * vpp, 2 * (pp - rank - 1) + (vpp - 1) * group + 1)
    chunks = [0] * vpp
    for k in range(total):
        chunks[k % (group * vpp) // group] += 1
    return tuple(min(kept, microbatches) for kept in chunks)


def keeps_transposes(gpu: Gpu) -> bool:
    """Whether FP8 weights with one scale per tensor are kept transposed too.

    Tensor cores before Blackwell, and those of its workstation GPUs, multiply FP8 in one layout only: Transformer Engine,
    `is_non_tn_fp8_gemm_supported` and what it does after gathering FP8 weights (`_create_transpose`).
    """
    return not gpu.capability or not ((10, 0) <= gpu.capability < (12, 0) or gpu.capability >= (13, 0))


def state_terms(
    layout: Layout, dense: float, expert: float, *, ends: float = 0.0, frozen: float = 0.0, transposes: bool = True
) -> dict[str, float]:
    """Weights, gradients and optimizer state of one rank; ``frozen`` of the parameters have neither of the latter.

    ends: parameters of `dense` in the embedding and the head, which keep two bytes in every precision. transposes: `keeps_transposes` of
    the GPU.
    """
    shards, expert_shards = layout.shard_size, layout.expert_shard_size
    local = dense / shards + expert / expert_shards
    whole = dense + expert
    weight_held, grad_held, optimizer_held = {
        "none": (whole, whole, whole),
        "distributed_optimizer": (whole, whole, local),
        "zero2": (whole, local, local),
    }.get(layout.sharding, (local, local, local))
    copies = WEIGHT_COPIES.get(layout.precision, 0.0)
    weight_bytes = float(DTYPE_BYTES[layout.param_dtype])
    cached = 0.0
    if copies and layout.sharding not in FSDP:
        linear = whole - ends
        if layout.param_dtype != "fp8":
            cached = copies * linear
        elif layout.precision in _PER_TENSOR and not transposes:
            cached = ends  # wider than one byte
        else:
            cached = (copies - 1) * linear + ends
    moments = {"adam": 2, "sgd": 1, "muon": 1}[layout.optimizer] * DTYPE_BYTES[layout.moment_dtype]
    master = DTYPE_BYTES[layout.master_dtype] if layout.master_dtype else 0
    trained = 1.0 - frozen
    cached += LOW_PRECISION_SCRATCH if copies else 0.0
    return {
        "weights": weight_held * weight_bytes,
        "low_precision_weights": cached,
        "gradients": trained * grad_held * DTYPE_BYTES[layout.grad_dtype],
        "optimizer": trained * optimizer_held * (master + moments) * (1.0 - layout.offload.optimizer),
    }


def activation_bytes(layout: Layout, saved: Saved, whole_input: float) -> float:
    """Bytes of one layer for one micro batch under the layout's recompute choice (uniform groups share one input)."""
    recompute = layout.recompute
    if recompute.granularity == "full":
        return whole_input / max(1, recompute.num_layers or 1) if recompute.method != "block" else saved.total
    return saved.after(recompute, layout.offload.activation_modules)


def loss_bytes(layout: Layout, tokens: float, vocab_share: float, unfused: float) -> float:
    """Peak of the logits and their loss on the last stage; ``unfused`` is the framework's bytes per logit without fusion."""
    per_logit = LOSS.get(layout.cross_entropy, unfused)
    return per_logit * tokens * vocab_share

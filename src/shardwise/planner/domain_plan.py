"""The `ddp x domain` split of a model over a grid: smallest domain that fits, wrapper, memory and time of the heaviest rank.

A domain group holds one sample (its batch is 1; the batch grows over the ddp axis only). Activations follow the rows a
rank holds, weights do not: they are whole on every rank, or sharded over the ddp axis by FSDP2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.errors import InputError
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import DTYPE_BYTES
from shardwise.spec.model import GridModel

Wrapper = Literal["none", "ddp", "fsdp2"]
GIB = 2.0**30
USABLE = 0.92  # share of the device memory that allocations may reach; the rest is context, libraries, fragmentation
EFFICIENCY = 0.4  # of the bf16 or tf32 peak, stencil and attention models alike; only ranks splits of one model

WRAPPER_WHY: dict[Wrapper, str] = {
    "none": "no data-parallel axis: plain parameters, broadcast once over the domain group at start-up",
    "ddp": "every parameter stays plain, so DistributedDataParallel over the ddp group works, with or without a domain axis",
    "fsdp2": "parameters are sharded (memory) or spatial parameters are DTensors: fully_shard over the ddp axis; DDP cannot hold DTensors",
}


@dataclass(frozen=True, kw_only=True)
class DomainPlan:
    """One split. `terms` are GiB of the heaviest rank; `seconds` is one step of `gbs` samples."""

    ddp: int
    domain: int
    wrapper: Wrapper
    why: str
    rows: tuple[int, ...]  # of the split dimension, per rank of a domain group
    accumulate: int  # samples one domain group runs per step, one after the other
    terms: dict[str, float]
    capacity_gib: float
    seconds: float

    @property
    def allocated_gib(self) -> float:
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        return self.allocated_gib <= self.capacity_gib * USABLE


def plan_domain(model: GridModel, cluster: Cluster, *, gbs: int, spatial_params: bool = False) -> list[DomainPlan]:
    """All splits of ``cluster.gpus`` ranks into ddp x domain, those that fit first, then by step time.

    ``spatial_params``: the model has parameters as large as the grid (position embeddings) that are to be sharded, which
    needs FSDP2. Raises `InputError` when no count is positive.
    """
    for name, value in (("gpus", cluster.gpus), ("global batch", gbs), ("parameters", model.params), ("rows", max(model.grid, default=0))):
        if value < 1:
            raise InputError(given=f"{name} = {value}", why="it must be at least 1", try_=f"a positive {name}")
    extent = max(model.grid)
    plans = []
    for domain in (size for size in range(1, min(cluster.gpus, extent) + 1) if cluster.gpus % size == 0):
        ddp = cluster.gpus // domain
        if ddp <= gbs and gbs % ddp == 0:
            plans.append(_best_wrapper(model, cluster, ddp=ddp, domain=domain, gbs=gbs, spatial_params=spatial_params and domain > 1))
    if not plans:
        legal = [size for size in range(1, cluster.gpus + 1) if cluster.gpus % size == 0 and cluster.gpus // size <= extent]
        raise InputError(
            given=f"{cluster.gpus} GPUs, global batch {gbs}, {extent} rows",
            why="no ddp x domain = GPUs has ddp dividing the batch and domain at most the rows",
            try_=f"a global batch that is a multiple of one of {legal}" if legal else f"at most {extent} GPUs per sample",
        )
    return sorted(plans, key=lambda plan: (not plan.fits, plan.seconds if plan.fits else plan.allocated_gib))


def smallest_domain(model: GridModel, cluster: Cluster, *, spatial_params: bool = False) -> DomainPlan | None:
    """The smallest domain group in which one sample fits, with plain parameters and no ddp axis; None if none does."""
    for domain in range(1, min(max(model.grid), cluster.gpus) + 1):
        plan = _plan(model, cluster, ddp=1, domain=domain, gbs=1, wrapper="fsdp2" if spatial_params and domain > 1 else "none")
        if plan.fits:
            return plan
    return None


def _best_wrapper(model: GridModel, cluster: Cluster, *, ddp: int, domain: int, gbs: int, spatial_params: bool) -> DomainPlan:
    if spatial_params:
        return _plan(model, cluster, ddp=ddp, domain=domain, gbs=gbs, wrapper="fsdp2")
    plain = _plan(model, cluster, ddp=ddp, domain=domain, gbs=gbs, wrapper="none" if ddp == 1 else "ddp")
    if plain.fits or ddp == 1:
        return plain
    sharded = _plan(model, cluster, ddp=ddp, domain=domain, gbs=gbs, wrapper="fsdp2")
    return sharded if sharded.fits else plain


def _plan(model: GridModel, cluster: Cluster, *, ddp: int, domain: int, gbs: int, wrapper: Wrapper) -> DomainPlan:
    extent = max(model.grid)
    rows = tuple(extent // domain + (rank < extent % domain) for rank in range(domain))
    share = rows[0] / extent
    width = DTYPE_BYTES[model.param_dtype]
    master = 0 if model.param_dtype == "fp32" else 4
    cuts = 0 if domain == 1 else 1 if domain == 2 else 2
    shards = ddp if wrapper == "fsdp2" else 1
    terms = {
        "weights": model.params * width / shards,
        "gradients": model.params * width / shards,
        "optimizer": model.params * (8 + master) / shards,
        "gathered weights": model.params * width if shards > 1 else 0.0,
        "saved activations": model.saved_bytes_per_sample * share,
        "temporary peak": model.peak_bytes_per_sample * share,
        "halos": float(model.halo_bytes * cuts),
    }
    return DomainPlan(
        ddp=ddp,
        domain=domain,
        wrapper=wrapper,
        why=WRAPPER_WHY[wrapper],
        rows=rows,
        accumulate=gbs // ddp,
        terms={name: value / GIB for name, value in terms.items()},
        capacity_gib=cluster.gpu.memory / GIB,
        seconds=_seconds(model, cluster, share=share, ddp=ddp, domain=domain, samples=gbs // ddp, cuts=cuts, width=width),
    )


def _seconds(model: GridModel, cluster: Cluster, *, share: float, ddp: int, domain: int, samples: int, cuts: int, width: int) -> float:
    """Compute, halos over the link the domain group lands on, gradient all-reduce over domain and ddp (2 (n-1)/n of the bytes)."""
    precision = "bf16" if model.param_dtype == "bf16" else "tf32"
    peak = cluster.gpu.bf16_flops if precision == "bf16" else cluster.gpu.tf32_flops
    compute = samples * model.flops_per_sample * share / (EFFICIENCY * (peak or cluster.gpu.fp32_flops))
    near, far = cluster.intra.bandwidth, cluster.network_bandwidth
    halo = samples * model.halo_bytes * cuts / (near if domain <= cluster.domain else far)
    world = ddp * domain
    gradients = 2 * model.params * width * (world - 1) / world / (near if world <= cluster.domain else far)
    return compute + halo + gradients

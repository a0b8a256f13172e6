"""The fewest GPUs a model trains on, with the reason why each smaller world does not do.

Worlds tried: every number up to one node, then whole nodes. A world is ruled out by its lightest legal layout; very small
ones already by the training state alone, which no layout can make smaller than itself divided by the world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace

from shardwise.planner.estimator import Estimator
from shardwise.planner.memory import GIB, keeps_transposes, needed, state_terms
from shardwise.planner.search import Judge, Plan, lightest_plan
from shardwise.planner.space import SHARDING, Space, derive, space_of
from shardwise.spec.cluster import Cluster, Gpu
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec

FINER_CUT = 1.05  # a layout above this share of the GPU cannot be saved by cutting the pipeline finer


@dataclass(frozen=True, kw_only=True)
class World:
    """One number of GPUs: the least memory any layout needs per GPU, and what makes it so."""

    gpus: int
    fits: bool
    least_gib: float
    constraint: str
    plan: Plan | None = None


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """``min_gpus`` is None when no world up to the limit fits. ``worlds`` are all that were tried, smallest first."""

    min_gpus: int | None
    worlds: tuple[World, ...]
    capacity_gib: float

    @property
    def plan(self) -> Plan | None:
        return self.worlds[-1].plan if self.min_gpus else None


def worlds(per_node: int, limit: int) -> Iterator[int]:
    yield from range(1, min(per_node, limit) + 1)
    yield from range(2 * per_node, limit + 1, per_node)


def certify(
    model: ModelSpec,
    cluster_of: Callable[[int], Cluster],
    base: Layout,
    *,
    seq_len: int,
    framework: str,
    stack: str,
    judge_of: Callable[[Cluster], Judge],
    limit: int,
    progress: Callable[[int], None] | None = None,
) -> Certificate:
    """Smallest world that fits. ``base.gbs`` is kept when it is above 1; otherwise the batch is the world."""
    first = cluster_of(1)
    capacity = first.gpu.memory / GIB
    estimator = Estimator(model, first, seq_len=seq_len, stack=stack)
    tried: list[World] = []
    for gpus in worlds(first.gpus_per_node, limit):
        cluster = cluster_of(gpus)
        estimator = moved(estimator, cluster)
        start = base if base.gbs > 1 else base.replace(gbs=gpus)
        space = space_of(model, cluster, start, seq_len=seq_len, framework=framework)
        floor = _state_floor(estimator, start, space, gpus)
        if floor > capacity:
            total = floor_total(model, start, space, first.gpu) / GIB
            tried.append(World(gpus=gpus, fits=False, least_gib=floor, constraint=f"training state: {total:,.0f} GiB over {gpus} GPUs"))
            continue
        if progress:
            progress(gpus)
        plan = _lightest(estimator, start, space, judge_of(cluster))
        world = _judged(gpus, plan, capacity)
        tried.append(world)
        if world.fits:
            return Certificate(min_gpus=gpus, worlds=tuple(tried), capacity_gib=capacity)
    return Certificate(min_gpus=None, worlds=tuple(tried), capacity_gib=capacity)


def moved(estimator: Estimator, cluster: Cluster) -> Estimator:
    """An estimator on another number of the same GPUs; what layers cost is kept, it does not depend on the number."""
    if cluster.domain != estimator.cluster.domain or cluster.gpus_per_node != estimator.cluster.gpus_per_node:
        return Estimator(estimator.model, cluster, seq_len=estimator.seq_len, stack=estimator.stack)
    moved = copy(estimator)
    moved.cluster = cluster
    return moved


def _lightest(estimator: Estimator, base: Layout, space: Space, judge: Judge) -> Plan | None:
    """The lightest plan. Virtual stages only add micro batches in flight, but cut finer: they are tried where that may decide."""
    plan = lightest_plan(estimator, base, replace(space, vpp=space.vpp or (1,)), judge=judge)
    close = plan and plan.memory.needed_gib <= FINER_CUT * plan.memory.capacity_gib
    if plan is None or plan.memory.fits or not close:
        return plan
    return lightest_plan(estimator, base, space, judge=judge)


def _judged(gpus: int, plan: Plan | None, capacity: float) -> World:
    if plan is None:
        return World(gpus=gpus, fits=False, least_gib=0.0, constraint="no legal layout: batch, heads, experts or layers do not divide")
    memory = plan.memory
    need = memory.needed_gib
    largest = sorted(memory.terms.items(), key=lambda item: -item[1])[:3]
    text = ", ".join(f"{name.replace('_', ' ')} {value / GIB:.1f}" for name, value in largest)
    return World(gpus=gpus, fits=memory.fits, least_gib=need, constraint=f"pipeline rank {memory.stage}: {text} GiB", plan=plan)


def floor_total(model: ModelSpec, base: Layout, space: Space, gpu: Gpu) -> float:
    """Bytes of weights, gradients and optimizer of the whole model in the smallest number formats of the space."""
    params = float(model.total_params)
    one = derive(base, tp=1, cp=1, dp=1, pp=1, ep=1, etp=1, shard_group=None)
    frozen = 1.0 if base.peft else 0.0
    layouts = [derive(one, **SHARDING[mode]) for mode in space.sharding]
    return min(sum(state_terms(each, params, 0.0, frozen=frozen, transposes=keeps_transposes(gpu)).values()) for each in layouts)


def _state_floor(estimator: Estimator, base: Layout, space: Space, gpus: int) -> float:
    """GiB per GPU below which no layout on ``gpus`` GPUs gets."""
    state = floor_total(estimator.model, base, space, estimator.cluster.gpu) / gpus
    return needed(state) / GIB

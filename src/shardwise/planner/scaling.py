"""The third axis of the Pareto front: the best plan on fewer GPUs of the same kind."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.planner.certificate import moved
from shardwise.planner.estimator import Estimator
from shardwise.planner.search import Judge, Plan, search
from shardwise.planner.space import space_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout


def on_fewer_gpus(
    estimator: Estimator,
    base: Layout,
    *,
    framework: str,
    cluster_of: Callable[[int], Cluster],
    judge_of: Callable[[Cluster], Judge],
    least: int,
    uneven: bool,
) -> list[Plan]:
    """The fastest plan on a half, a quarter, ... of the GPUs, down to ``least``, largest first. The global batch stays the same."""
    plans = []
    gpus = estimator.cluster.gpus // 2
    while gpus >= max(1, least):
        cluster = cluster_of(gpus)
        there = moved(estimator, cluster)
        space = space_of(there.model, cluster, base, seq_len=there.seq_len, framework=framework)
        found = search(there, base, space, judge=judge_of(cluster), top=1, uneven=uneven, front=False)
        plans += found.plans
        gpus //= 2
    return plans

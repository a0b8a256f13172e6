"""The search: every legal layout is bounded, the promising ones are evaluated, the fastest that fit are returned.

Candidates are taken in order of their lower bound on step time. Once the bound of the next one is above the time of the
last wanted plan, no layout left can be among the wanted ones: the result is that of trying them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from shardwise.errors import Finding
from shardwise.planner.bounds import Bounds
from shardwise.planner.estimator import Estimator
from shardwise.planner.memory import CONTEXT, GIB, MemoryEstimate
from shardwise.planner.space import Group, Space, groups
from shardwise.planner.stage_search import best_split
from shardwise.planner.step_time import StepTimeEstimate, kernel_cost
from shardwise.spec.layout import Layout

Judge = Callable[[Layout], Sequence[Finding]]

NO_MEMORY_BOUND = "state and activations exceed the GPU however stages are cut"
NO_MEMORY = "heaviest rank does not fit"
SLOWER = "slower than the plans shown, by its lower bound"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout with its predictions; `findings` are warnings and advice (a plan has no errors)."""

    layout: Layout
    memory: MemoryEstimate
    time: StepTimeEstimate
    findings: tuple[Finding, ...] = ()


@dataclass(kw_only=True)
class SearchResult:
    """plans: the fastest that fit, best first. front: Pareto front over step time and memory. nearest: least memory, if none fits.

    considered: layouts in the space. rejected: how many fell to which reason.
    """

    plans: list[Plan] = field(default_factory=list)
    front: list[Plan] = field(default_factory=list)
    nearest: Plan | None = None
    considered: int = 0
    evaluated: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


def balanced(estimator: Estimator, layout: Layout, limits: Sequence[float] | None = None) -> Layout | None:
    """This layout with its layers cut so that the slowest stage is as fast as possible, and no rank holds more layers than its limit.

    Exact for the given costs (`stage_search.best_split`). None when no split keeps the limits.
    """
    model = estimator.model
    if layout.pp == 1 or layout.stages > model.num_layers:
        return None
    seconds = [sum(map(sum, estimator.layer_seconds(kind, layout))) for kind in range(len(model.kinds))]
    rate = estimator.rates(layout.precision)
    head, lookup = (sum(sum(kernel_cost(work, rate)) for work in end) for end in estimator._end_work(layout))
    kinds = {layer: kind for kind, layer in enumerate(model.kinds)}
    extra = sum(seconds[kinds[layer]] + head for layer in model.mtp)
    split = best_split(
        [seconds[kinds[layer]] for layer in model.layers],
        layout.stages,
        first=lookup,
        last=head + extra,
        limits=limits,
        weights=[1.0] * model.num_layers,
    )
    if split is None:
        return None
    words = ["t" * count for count in split.layers]
    words[0] = "E" + words[0]
    words[-1] += "m" * len(model.mtp) + "L"
    return layout.replace(pipeline_layout=tuple(words))


def _layer_limits(estimator: Estimator, layout: Layout) -> list[float]:
    """Layers each pipeline rank can hold, from the memory of its own stage in an even cut."""
    estimate = estimator.memory(layout)
    chunks = estimator.stages(layout)
    budget = (estimate.capacity_gib * GIB - CONTEXT) / estimator.stack.fragmentation
    limits = []
    for terms, held in zip(estimate.stages, chunks):
        layers = max(1, sum(chunk.count for chunk in held))
        per_layer = (terms["weights"] + terms["gradients"] + terms["optimizer"] + terms["activations"]) / layers
        fixed = sum(terms.values()) - per_layer * layers
        limits.append(max(0.0, (budget - fixed) / per_layer + 0.5))
    return limits


def variants(estimator: Estimator, plain: Layout, *, uneven: bool) -> Iterator[Layout]:
    """The even cut, where the layers divide; the fastest uneven one; and, if that is too heavy, the fastest uneven one that fits."""
    layers = estimator.model.num_layers
    even = layers % plain.stages == 0
    if even or not uneven:
        yield plain
    cut = balanced(estimator, plain) if uneven else None
    if cut is None:
        return
    if not (even and all(word.count("t") == layers // plain.stages for word in cut.pipeline_layout or ())):
        yield shortened(cut, layers)
    if plain.vpp == 1 and not estimator.memory(cut).fits:
        lighter = balanced(estimator, plain, _layer_limits(estimator, cut))
        if lighter and lighter != cut:
            yield shortened(lighter, layers)


def shortened(layout: Layout, layers: int) -> Layout:
    """The same cut said with `account_for_embedding` and `account_for_loss` where those give it."""
    counts = [word.count("t") for word in layout.pipeline_layout or ()]
    for first, last in ((True, True), (False, True), (True, False)):
        units = layers + first + last
        share, rest = divmod(units, layout.stages)
        expected = [share - first, *[share] * (layout.stages - 2), share - last]
        if rest == 0 and counts == expected and not any("m" in word for word in layout.pipeline_layout or ()):
            return layout.replace(pipeline_layout=None, account_for_embedding=first, account_for_loss=last)
    return layout


def search(
    estimator: Estimator, base: Layout, space: Space, *, judge: Judge, top: int = 5, uneven: bool = True, front: bool = True
) -> SearchResult:
    """The ``top`` fastest layouts of ``space`` that are legal and fit on all GPUs of the estimator's cluster.

    base: what all layouts share (batch, precision, kernels). judge: findings of a layout; errors exclude it. uneven: also cut
    stages unevenly. front: also evaluate what the Pareto front over time and memory needs.
    """
    bounds = Bounds(estimator)
    capacity = estimator.cluster.gpu.memory / GIB
    result = SearchResult()
    found: list[Plan] = []
    slowest = lightest = float("inf")  # time of the last wanted plan, least memory found so far
    queue: list[tuple[float, int, float, Group | Layout]] = []
    number = 0
    for group in groups(space, estimator.model, estimator.cluster.gpus, base, seq_len=estimator.seq_len):
        result.considered += group.size
        seconds, least = bounds.group(group)
        number += 1
        if bounds.reserved_gib(least) > capacity:
            result.rejected[NO_MEMORY_BOUND] += group.size
        else:
            queue.append((seconds, number, least, group))
    heapify(queue)
    while queue:
        seconds, _, least, item = heappop(queue)
        if seconds > slowest and not (front and least < lightest):
            result.rejected[SLOWER] += item.size if isinstance(item, Group) else 1
        elif isinstance(item, Group):
            for layout in item.members():
                least = bounds.bytes(layout)
                if bounds.reserved_gib(least) > capacity:
                    result.rejected[NO_MEMORY_BOUND] += 1
                else:
                    number += 1
                    heappush(queue, (bounds.seconds(layout), number, least, layout))
        else:
            for plan in _evaluate(estimator, item, judge, result, uneven):
                found.append(plan)
                lightest = min(lightest, plan.memory.allocated_gib * GIB)
            if len(found) >= top:
                slowest = sorted(plan.time.seconds for plan in found)[top - 1]
    found.sort(key=lambda plan: (plan.time.seconds, plan.memory.allocated_gib))
    result.plans = found[:top]
    result.front = pareto(found)
    if not found:
        result.nearest = lightest_plan(estimator, base, space, judge=judge, uneven=uneven)
    return result


def _evaluate(estimator: Estimator, layout: Layout, judge: Judge, result: SearchResult, uneven: bool) -> Iterator[Plan]:
    for variant in variants(estimator, layout, uneven=uneven):
        result.evaluated += 1
        memory = estimator.memory(variant)
        if not memory.fits:
            result.rejected[NO_MEMORY] += 1
            continue
        findings = tuple(judge(variant))
        error = next((finding for finding in findings if finding.severity == "error"), None)
        if error:
            result.rejected[f"rule {error.rule}: {error.why}"] += 1
            continue
        yield Plan(layout=variant, memory=memory, time=estimator.step_time(variant), findings=findings)


def lightest_plan(estimator: Estimator, base: Layout, space: Space, *, judge: Judge, uneven: bool = True) -> Plan | None:
    """The legal layout of the space with the least memory on its heaviest rank, whether it fits or not; None if none is legal."""
    bounds = Bounds(estimator)
    best: Plan | None = None
    lightest = float("inf")
    queue: list[tuple[float, int, Group | Layout]] = []
    for group in groups(space, estimator.model, estimator.cluster.gpus, base, seq_len=estimator.seq_len):
        queue.append((bounds.group(group)[1], len(queue), group))
    heapify(queue)
    number = len(queue)
    while queue:
        least, _, item = heappop(queue)
        if least >= lightest:
            break
        if isinstance(item, Group):
            for layout in item.members():
                number += 1
                heappush(queue, (bounds.bytes(layout), number, layout))
            continue
        for variant in variants(estimator, item, uneven=uneven):
            memory = estimator.memory(variant)
            if memory.allocated_gib * GIB >= lightest:
                continue
            findings = tuple(judge(variant))
            if not any(finding.severity == "error" for finding in findings):
                best = Plan(layout=variant, memory=memory, time=estimator.step_time(variant), findings=findings)
                lightest = memory.allocated_gib * GIB
    return best


def pareto(plans: Sequence[Plan]) -> list[Plan]:
    """Plans no other plan beats in step time, memory and GPUs together, fastest first."""
    front: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.time.seconds, plan.memory.allocated_gib, plan.layout.world)):
        if not any(kept.memory.allocated_gib <= plan.memory.allocated_gib and kept.layout.world <= plan.layout.world for kept in front):
            front.append(plan)
    return front

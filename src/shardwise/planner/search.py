"""The search: every legal layout is bounded, the promising ones are evaluated, the fastest that fit are returned.

Candidates are taken in order of their lower bound on step time. Once the bound of the next one is above the time of the
last wanted plan, no layout left can be among the wanted ones: the result is that of trying them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from shardwise.errors import Finding
from shardwise.planner.bounds import Bounds
from shardwise.planner.estimator import Estimator
from shardwise.planner.memory import CONTEXT, GIB, TIGHT, MemoryEstimate, in_flight, needed
from shardwise.planner.space import Group, Space, groups
from shardwise.planner.stage_search import StageCosts, StageSplit, cheapest
from shardwise.planner.step_time import StepTimeEstimate, kernel_cost
from shardwise.spec.layout import Layout

FRONT_SLOWER = 1.15  # the Pareto front ends at plans this much slower than the best
FRONT_STEP = 0.92  # and each of its plans needs at most this share of the memory of the faster ones
LEFT_OUT = 1.1  # the memory bound leaves out loss, embedding and buffers: layouts need this much more, and the front need not try less
CUT_SAVES = 1.1  # cutting virtual stages for time moves at most a layer each: this far above the target, no cut brings it down

Judge = Callable[[Layout], Sequence[Finding]]

NO_MEMORY_BOUND = "state and activations exceed the GPU however stages are cut"
NO_MEMORY = "heaviest rank does not fit"
SLOWER = "no faster than a plan found, by its lower bound"


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


def time_costs(estimator: Estimator, layout: Layout) -> StageCosts:
    """Seconds of one micro batch, forward and backward, of any run of layers on any stage of the layout."""
    model = estimator.model
    rate = estimator.rates(layout.precision)
    seconds = [sum(map(sum, estimator.layer_seconds(kind, layout))) for kind in range(len(model.kinds))]
    head, lookup = (sum(sum(kernel_cost(work, rate)) for work in end) for end in estimator._end_work(layout))
    extra = [0.0] * layout.stages
    extra[0] += lookup
    extra[-1] += head + sum(seconds[model.kinds.index(layer)] + head for layer in model.mtp)
    return StageCosts([seconds[kind] for kind in estimator._layer_kinds], extra)


def memory_costs(bounds: Bounds, layout: Layout, even: MemoryEstimate) -> StageCosts:
    """Allocated bytes of any run of layers on any rank of a layout without virtual stages. ``even``: memory of its even cut."""
    estimator = bounds.estimator
    flights = [max(each) for each in in_flight(layout.schedule, layout.pp, 1, layout.pp, max(1, layout.microbatches))]
    per_kind = [bounds.layer_bytes(kind, layout) for kind in range(len(estimator.model.kinds))]
    extra = []
    for terms, chunks, flight in zip(even.stages, estimator.stages(layout), flights):
        held = sum(count * (per_kind[kind][0] + per_kind[kind][1] * flight) for chunk in chunks for kind, count in chunk.layers)
        extra.append(sum(terms.values()) - held)
    states, kept = zip(*(per_kind[kind] for kind in estimator._layer_kinds))
    return StageCosts(states, extra, kept=kept, factors=flights)


def with_cut(layout: Layout, split: StageSplit, mtp: int) -> Layout:
    """The layout with these layers per stage, as an explicit pipeline layout or in Megatron's shorter words."""
    words = ["t" * count for count in split.layers]
    words[0] = "E" + words[0]
    words[-1] += "m" * mtp + "L"
    return shortened(layout.replace(pipeline_layout=tuple(words)), sum(split.layers))


def balanced(estimator: Estimator, layout: Layout, loads: StageCosts | None = None, budget: float = 0.0) -> Layout | None:
    """This layout with its layers cut so that the slowest stage is as fast as possible, and no rank's load above ``budget``.

    Exact for the given costs (`stage_search.cheapest`). With virtual stages, embedding or loss may be alone on theirs. None when
    no cut keeps the budget.
    """
    model = estimator.model
    if layout.pp == 1 or layout.stages > model.num_layers + 2 * (layout.vpp > 1):
        return None
    lows = [1] * layout.stages
    if layout.vpp > 1:
        lows[0] = lows[-1] = 0
    split = cheapest(time_costs(estimator, layout), lows=lows, loads=loads, budget=budget)
    return with_cut(layout, split, len(model.mtp)) if split else None


def variants(bounds: Bounds, plain: Layout, *, uneven: bool, lightest: bool = False) -> Iterator[tuple[Layout, MemoryEstimate]]:
    """The even cut, where the layers divide, and the fastest cut whose stages fit, or the ``lightest`` one, each with its memory.

    With virtual stages the fastest cut is taken without regard to memory, unless the even one is far too heavy (`CUT_SAVES`).
    """
    estimator = bounds.estimator
    layers = estimator.model.num_layers
    even = estimator.memory(plain) if plain.stages <= layers else None
    if even and (layers % plain.stages == 0 or not uneven):
        yield plain, even
    if not uneven or plain.pp == 1:
        return
    if even and plain.vpp > 1 and even.needed_gib > CUT_SAVES * even.capacity_gib:
        return
    cut: Layout | None
    if even and plain.vpp == 1:
        loads = memory_costs(bounds, plain, even)
        budget = (even.capacity_gib * GIB - CONTEXT) / TIGHT
        if lightest:
            split = cheapest(loads, lows=[1] * plain.pp)
            cut = with_cut(plain, split, len(estimator.model.mtp)) if split else None
        else:
            cut = balanced(estimator, plain, loads, budget)
    else:
        cut = balanced(estimator, plain)
    if cut and cut != plain:
        yield cut, estimator.memory(cut)


def shortened(layout: Layout, layers: int) -> Layout:
    """The same cut without words where it is even, or with `account_for_embedding` and `account_for_loss` where those give it."""
    words = layout.pipeline_layout or ()
    counts = [word.count("t") for word in words]
    for first, last in ((False, False), (True, True), (False, True), (True, False)):
        share, rest = divmod(layers + first + last, layout.stages)
        expected = [share - first, *[share] * (layout.stages - 2), share - last]
        if rest == 0 and counts == expected and (not any("m" in word for word in words) or not (first or last)):
            return layout.replace(pipeline_layout=None, account_for_embedding=first, account_for_loss=last)
    return layout


def search(
    estimator: Estimator, base: Layout, space: Space, *, judge: Judge, top: int = 5, uneven: bool = True, front: bool = True
) -> SearchResult:
    """The fastest layouts of ``space`` that are legal and fit on all GPUs of the estimator's cluster, one per set of degrees.

    base: what all layouts share (batch, precision, kernels). judge: findings of a layout; errors exclude it. uneven: also cut
    stages unevenly. front: also evaluate what the Pareto front over time and memory needs.
    """
    bounds = Bounds(estimator)
    capacity = estimator.cluster.gpu.memory
    result = SearchResult()
    best: dict[tuple[object, ...], Plan] = {}  # the fastest plan of each set of degrees
    light: list[Plan] = []  # plans lighter than all faster ones
    fastest = slowest = lightest = float("inf")  # times of the first and last wanted plan, memory the next of the front must stay below
    queue: list[tuple[float, int, float, Group | Layout]] = []
    number = 0
    for group in groups(space, estimator.model, estimator.cluster.gpus, base, seq_len=estimator.seq_len):
        result.considered += group.size
        least = bounds.bytes(group)
        number += 1
        if needed(least) > capacity:
            result.rejected[NO_MEMORY_BOUND] += group.size
        else:
            queue.append((bounds.seconds(group), number, least, group))
    heapify(queue)
    while queue:
        seconds, _, least, item = heappop(queue)
        settled = best.get(degrees(item.layout if isinstance(item, Group) else item))
        ranked = seconds <= slowest and (settled is None or seconds < settled.time.seconds)
        on_front = front and LEFT_OUT * least < lightest and seconds <= FRONT_SLOWER * fastest
        if not ranked and not on_front:
            result.rejected[SLOWER] += item.size if isinstance(item, Group) else 1
        elif isinstance(item, Group):
            for part in item.parts():
                least = bounds.bytes(part)
                if needed(least) > capacity:
                    result.rejected[NO_MEMORY_BOUND] += part.size if isinstance(part, Group) else 1
                else:
                    number += 1
                    heappush(queue, (bounds.seconds(part), number, least, part))
        else:
            for plan in _evaluate(bounds, item, judge, result, uneven, lighter_than=float("inf") if ranked else lightest):
                key = degrees(plan.layout)
                if key not in best or plan.time.seconds < best[key].time.seconds:
                    best[key] = plan
                light.append(plan)
                fastest = min(fastest, plan.time.seconds)
                lightest = min(lightest, FRONT_STEP * plan.memory.allocated_gib * GIB)
            if len(best) >= top:
                slowest = sorted(plan.time.seconds for plan in best.values())[top - 1]
    found = sorted(best.values(), key=lambda plan: (plan.time.seconds, plan.memory.allocated_gib))
    result.plans = found[:top]
    result.front = pareto(light)
    if not found:
        result.nearest = lightest_plan(estimator, base, space, judge=judge, uneven=uneven)
    return result


def _evaluate(bounds: Bounds, layout: Layout, judge: Judge, result: SearchResult, uneven: bool, *, lighter_than: float) -> Iterator[Plan]:
    """The legal variants that fit and allocate less than ``lighter_than`` bytes."""
    if lighter_than < float("inf") and layout.stages <= bounds.estimator.model.num_layers:
        even = bounds.estimator.memory(layout).allocated_gib * GIB
        if even >= CUT_SAVES * lighter_than:
            result.rejected[SLOWER] += 1
            return
    for variant, memory in variants(bounds, layout, uneven=uneven):
        if memory.allocated_gib * GIB >= lighter_than:
            continue
        result.evaluated += 1
        if not memory.fits:
            result.rejected[NO_MEMORY] += 1
            continue
        findings = tuple(judge(variant))
        error = next((finding for finding in findings if finding.severity == "error"), None)
        if error:
            result.rejected[f"rule {error.rule}: {error.why}"] += 1
            continue
        yield Plan(layout=variant, memory=memory, time=bounds.estimator.step_time(variant), findings=findings)


def lightest_plan(estimator: Estimator, base: Layout, space: Space, *, judge: Judge, uneven: bool = True) -> Plan | None:
    """The legal layout of the space with the least memory on its heaviest rank, whether it fits or not; None if none is legal.

    Larger micro batches never take less memory, and the way context parallel ranks communicate does not change it.
    """
    bounds = Bounds(estimator)
    space = replace(space, mbs=(min(space.mbs),), cp_comm=space.cp_comm[:1])
    best: Plan | None = None
    lightest = float("inf")
    queue: list[tuple[float, int, Group | Layout]] = []
    for group in groups(space, estimator.model, estimator.cluster.gpus, base, seq_len=estimator.seq_len):
        queue.append((bounds.bytes(group), len(queue), group))
    heapify(queue)
    number = len(queue)
    while queue:
        least, _, item = heappop(queue)
        if least >= lightest:
            break
        if isinstance(item, Group):
            for part in item.parts():
                number += 1
                heappush(queue, (bounds.bytes(part), number, part))
            continue
        for variant, memory in variants(bounds, item, uneven=uneven, lightest=True):
            if memory.allocated_gib * GIB >= lightest:
                continue
            findings = tuple(judge(variant))
            if not any(finding.severity == "error" for finding in findings):
                best = Plan(layout=variant, memory=memory, time=estimator.step_time(variant), findings=findings)
                lightest = memory.allocated_gib * GIB
    return best


def degrees(layout: Layout) -> tuple[object, ...]:
    """What tells two plans apart in a ranking; virtual stages, recompute and the cut are settled within it."""
    return (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, layout.mbs, layout.sharding)


def pareto(plans: Sequence[Plan]) -> list[Plan]:
    """Plans that need clearly less memory than every faster one (`FRONT_STEP`), fastest first, down to `FRONT_SLOWER`."""
    front: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.time.seconds, plan.memory.allocated_gib)):
        if not front or (
            plan.memory.allocated_gib <= FRONT_STEP * front[-1].memory.allocated_gib
            and plan.time.seconds <= FRONT_SLOWER * front[0].time.seconds
        ):
            front.append(plan)
    return front

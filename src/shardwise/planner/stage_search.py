"""Uneven pipeline stages: the exact best split of layers over stages.

A stage is a contiguous run of layers. The best split has the smallest heaviest stage, and among those the smallest
sum of squares (the most even one). Both are found by dynamic programming over (stage, layers used), so the answer is
exact, not a heuristic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwise.errors import InputError

_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """Layers per stage with the cost of each stage (in the unit of the given layer costs)."""

    layers: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def heaviest(self) -> float:
        return max(self.costs)

    @property
    def average(self) -> float:
        return sum(self.costs) / len(self.costs)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First and one-past-last layer id of every stage."""
        ends = tuple(accumulate(self.layers))
        return tuple(zip((0, *ends[:-1]), ends))


def split_costs(layer_costs: Sequence[float], layers: Sequence[int], *, first: float = 0.0, last: float = 0.0) -> StageSplit:
    """Cost of every stage of a given split; ``first`` and ``last`` are added to the end stages (embedding, head)."""
    if sum(layers) != len(layer_costs):
        raise InputError(
            given=f"stages {list(layers)}",
            why=f"they sum to {sum(layers)} layers, the model has {len(layer_costs)}",
            try_=f"stages that sum to {len(layer_costs)}",
        )
    prefix = (0.0, *accumulate(layer_costs))
    ends = tuple(accumulate(layers))
    costs = [prefix[end] - prefix[end - count] for count, end in zip(layers, ends)]
    costs[0] += first
    costs[-1] += last
    return StageSplit(layers=tuple(layers), costs=tuple(costs))


def best_split(
    layer_costs: Sequence[float],
    stages: int,
    *,
    first: float = 0.0,
    last: float = 0.0,
    pins: Mapping[int, int] | None = None,
    limits: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    least: int = 1,
) -> StageSplit | None:
    """Split ``layer_costs`` over ``stages`` with the smallest heaviest stage, then the smallest sum of squares.

    ``first`` and ``last`` are extra costs of the end stages. ``pins`` fixes the layer count of a stage (by stage id,
    negative ids count from the end). ``limits`` bounds the weight of each stage, where ``weights`` are per-layer
    weights in another unit than the costs (bytes against seconds). Returns None when no split keeps the limits;
    raises ``InputError`` when the pins cannot hold.
    """
    count = len(layer_costs)
    fixed = _checked_pins(count, stages, pins or {}, least)
    costs = (0.0, *accumulate(layer_costs))
    loads = (0.0, *accumulate(weights if weights is not None else layer_costs))
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last

    def counts(stage: int) -> range:
        return range(fixed[stage], fixed[stage] + 1) if stage in fixed else range(least, count + 1)

    def run(cap: float, *, squares: bool) -> tuple[int, ...] | None:
        """Best split with no stage above ``cap``: by the sum of squares, or by the heaviest stage."""
        best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
        for stage in range(stages):
            row: dict[int, tuple[float, int]] = {}
            room = cap * (stages - stage - 1) - (last if stage < stages - 1 else 0.0)  # what the later stages can take
            for start, (value, _) in best[stage].items():
                for size in counts(stage):
                    end = start + size
                    if end > count:
                        break
                    cost = costs[end] - costs[start] + extra[stage]
                    if cost > cap or (limits is not None and loads[end] - loads[start] > limits[stage]):
                        break
                    if costs[count] - costs[end] > room:
                        continue
                    new = value + cost * cost if squares else max(value, cost)
                    if end not in row or new < row[end][0]:
                        row[end] = (new, start)
            best.append(row)
        if count not in best[stages]:
            return None
        layers: list[int] = []
        end = count
        for stage in range(stages, 0, -1):
            start = best[stage][end][1]
            layers.append(end - start)
            end = start
        return tuple(reversed(layers))

    if limits is not None and not fixed and not _can_hold(loads, limits, least):
        return None
    # a cap near the average keeps the table narrow; it grows until a split is found
    cap = ((costs[count] + first + last) / stages + max(layer_costs)) * (1 + _TOLERANCE)
    smallest_max = run(cap, squares=False)
    while smallest_max is None and cap < costs[count] + first + last:
        cap *= 1.25
        smallest_max = run(cap, squares=False)
    if smallest_max is None:
        return None
    heaviest = split_costs(layer_costs, smallest_max, first=first, last=last).heaviest
    layers = run(heaviest * (1 + _TOLERANCE), squares=True) or smallest_max
    return split_costs(layer_costs, layers, first=first, last=last)


def _can_hold(loads: Sequence[float], limits: Sequence[float], least: int) -> bool:
    """Whether the stages, each filled to its limit in turn, take all layers."""
    start, count = 0, len(loads) - 1
    for stage, limit in enumerate(limits):
        end = bisect_right(loads, loads[start] + limit) - 1
        if end - start < least:
            return False
        start = min(end, count - least * (len(limits) - stage - 1))
    return start == count


def _checked_pins(count: int, stages: int, pins: Mapping[int, int], least: int) -> dict[int, int]:
    if stages < 1 or stages * least > count:
        raise InputError(
            given=f"{stages} stages for {count} layers",
            why=f"every stage needs at least {least} layer(s), {stages * least} in all",
            try_=f"1 to {count // max(least, 1)} stages",
        )
    fixed = {stage + stages if stage < 0 else stage: size for stage, size in pins.items()}
    outside = [stage for stage in fixed if not 0 <= stage < stages]
    total, free = sum(fixed.values()), stages - len(fixed)
    text = ", ".join(f"stage {stage}: {size}" for stage, size in sorted(fixed.items()))
    if outside:
        raise InputError(given=f"pinned {text}", why=f"there are {stages} stages, 0 to {stages - 1}", try_="pins on those stages")
    if any(size < least for size in fixed.values()) or (total != count if free == 0 else total + free * least > count):
        rest = f" plus {free} free stage(s) of at least {least}" if free else ""
        raise InputError(
            given=f"pinned {text}",
            why=f"the pins sum to {total}{rest}, the model has {count} layers",
            try_=f"pins that leave {'nothing' if free == 0 else f'at least {free * least} layers'} of {count}",
        )
    return fixed

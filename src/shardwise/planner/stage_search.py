"""Uneven pipeline stages: the exact best split of layers over stages.

A stage is a contiguous run of layers. The best split has the smallest heaviest stage, and among those the smallest
sum of squares (the most even one). Both are found by dynamic programming over (stage, layers used), so the answer is
exact, not a heuristic.
"""

from __future__ import annotations

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


class StageCosts:
    """Cost of layers ``start`` to ``end`` on a stage: their own costs, plus ``kept`` times the stage's factor, plus the stage's extra.

    With bytes: state of a layer, activations of a layer per micro batch, micro batches in flight, embedding or head.
    """

    def __init__(
        self, layers: Sequence[float], extra: Sequence[float], *, kept: Sequence[float] = (), factors: Sequence[float] = ()
    ) -> None:
        self.count, self.stages = len(layers), len(extra)
        self.extra, self.factors = tuple(extra), tuple(factors) or (0.0,) * len(extra)
        self._own = (0.0, *accumulate(layers))
        self._kept = (0.0, *accumulate(kept)) if kept else (0.0,) * (len(layers) + 1)
        self.largest = max(layers, default=0.0) + max(kept, default=0.0) * max(self.factors)
        self._lines: dict[float, list[float]] = {}
        self.uniform = len(set(layers)) <= 1 and len(set(kept)) <= 1
        least = min(self.factors)
        self._rest = [self._own[-1] - own + least * (self._kept[-1] - held) for own, held in zip(self._own, self._kept)]
        self._later = [sum(self.extra[stage + 1 :]) for stage in range(self.stages)]

    def line(self, stage: int) -> list[float]:
        """Cost of the first n layers on a stage without its extra: of layers a to b, ``line[b] - line[a] + extra[stage]``."""
        factor = self.factors[stage]
        if factor not in self._lines:
            self._lines[factor] = [own + factor * kept for own, kept in zip(self._own, self._kept)]
        return self._lines[factor]

    def of(self, stage: int, start: int, end: int) -> float:
        line = self.line(stage)
        return line[end] - line[start] + self.extra[stage]

    def rest(self, stage: int) -> list[float]:
        """At least this is left for the stages after ``stage`` when it ends at a layer."""
        later = self._later[stage]
        return [rest + later for rest in self._rest]

    @property
    def total(self) -> float:
        """At least what all stages cost together."""
        return self._rest[0] + sum(self.extra)

    def split(self, layers: Sequence[int]) -> StageSplit:
        ends = tuple(accumulate(layers))
        costs = tuple(self.of(stage, end - size, end) for stage, (size, end) in enumerate(zip(layers, ends)))
        return StageSplit(layers=tuple(layers), costs=costs)


def _end_costs(layer_costs: Sequence[float], stages: int, first: float, last: float) -> StageCosts:
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last
    return StageCosts(layer_costs, extra)


def split_costs(layer_costs: Sequence[float], layers: Sequence[int], *, first: float = 0.0, last: float = 0.0) -> StageSplit:
    """Cost of every stage of a given split; ``first`` and ``last`` are added to the end stages (embedding, head)."""
    if sum(layers) != len(layer_costs):
        raise InputError(
            given=f"stages {list(layers)}",
            why=f"they sum to {sum(layers)} layers, the model has {len(layer_costs)}",
            try_=f"stages that sum to {len(layer_costs)}",
        )
    return _end_costs(layer_costs, len(layers), first, last).split(layers)


def best_split(
    layer_costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0, pins: Mapping[int, int] | None = None
) -> StageSplit:
    """Split ``layer_costs`` over ``stages`` with the smallest heaviest stage, then the smallest sum of squares.

    ``first`` and ``last`` are extra costs of the end stages. ``pins`` fixes the layer count of a stage (by stage id, negative
    ids count from the end). Raises `InputError` when no split keeps them.
    """
    lows = [1] * stages
    fixed = _checked_pins(len(layer_costs), lows, pins or {})
    split = cheapest(_end_costs(layer_costs, stages, first, last), lows=lows, fixed=fixed)
    assert split is not None  # the pins leave every free stage a layer
    return split


def cheapest(
    costs: StageCosts,
    *,
    lows: Sequence[int],
    fixed: Mapping[int, int] | None = None,
    loads: StageCosts | None = None,
    budget: float = 0.0,
) -> StageSplit | None:
    """The split with the smallest heaviest stage by ``costs`` in which no stage has a load above ``budget``; None if there is none.

    ``lows``: fewest layers of each stage. ``fixed``: layers of some stages.
    """
    pins = fixed or {}
    found = None if pins else _filled(costs, lows, loads, budget)
    if not costs.uniform or pins:  # a stage may have to stop early so that a heavy layer or a pin falls on another one
        cap = costs.split(found).heaviest * (1 + _TOLERANCE) if found else float("inf")
        found = _table(costs, lows, pins, loads, budget, cap, squares=False)
    if found is None:
        return None
    heaviest = costs.split(found).heaviest * (1 + _TOLERANCE)
    return costs.split(_table(costs, lows, pins, loads, budget, heaviest, squares=True) or found)


def _filled(costs: StageCosts, lows: Sequence[int], loads: StageCosts | None, budget: float) -> tuple[int, ...] | None:
    """Fill each stage up to a cap, and raise the cap to the next cost that changes a stage.

    The smallest heaviest stage when all layers are alike, near it otherwise.
    """
    count = costs.count
    cap = costs.total / costs.stages
    while True:
        start, later, layers = 0, sum(lows), []
        following = float("inf")  # the least cap that lets some stage take one layer more
        for stage, low in enumerate(lows):
            later -= low
            end = start + low
            if end > count or (low and loads is not None and loads.of(stage, start, end) > budget):
                return None
            line, base = costs.line(stage), costs.extra[stage]
            if line[end] - line[start] + base > cap:
                following = min(following, line[end] - line[start] + base)
                break
            room = budget - loads.extra[stage] if loads is not None else 0.0
            weights = loads.line(stage) if loads is not None else None
            while end < count - later:
                if weights is not None and weights[end + 1] - weights[start] > room:
                    break
                cost = line[end + 1] - line[start] + base
                if cost > cap:
                    following = min(following, cost)
                    break
                end += 1
            layers.append(end - start)
            start = end
        else:
            if start == count:
                return tuple(layers)
        if following == float("inf"):
            return None
        cap = following


def _table(
    costs: StageCosts, lows: Sequence[int], fixed: Mapping[int, int], loads: StageCosts | None, budget: float, cap: float, *, squares: bool
) -> tuple[int, ...] | None:
    """Best split with no stage above ``cap``: by the sum of squares, or by the heaviest stage."""
    count, stages = costs.count, costs.stages
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(stages):
        row: dict[int, tuple[float, int]] = {}
        room = cap * (stages - stage - 1) if stage < stages - 1 else 0.0
        low, high = (fixed[stage], fixed[stage]) if stage in fixed else (lows[stage], count)
        line, base, rest = costs.line(stage), costs.extra[stage], costs.rest(stage)
        weights = loads.line(stage) if loads is not None else None
        space = budget - loads.extra[stage] if loads is not None else 0.0
        for start, (value, _) in best[stage].items():
            for end in range(start + low, min(start + high, count) + 1):
                cost = line[end] - line[start] + base
                if cost > cap or (weights is not None and weights[end] - weights[start] > space):
                    break
                if rest[end] > room:
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


def _checked_pins(count: int, lows: Sequence[int], pins: Mapping[int, int]) -> dict[int, int]:
    """Pins by stage id. Raises `InputError` when no split can keep them."""
    stages = len(lows)
    if stages < 1 or sum(lows) > count:
        raise InputError(
            given=f"{stages} stages for {count} layers",
            why=f"every stage needs at least one layer, {sum(lows)} in all",
            try_=f"1 to {count} stages",
        )
    fixed = {stage + stages if stage < 0 else stage: size for stage, size in pins.items()}
    text = ", ".join(f"stage {stage}: {size}" for stage, size in sorted(fixed.items()))
    if any(not 0 <= stage < stages for stage in fixed):
        raise InputError(given=f"pinned {text}", why=f"there are {stages} stages, 0 to {stages - 1}", try_="pins on those stages")
    total, free = sum(fixed.values()), [low for stage, low in enumerate(lows) if stage not in fixed]
    small = any(size < lows[stage] for stage, size in fixed.items())
    if small or (total + sum(free) > count if free else total != count):
        rest = f" plus {len(free)} free stage(s) with at least {sum(free)}" if free else ""
        raise InputError(
            given=f"pinned {text}",
            why=f"the pins sum to {total}{rest}, the model has {count} layers",
            try_=f"pins that leave {f'at least {sum(free)} layers' if free else 'nothing'} of {count}",
        )
    return fixed

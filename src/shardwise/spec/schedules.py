"""Pipeline schedules as lists of actions per rank, used to predict a step and to run it.

gpipe         all forwards, then all backwards (Huang et al., arXiv:1811.06965)
1f1b          one forward, one backward; interleaved when vpp > 1 (Narayanan et al., arXiv:2104.04473)
zb-h1, zb-h2  backward split into input and weight gradients, weight gradients fill the bubble (Qi et al., arXiv:2401.10241)
zbv           the same on stages folded into a V, two per rank (Qi et al., arXiv:2405.15362)
dualpipe      micro batches enter from both ends, two stages per rank (DeepSeek-V3 report, arXiv:2412.19437)
dualpipev     the same folded into a V, so that weights exist once

The first two are written down directly; the others come from one list scheduler that never lets a stage hold more micro batches than
the schedule allows, takes forwards and input gradients in turn, and fills the rest with weight gradients.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from shardwise.errors import ShardwiseError
from shardwise.spec.layout import Layout
from shardwise.spec.stages import rank_of_stage


class Action(NamedTuple):
    """One unit of work. F forward, B backward, I input gradient only, W weight gradient only (B = I then W)."""

    kind: Literal["F", "B", "I", "W"]
    stage: int
    microbatch: int


Actions = tuple[tuple[Action, ...], ...]  # one list per pipeline rank


def action_rank(layout: Layout, stage: int, microbatch: int) -> int:
    """Pipeline rank that runs `stage` for `microbatch`. The second half of the micro batches of dualpipe runs mirrored."""
    rank = rank_of_stage(layout, stage)
    if layout.schedule == "dualpipe" and microbatch >= (layout.microbatches + 1) // 2:
        return layout.pp - 1 - rank
    return rank


def actions(layout: Layout) -> Actions:
    """Action lists of the layout's schedule, one per pipeline rank. Raises `ShardwiseError` if the schedule cannot take the layout."""
    p, v, m = layout.pp, layout.vpp, layout.microbatches
    if m < 1:
        raise ShardwiseError(f"no micro batch: gbs={layout.gbs} is less than mbs * dp = {layout.mbs} * {layout.dp}")
    needed = {"1f1b": v, "gpipe": v, "zbv": 2, "dualpipev": 2}.get(layout.schedule, 1)
    if v != needed:
        raise ShardwiseError(f"schedule {layout.schedule} has {needed} stage(s) per rank, got vpp={v}")
    group = layout.vpp_group or p
    if layout.schedule == "1f1b" and v > 1 and not (p <= group <= m and (m % group == 0 or m % group >= p)):
        why = f"{m} micro batches in groups of {group} on {p} ranks: the group must be {p} to {m} and the rest 0 or at least {p}"
        raise ShardwiseError(f"interleaved schedule: {why}")
    return _actions(layout.schedule, p, v, m, group)


@lru_cache(maxsize=256)
def _actions(schedule: str, p: int, v: int, m: int, group: int) -> Actions:
    if schedule == "gpipe":
        return tuple(
            (
                *(Action("F", chunk * p + r, i) for chunk in range(v) for i in range(m)),
                *(Action("B", chunk * p + r, i) for chunk in reversed(range(v)) for i in range(m)),
            )
            for r in range(p)
        )
    if schedule == "1f1b":
        return tuple(_one_forward_one_backward(r, p, v, m, group) for r in range(p))
    return _list_schedule(schedule, p, v, m)


def _one_forward_one_backward(r: int, p: int, v: int, m: int, group: int) -> tuple[Action, ...]:
    """Micro batches go in groups through the rank's chunks; backwards take the chunks in reverse order."""
    order = [(chunk, i) for start in range(0, m, group) for chunk in range(v) for i in range(start, min(start + group, m))]
    forward = [Action("F", chunk * p + r, i) for chunk, i in order]
    backward = [Action("B", (v - 1 - chunk) * p + r, i) for chunk, i in order]
    warmup = min(p - r - 1 if v == 1 else 2 * (p - r - 1) + (v - 1) * group, m * v)
    result = forward[:warmup]
    for f, b in zip(forward[warmup:], backward):
        result += (f, b)
    return (*result, *backward[m * v - warmup :])


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """Micro batches held: on one stage, by one rank over its stages, and alive in the whole pipeline."""

    stage: tuple[int, ...]
    rank: int
    alive: int


def _limits(schedule: str, p: int, m: int) -> _Limits:
    free = 2 * p * m + 1
    if schedule == "zb-h1":
        return _Limits(stage=(p,) * p, rank=free, alive=free)
    if schedule == "zb-h2":
        return _Limits(stage=(2 * p - 1,) * p, rank=free, alive=free)
    if schedule == "zbv":
        return _Limits(stage=(free,) * 2 * p, rank=2 * p, alive=p)
    stages = p if schedule == "dualpipe" else 2 * p
    return _Limits(stage=tuple(range(stages, 0, -1)), rank=free, alive=free)


class _Rank:
    """Queues of one rank while a schedule is being made."""

    def __init__(self) -> None:
        self.inputs: list[tuple[int, int]] = []  # ready input gradients: (micro batch, stage), oldest first
        self.forwards: list[tuple[int, int]] = []  # ready forwards: (-stage, micro batch), deepest first
        self.weights: list[tuple[int, int]] = []  # weight gradients left over: (micro batch, stage)
        self.held: dict[int, int] = {}  # micro batches held, by stage
        self.after_forward = True

    def take_input(self) -> Action | None:
        if not self.inputs:
            return None
        i, s = heapq.heappop(self.inputs)
        return Action("I", s, i)

    def take_forward(self, limits: _Limits, alive: int) -> Action | None:
        full = sum(self.held.values()) >= limits.rank
        blocked = []
        found = None
        while self.forwards and found is None and not full:
            entry = heapq.heappop(self.forwards)
            s, i = -entry[0], entry[1]
            if self.held.get(s, 0) >= limits.stage[s] or (s == 0 and alive >= limits.alive):
                blocked.append(entry)
                if s == 0:
                    break
            else:
                found = Action("F", s, i)
        for entry in blocked:
            heapq.heappush(self.forwards, entry)
        return found

    def take_weight(self) -> Action | None:
        if not self.weights:
            return None
        i, s = heapq.heappop(self.weights)
        return Action("W", s, i)

    def take(self, limits: _Limits, alive: int) -> Action | None:
        """The next action, if one can run now: forwards and input gradients in turn, else a weight gradient."""
        if self.after_forward:
            action = self.take_input() or self.take_forward(limits, alive) or self.take_weight()
        else:
            action = self.take_forward(limits, alive) or self.take_input() or self.take_weight()
        if action is None:
            return None
        kind, s, i = action
        if kind == "F":
            self.held[s] = self.held.get(s, 0) + 1
            self.after_forward = True
        elif kind == "I":
            heapq.heappush(self.weights, (i, s))
            self.after_forward = False
        else:
            self.held[s] -= 1
        return action


def _list_schedule(schedule: str, p: int, v: int, m: int) -> Actions:
    """Greedy schedule in unit time steps under the limits of `schedule`."""
    layout = Layout(pp=p, vpp=v, schedule=schedule, gbs=m)  # type: ignore[arg-type]
    limits, last = _limits(schedule, p, m), p * v - 1
    ranks = [_Rank() for _ in range(p)]
    lists: list[list[Action]] = [[] for _ in range(p)]
    alive = done = 0
    for i in range(m):
        heapq.heappush(ranks[action_rank(layout, 0, i)].forwards, (0, i))
    while done < 3 * m * (last + 1):
        ended = []
        for rank in range(p):
            action = ranks[rank].take(limits, alive)
            if action is not None:
                lists[rank].append(action)
                ended.append(action)
                if action.stage == 0 and action.kind != "W":
                    alive += 1 if action.kind == "F" else -1
        done += len(ended)
        for kind, s, i in ended:
            if kind == "F" and s < last:
                heapq.heappush(ranks[action_rank(layout, s + 1, i)].forwards, (-(s + 1), i))
            elif kind == "F":
                heapq.heappush(ranks[action_rank(layout, s, i)].inputs, (i, s))
            elif kind == "I" and s > 0:
                heapq.heappush(ranks[action_rank(layout, s - 1, i)].inputs, (i, s - 1))
    return tuple(tuple(each) for each in lists)


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds one micro batch takes on one stage. A whole backward takes input_grad + weight_grad."""

    forward: float
    input_grad: float
    weight_grad: float

    def of(self, kind: str) -> float:
        if kind == "F":
            return self.forward
        if kind == "B":
            return self.input_grad + self.weight_grad
        return self.input_grad if kind == "I" else self.weight_grad


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step: start and end of every action, seconds; per rank in the order of its list."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]

    @property
    def makespan(self) -> float:
        return max((span[-1][2] for span in self.spans if span), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds each rank computes."""
        return tuple(sum(end - start for _, start, end in span) for span in self.spans)

    @property
    def bubble(self) -> float:
        """Idle share of the busiest rank's time: makespan / busiest - 1."""
        return self.makespan / max(self.busy) - 1 if any(self.busy) else 0.0


def simulate(lists: Actions, times: Sequence[StageTimes], p2p: float = 0.0) -> Timeline:
    """Runs action lists in order, each action as soon as its rank is free and its inputs are there.

    p2p: seconds from the end of an action to its result on another rank. Raises `ShardwiseError` when the lists wait on each other.
    """
    last = len(times) - 1
    end: dict[tuple[str, int, int], tuple[float, int]] = {}  # (F or backward, stage, micro batch): time, rank
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in lists]
    clock = [0.0] * len(lists)
    waiting: dict[tuple[str, int, int], int] = {}  # what a stopped rank waits for
    runnable = list(range(len(lists)))
    while runnable:
        rank = runnable.pop()
        todo = lists[rank]
        while len(spans[rank]) < len(todo):
            action = todo[len(spans[rank])]
            kind, s, i = action
            if kind == "F":
                needs = [("F", s - 1, i)] if s else []
            elif kind == "W":
                needs = [("I", s, i)]
            else:
                needs = [("F", s, i)] + ([("I", s + 1, i)] if s < last else [])
            missing = next((need for need in needs if need not in end), None)
            if missing is not None:
                waiting[missing] = rank
                break
            start = clock[rank]
            for need in needs:
                when, where = end[need]
                start = max(start, when + (p2p if where != rank else 0.0))
            clock[rank] = start + times[s].of(kind)
            spans[rank].append((action, start, clock[rank]))
            made = ("I" if kind == "B" else kind, s, i)
            end[made] = (clock[rank], rank)
            if made in waiting:
                runnable.append(waiting.pop(made))
    stuck = [f"rank {r} at {todo[len(spans[r])]}" for r, todo in enumerate(lists) if len(spans[r]) < len(todo)]
    if stuck:
        raise ShardwiseError("schedule waits on itself: " + "; ".join(stuck))
    return Timeline(spans=tuple(tuple(span) for span in spans))


def makespan(layout: Layout, times: Sequence[StageTimes], p2p: float = 0.0) -> float:
    """Seconds of the pipelined part of a step.

    In its steady state a schedule repeats, so long steps are simulated short and continued at the pace of their last groups.
    """
    period = (layout.vpp_group or layout.pp) * (2 if layout.schedule == "dualpipe" else 1)
    warm = 4 * max(period, 2 * layout.pp)
    m = layout.microbatches
    if m <= warm + 3 * period:
        return simulate(actions(layout), times, p2p).makespan
    short = warm + (m - warm) % period
    per_sample = layout.mbs * layout.dp
    first, second = (simulate(actions(layout.replace(gbs=n * per_sample)), times, p2p).makespan for n in (short, short + period))
    return first + (second - first) * (m - short) / period


def peak_held(actions_of_rank: Sequence[Action], saved: Sequence[float], kept: Sequence[float] | None = None) -> float:
    """Largest sum of activations a rank holds at once.

    saved[s]: what one micro batch keeps on stage s from its forward to its backward. kept[s]: what remains of it between the input
    gradient and the weight gradient (default: all). With `saved` all 1 the result counts micro batches in flight.
    """
    kept = saved if kept is None else kept
    held = peak = 0.0
    for kind, s, _ in actions_of_rank:
        if kind == "F":
            held += saved[s]
            peak = max(peak, held)
        elif kind == "B":
            held -= saved[s]
        elif kind == "I":
            held -= saved[s] - kept[s]
        else:
            held -= kept[s]
    return peak

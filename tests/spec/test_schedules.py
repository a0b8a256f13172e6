from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ShardwiseError
from shardwise.spec.layout import Layout
from shardwise.spec.schedules import Action, StageTimes, action_rank, actions, makespan, peak_held, simulate

UNIT = StageTimes(forward=1.0, input_grad=1.0, weight_grad=1.0)
SPLIT = ("zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev")
FOLDED = ("zbv", "dualpipev")


def layout(schedule: str, pp: int, microbatches: int, vpp: int = 1, group: int | None = None) -> Layout:
    if schedule in FOLDED:
        vpp = 2
    return Layout(pp=pp, vpp=vpp, gbs=microbatches, schedule=schedule, vpp_group=group)  # type: ignore[arg-type]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    schedule = draw(st.sampled_from(["gpipe", "1f1b", *SPLIT]))
    pp = draw(st.integers(1, 6))
    vpp = draw(st.integers(1, 3)) if schedule in ("gpipe", "1f1b") else 1
    group = None
    if schedule == "1f1b" and vpp > 1:
        group = draw(st.integers(pp, pp + 2))
        rest = draw(st.sampled_from([0, *range(pp, group)]))
        return layout(schedule, pp, group * draw(st.integers(1, 3)) + rest, vpp, group)
    return layout(schedule, pp, draw(st.integers(1, 14)), vpp)


@given(layouts(), st.lists(st.floats(0.1, 3), min_size=3, max_size=3), st.floats(0, 1))
@settings(max_examples=150)
def test_every_action_once_on_its_rank_and_no_deadlock(layout: Layout, seconds: list[float], p2p: float) -> None:
    lists = actions(layout)
    backward = ["I", "W"] if layout.schedule in SPLIT else ["B"]
    expected = Counter(
        Action(kind, stage, i)  # type: ignore[arg-type]
        for kind in ["F", *backward]
        for stage in range(layout.stages)
        for i in range(layout.microbatches)
    )
    assert Counter(action for each in lists for action in each) == expected
    assert all(action_rank(layout, action.stage, action.microbatch) == rank for rank, each in enumerate(lists) for action in each)
    times = [StageTimes(forward=seconds[0], input_grad=seconds[1], weight_grad=seconds[2])] * layout.stages
    timeline = simulate(lists, times, p2p)
    check_dependencies(layout, timeline.spans, p2p)
    assert timeline.makespan >= max(timeline.busy) - 1e-9


def check_dependencies(layout: Layout, spans, p2p: float) -> None:
    """Independent of the simulator's own loop: every action starts after what it reads."""
    start, end, rank_of = {}, {}, {}
    for rank, span in enumerate(spans):
        clock = 0.0
        for action, begin, finish in span:
            assert begin >= clock - 1e-9
            clock = finish
            kinds = ("I", "W") if action.kind == "B" else (action.kind,)
            for kind in kinds:
                key = (kind, action.stage, action.microbatch)
                start[key], end[key], rank_of[key] = begin, finish, rank
            if action.kind == "B":
                start.pop(("W", action.stage, action.microbatch))
    for kind, stage, i in start:
        before = {
            "F": [("F", stage - 1, i)] if stage else [],
            "I": [("F", stage, i)] + ([("I", stage + 1, i)] if stage + 1 < layout.stages else []),
            "W": [("I", stage, i)],
        }[kind]
        for need in before:
            delay = 0.0 if rank_of[need] == rank_of[kind, stage, i] else p2p
            assert start[kind, stage, i] >= end[need] + delay - 1e-9


@given(st.integers(1, 8), st.integers(1, 20))
def test_bubble_of_one_forward_one_backward(pp: int, m: int) -> None:
    for schedule in ("gpipe", "1f1b"):
        chosen = layout(schedule, pp, m)
        assert simulate(actions(chosen), [UNIT] * pp).makespan == pytest.approx(3 * (m + pp - 1))


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 4))
def test_interleaving_divides_the_bubble(pp: int, vpp: int, times: int) -> None:
    m = pp * times
    chunk = StageTimes(forward=1 / vpp, input_grad=1 / vpp, weight_grad=1 / vpp)
    found = simulate(actions(layout("1f1b", pp, m, vpp)), [chunk] * pp * vpp).makespan
    assert found == pytest.approx(3 * m + 3 * (pp - 1) / vpp)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("times", [2, 4])
def test_zero_bubble_schedules_leave_only_the_skew(pp: int, times: int) -> None:
    m = pp * times
    busy = 3 * m
    h1 = simulate(actions(layout("zb-h1", pp, m)), [UNIT] * pp)
    assert h1.makespan == pytest.approx(busy + pp - 1)  # (p - 1)(F + I - W), arXiv:2401.10241
    h2 = simulate(actions(layout("zb-h2", pp, m)), [UNIT] * pp)
    assert h2.makespan == pytest.approx(busy + pp - 1)
    assert all(span[-1][2] - span[0][1] == pytest.approx(busy) for span in h2.spans)  # no rank idles between its first and last action
    half = StageTimes(forward=0.5, input_grad=0.5, weight_grad=0.5)
    zbv = simulate(actions(layout("zbv", pp, m)), [half] * 2 * pp)
    assert zbv.makespan == pytest.approx(busy + (pp - 1) / 2)
    for schedule, stage_times in (("dualpipe", [UNIT] * pp), ("dualpipev", [half] * 2 * pp)):
        assert simulate(actions(layout(schedule, pp, m)), stage_times).makespan < busy + 1.5 * (pp - 1)


@given(st.integers(1, 8), st.integers(1, 20))
def test_micro_batches_in_flight(pp: int, m: int) -> None:
    def peaks(schedule: str) -> list[float]:
        chosen = layout(schedule, pp, m)
        return [peak_held(each, [1.0] * chosen.stages) for each in actions(chosen)]

    assert peaks("gpipe") == [m] * pp
    assert peaks("1f1b") == [min(m, pp - rank) for rank in range(pp)]
    assert max(peaks("zb-h1")) <= min(m, pp)
    assert max(peaks("zb-h2")) <= min(m, 2 * pp - 1)
    assert max(peaks("zbv")) <= 2 * min(m, pp)
    assert max(peaks("dualpipe")) <= pp + 1
    assert max(peaks("dualpipev")) <= 2 * pp + 1


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 3), st.integers(0, 2))
def test_chunks_in_flight_when_interleaved(pp: int, vpp: int, times: int, wider: int) -> None:
    group = pp + wider
    chosen = layout("1f1b", pp, group * times, vpp, group)
    for rank, each in enumerate(actions(chosen)):
        expected = min(chosen.microbatches * vpp, 2 * (pp - rank - 1) + (vpp - 1) * group + 1)
        assert peak_held(each, [1.0] * chosen.stages) == expected


def test_first_rank_of_interleaving_holds_more_than_all_layers() -> None:
    # L (1 + (p - 1) / (p v)) layers on rank 0 (arXiv:2205.05198)
    pp, vpp = 4, 5
    chosen = layout("1f1b", pp, 16, vpp)
    layers = peak_held(actions(chosen)[0], [80 / (pp * vpp)] * chosen.stages)
    assert layers == pytest.approx(80 * (1 + (pp - 1) / (pp * vpp)))


def test_held_weights_between_input_and_weight_gradient() -> None:
    one = (Action("F", 0, 0), Action("I", 0, 0), Action("F", 0, 1), Action("W", 0, 0), Action("I", 0, 1), Action("W", 0, 1))
    assert peak_held(one, [10.0], [4.0]) == 14.0
    assert peak_held(one, [10.0]) == 20.0


def test_uneven_stages_run_at_the_pace_of_the_slowest() -> None:
    times = [StageTimes(forward=1, input_grad=1, weight_grad=1), StageTimes(forward=2, input_grad=2, weight_grad=2)]
    # sum of all stages once, then the slowest one (Narayanan et al.)
    assert simulate(actions(layout("1f1b", 2, 8)), times).makespan == pytest.approx(3 + 6 + 7 * 6)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv", "dualpipe", "dualpipev"])
def test_long_steps_continue_at_the_steady_pace(schedule: str) -> None:
    chosen = layout(schedule, 4, 120, vpp=3 if schedule == "1f1b" else 1)
    times = [StageTimes(forward=1 + 0.1 * s, input_grad=1.3, weight_grad=0.8) for s in range(chosen.stages)]
    exact = simulate(actions(chosen), times, 0.05).makespan
    assert makespan(chosen, times, 0.05) == pytest.approx(exact, rel=2e-3)


def test_lists_that_wait_on_each_other_are_refused() -> None:
    lists = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    with pytest.raises(ShardwiseError, match=r"rank 0 at .*rank 1 at"):
        simulate(lists, [UNIT, UNIT])


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (Layout(pp=4, vpp=2, gbs=6), "interleaved"),
        (Layout(pp=4, vpp=2, gbs=8, vpp_group=3), "interleaved"),
        (Layout(pp=2, schedule="zbv", gbs=4), "2 stage"),
        (Layout(pp=2, vpp=2, schedule="zb-h1", gbs=4), "1 stage"),
        (Layout(pp=2, mbs=8, gbs=4), "no micro batch"),
    ],
)
def test_schedules_refuse_what_they_cannot_take(bad: Layout, text: str) -> None:
    with pytest.raises(ShardwiseError, match=text):
        actions(bad)

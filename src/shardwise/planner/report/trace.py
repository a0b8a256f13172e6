"""The pipeline schedule of a layout over time: spans for charts, and a Chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
from typing import Any

from shardwise.planner.report.svg import Span
from shardwise.planner.step_time import StepTimeEstimate
from shardwise.spec.layout import Layout
from shardwise.spec.schedules import StageTimes, Timeline, actions, simulate
from shardwise.spec.stages import rank_of_stage

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def timeline(layout: Layout, time: StepTimeEstimate) -> Timeline:
    """The layout's schedule with the predicted seconds of its stages (a rank's time in equal parts over its virtual stages)."""
    times = []
    for stage in range(layout.stages):
        forward, backward = time.stages[rank_of_stage(layout, stage)]
        share = layout.vpp
        times.append(StageTimes(forward=forward / share, input_grad=backward / 2 / share, weight_grad=backward / 2 / share))
    return simulate(actions(layout), times)


def shortened(layout: Layout, most: int = 24) -> Layout:
    """This layout with at most about ``most`` micro batches, enough to see warm-up, steady state and cool-down."""
    micro = layout.microbatches
    wanted = max(most, 2 * layout.pp) if layout.vpp > 1 else max(most, layout.pp + 4)
    if micro <= wanted:
        return layout
    if layout.vpp > 1:
        group = layout.vpp_group or layout.pp
        wanted = -(-wanted // group) * group
    return layout.replace(gbs=min(micro, wanted) * layout.mbs * layout.dp)


def spans(layout: Layout, time: StepTimeEstimate) -> list[Span]:
    """One span per action, rows are pipeline ranks."""
    return [
        Span(
            row=rank,
            start=start,
            end=end,
            kind=KINDS[action.kind],
            label=str(action.microbatch),
            hint=f"{KINDS[action.kind]} of micro batch {action.microbatch}, stage {action.stage}: {start:.4g} to {end:.4g} s",
        )
        for rank, row in enumerate(timeline(layout, time).spans)
        for action, start, end in row
    ]


def chrome_trace(layout: Layout, time: StepTimeEstimate) -> str:
    """JSON of complete events (microseconds), one thread per pipeline rank, and a counter of the micro batches a rank holds."""
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(timeline(layout, time).spans):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}})
        held = 0
        for action, start, end in row:
            name = f"{KINDS[action.kind]} {action.microbatch}"
            where = {"stage": action.stage, "micro batch": action.microbatch}
            events.append(
                {"ph": "X", "name": name, "cat": action.kind, "pid": 0, "tid": rank, "ts": start * 1e6, "dur": (end - start) * 1e6}
            )
            events[-1]["args"] = where
            held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            if action.kind != "I":
                at = start if action.kind == "F" else end
                events.append({"ph": "C", "name": f"held by rank {rank}", "pid": 0, "ts": at * 1e6, "args": {"micro batches": held}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

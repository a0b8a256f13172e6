"""Reports: well-formed, self-contained, true to the numbers they show."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from shardwise.planner.estimator import Estimator
from shardwise.planner.report.page import page, table
from shardwise.planner.report.plan_page import layout_page
from shardwise.planner.report.svg import Bar, Point, Span, scatter, stacked_bars, timeline
from shardwise.planner.report.trace import chrome_trace, shortened, spans
from shardwise.planner.search import Plan
from shardwise.spec.catalog import cluster, model
from shardwise.spec.layout import Layout


def plan_of(layout: Layout) -> Plan:
    estimator = Estimator(model("llama-3.1-8b"), cluster("h100-sxm", layout.world), seq_len=4096)
    return Plan(layout=layout, memory=estimator.memory(layout), time=estimator.step_time(layout))


def rectangles(svg: str) -> list[dict[str, str]]:
    return [element.attrib for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("rect")]


def test_bars_are_as_long_as_their_values() -> None:
    svg = stacked_bars([Bar(label="a", parts=(("x", 3.0), ("y", 1.0)))], unit="GiB", title="t", limit=("GPU", 8.0))
    long, short = [float(each["width"]) for each in rectangles(svg) if float(each["height"]) == 20]
    assert long == pytest.approx(3 * short, rel=1e-3)
    assert "8 GiB" in svg and "4 GiB" in svg


def test_charts_escape_text_and_take_single_points() -> None:
    for svg in (
        stacked_bars([Bar(label="<&>", parts=(("'\"<", 1.0),))], unit="<", title='"'),
        scatter([Point(label="<one>", x=1.0, y=1.0, marked=True)], x_title="<", y_title="&", title="<"),
        timeline([Span(row=0, start=0, end=1, kind="F", label="<", hint="&")], 1, title="&"),
    ):
        ElementTree.fromstring(svg)


def test_page_is_self_contained() -> None:
    text = page("a <b>", "c & d", [table(("x", "y"), [("<", 1)])])
    assert "<b>" not in text and "&lt;b&gt;" in text
    assert not re.search(r"(src|href)=|@import|url\(", text)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=4, dp=2, gbs=64),
        Layout(pp=4, vpp=2, dp=1, gbs=256),
        Layout(pp=4, schedule="zb-h1", gbs=16),
        Layout(dp=8, gbs=8),
    ],
)
def test_timeline_and_trace_hold_every_action_without_overlap(layout: Layout) -> None:
    plan = plan_of(layout)
    shown = shortened(layout)
    assert shown.microbatches <= layout.microbatches
    rows: dict[int, list[tuple[float, float]]] = {}
    for span in spans(shown, plan.time):
        rows.setdefault(span.row, []).append((span.start, span.end))
    assert sorted(rows) == list(range(layout.pp))
    for intervals in rows.values():
        assert all(end <= start + 1e-12 for (_, end), (start, _) in zip(sorted(intervals), sorted(intervals)[1:]))
    events = json.loads(chrome_trace(shown, plan.time))["traceEvents"]
    forwards = [event for event in events if event["ph"] == "X" and event["cat"] == "F"]
    assert len(forwards) == shown.microbatches * layout.stages
    held = [event["args"]["micro batches"] for event in events if event["ph"] == "C"]
    assert min(held) == 0 and max(held) >= 1


def test_layout_page_shows_every_memory_term() -> None:
    plan = plan_of(Layout(pp=4, dp=2, gbs=64))
    text = layout_page(model("llama-3.1-8b"), cluster("h100-sxm", 8), 4096, plan)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    assert all(name.replace("_", " ") in text for name, value in plan.memory.terms.items() if value > 0)

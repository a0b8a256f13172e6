"""Charts as SVG text: stacked bars, scatter plot, timeline. No script, no outside file; colours follow the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 900
_LABEL, _RIGHT = 190, 90
COLOURS = (
    "#3b6fd4", "#e08a2e", "#3f9b6b", "#c4504f", "#8a63c9", "#4aa8b8", "#b5862f", "#d06fa5",
    "#6c7a89", "#93b23c", "#2f5c8f", "#a65628", "#1b998b", "#ad8fd1", "#e3b23c",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One stacked bar: (term, value) parts drawn left to right."""

    label: str
    parts: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        return sum(value for _, value in self.parts)


@dataclass(frozen=True, kw_only=True)
class Point:
    label: str
    x: float
    y: float
    marked: bool = False


@dataclass(frozen=True, kw_only=True)
class Span:
    """One action on the timeline of a row; ``kind`` chooses the colour."""

    row: int
    start: float
    end: float
    kind: str
    label: str
    hint: str


def _svg(height: float, body: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}" xmlns="http://www.w3.org/2000/svg">'
        + "".join(body)
        + "</svg>"
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, colour: str, hint: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.2f}" height="{height:.1f}" fill="{colour}">'
        f"<title>{escape(hint)}</title></rect>"
    )


def _legend(names: Sequence[str], colours: dict[str, str], top: float) -> tuple[list[str], float]:
    """Swatches in rows; returns the SVG parts and the y below them."""
    body, x, y = [], 0.0, top
    for name in names:
        width = 26 + 7.2 * len(name)
        if x + width > WIDTH:
            x, y = 0.0, y + 20
        body += [_rect(x, y - 10, 12, 12, colours[name], name), _text(x + 17, y, name, "small")]
        x += width
    return body, y + 22


def stacked_bars(bars: Sequence[Bar], *, unit: str, title: str, limit: tuple[str, float] | None = None) -> str:
    """Horizontal stacked bars on one scale; ``limit`` draws a labelled vertical line (the memory of a GPU)."""
    names = list(dict.fromkeys(name for bar in bars for name, value in bar.parts if value > 0))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    body, y = _legend(names, colours, 14)
    top = y
    most = max([bar.total for bar in bars] + ([limit[1]] if limit else [])) or 1.0
    scale = (WIDTH - _LABEL - _RIGHT) / most
    for bar in bars:
        body.append(_text(_LABEL - 8, y + 15, bar.label, "small", "end"))
        x = float(_LABEL)
        for name, value in bar.parts:
            if value > 0:
                body.append(_rect(x, y, value * scale, 20, colours[name], f"{bar.label}: {name} {value:.4g} {unit}"))
                x += value * scale
        body.append(_text(x + 6, y + 15, f"{bar.total:.4g} {unit}", "small"))
        y += 27
    if limit:
        x = _LABEL + limit[1] * scale
        body.append(f'<line x1="{x:.1f}" y1="{top - 4:.1f}" x2="{x:.1f}" y2="{y:.1f}" class="limit"/>')
        body.append(_text(x, y + 13, f"{limit[0]} {limit[1]:.4g} {unit}", "small", "middle"))
        y += 18
    return _svg(y + 4, body, title)


def scatter(points: Sequence[Point], *, x_title: str, y_title: str, title: str) -> str:
    """Points with tooltips; marked points are filled, joined by a line and labelled."""
    left, right, top, bottom = 64.0, 24.0, 14.0, 46.0
    height = 340.0
    lows = [min(values) for values in ([p.x for p in points], [p.y for p in points])]
    highs = [max(values) for values in ([p.x for p in points], [p.y for p in points])]
    pads = [(high - low) * 0.06 or abs(high) * 0.1 or 1.0 for low, high in zip(lows, highs)]
    lows = [low - pad for low, pad in zip(lows, pads)]
    highs = [high + pad for high, pad in zip(highs, pads)]

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + (x - lows[0]) / (highs[0] - lows[0]) * (WIDTH - left - right)
        down = top + (highs[1] - y) / (highs[1] - lows[1]) * (height - top - bottom)
        return across, down

    body = [
        f'<rect x="{left}" y="{top}" width="{WIDTH - left - right}" height="{height - top - bottom}" class="frame"/>',
        _text(WIDTH / 2, height - 8, x_title, "small", "middle"),
        f'<text transform="translate(14 {height / 2:.0f}) rotate(-90)" text-anchor="middle" class="small">{escape(y_title)}</text>',
    ]
    for step in range(5):
        x = lows[0] + (highs[0] - lows[0]) * (step + 0.5) / 5
        y = lows[1] + (highs[1] - lows[1]) * (step + 0.5) / 5
        body.append(_text(at(x, 0)[0], height - bottom + 18, f"{x:.3g}", "small", "middle"))
        body.append(_text(left - 6, at(0, y)[1] + 4, f"{y:.3g}", "small", "end"))
    front = sorted((p for p in points if p.marked), key=lambda p: p.x)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(p.x, p.y) for p in front))
    body.append(f'<polyline points="{line}" class="front"/>')
    for point in sorted(points, key=lambda p: p.marked):
        x, y = at(point.x, point.y)
        kind = "mark" if point.marked else "dot"
        radius = 5 if point.marked else 3
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}"><title>{escape(point.label)}</title></circle>')
    return _svg(height, body, title)


def timeline(spans: Sequence[Span], rows: int, *, title: str, row_label: str = "stage") -> str:
    """Actions of every row over time, one colour per kind, with tooltips."""
    kinds = list(dict.fromkeys(span.kind for span in spans))
    colours = {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(kinds)}
    body, top = _legend(kinds, colours, 14)
    end = max((span.end for span in spans), default=1.0) or 1.0
    left = 76
    scale = (WIDTH - left - 6) / end
    pitch = 22 if rows <= 16 else 12
    for row in range(rows):
        body.append(_text(left - 8, top + row * pitch + pitch * 0.7, f"{row_label} {row}", "small", "end"))
    for span in spans:
        x, y, width = left + span.start * scale, top + span.row * pitch, (span.end - span.start) * scale
        body.append(_rect(x, y, width - 0.4, pitch - 3, colours[span.kind], span.hint))
        if width > 7.0 * len(span.label) + 2 and pitch > 15:
            body.append(_text(x + width / 2, y + 14, span.label, "inbar", "middle"))
    y = top + rows * pitch + 14
    body += [_text(left, y, "0", "small"), _text(WIDTH - 6, y, f"{end:.4g} s", "small", "end")]
    return _svg(y + 8, body, title)

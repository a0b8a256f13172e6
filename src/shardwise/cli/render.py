"""Tables and messages for the terminal. Rich is imported when the first table is made."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shardwise.errors import Finding

_WIDEST = 1000  # columns of a table
_COLOUR = {"error": "red", "warning": "yellow", "info": "cyan"}


def console() -> Console:
    from rich.console import Console

    class Piped(Console):
        """Leaves a pipe whose reader went away to the caller; a plain one exits with 1, which is a finding here."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Piped(highlight=False, soft_wrap=False)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def make_table(title: str, columns: Sequence[str], *, text: Sequence[int] = (0,), wrap: Sequence[int] = ()) -> Table:
    """A table whose columns are right-aligned, except those in ``text``; only those in ``wrap`` may break lines."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for i, name in enumerate(columns):
        table.add_column(
            name, justify="left" if i in text else "right", no_wrap=i not in wrap, overflow="fold" if i in wrap else "ellipsis"
        )
    return table


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, text: Sequence[int] = (0,), wrap: Sequence[int] = ()
) -> None:
    """Print the rows, if any; wider than the terminal where cells would be cut otherwise."""
    from rich.measure import Measurement
    from rich.text import Text

    table = make_table(title, columns, text=text, wrap=wrap)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    if table.row_count:
        out = console()
        out.width = max(out.width, Measurement.get(out, out.options.update(width=_WIDEST), table).minimum)
        out.print(table)


class Footnotes:
    """Numbered texts below a table; equal texts share a number."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}

    def mark(self, text: str) -> str:
        return f"[{self._texts.setdefault(text, len(self._texts) + 1)}]"

    def lines(self) -> list[str]:
        return [f"[{number}] {text}" for text, number in self._texts.items()]


def print_findings(findings: Sequence[Finding]) -> None:
    """Findings, errors first, each as rule / given / why / try / source; a blank line after the last."""
    from rich.text import Text

    out = console()
    order = {"error": 0, "warning": 1, "info": 2}
    for finding in sorted(findings, key=lambda f: order[f.severity]):
        label = f"{finding.severity} {finding.rule}"
        head = Text(_folded(finding.given, out.width, f"{label}  "))
        head.stylize(f"bold {_COLOUR[finding.severity]}", 0, len(label))
        out.print(head)
        for name, value in (("why", finding.why), ("try", finding.try_), ("source", finding.source)):
            if value:
                line = Text(_folded(value, out.width, f"  {name:<6} "))
                line.stylize("dim", 0, 8)
                out.print(line)
    if findings:
        out.print()


def _folded(text: str, width: int, start: str) -> str:
    """Text after ``start``, folded to the width with the later lines below the first letter."""
    from textwrap import fill

    return fill(text, width, initial_indent=start, subsequent_indent=" " * min(len(start), 9), break_on_hyphens=False)


def print_lines(lines: Iterable[str]) -> None:
    """Text folded to the terminal; what follows the first line of an indented one is indented further."""
    width = console().width
    for line in lines:
        start = line[: len(line) - len(line.lstrip(" -"))]
        print(_folded(line[len(start) :], width, start) if line else "")


def note(text: str) -> None:
    """Progress and remarks; on stderr, so that piped output stays clean."""
    print(text, file=sys.stderr, flush=True)


def gib(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"

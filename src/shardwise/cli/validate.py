"""`shardwise validate`: predictions against a table of published runs."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli import OK
from shardwise.cli import options as opt
from shardwise.cli.render import note, print_json, print_table
from shardwise.errors import InputError

if TYPE_CHECKING:
    from shardwise.planner.validate import Summary, Validation

Table = Annotated[Path, typer.Argument(metavar="RUNS.csv", help="a table of published runs or of recipes")]
Rows = Annotated[bool, typer.Option("--rows", help="also print every row")]
_NEEDED = ("id", "gpus", "gpu_type", "tp", "pp", "num_layers", "hidden", "seq_len")


def validate(runs: Table, rows: Rows = False, as_json: opt.Json = False) -> int:
    """Predict every run of a table; per row the error or why it cannot be expressed, and a summary by source, GPU and architecture.

    A table of recipes (it has a column `recipe`) is judged instead: is each layout legal, does it fit. Exit code 1 if one is refused.
    """
    table = read_table(runs)
    if "recipe" in table[0]:
        from shardwise.cli.validate_recipes import validate_recipes

        return validate_recipes(table, rows=rows, as_json=as_json)
    from shardwise.planner.validate import validate as judge

    note(f"predicting {len(table)} runs ...")
    result = judge(table)
    if as_json:
        print_json(
            {
                "rows": [_clean(asdict(row)) for row in result.rows],
                "summary": [_clean(asdict(line)) for line in result.summary],
                "sweeps": [_clean(asdict(sweep)) for sweep in result.sweeps],
            }
        )
    else:
        _print(result, rows)
    return OK


def read_table(path: Path) -> list[dict[str, str]]:
    """Rows of the table as text. Raises `InputError` for anything that is not such a table."""
    from shardwise.planner import recipe_table

    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(given=str(path), why="it is a binary file, not a table", try_="a CSV file") from None
    except OSError as error:
        raise InputError(given=str(path), why=error.strerror or str(error), try_="the path of a CSV file") from None
    if "\0" in text:
        raise InputError(given=str(path), why="it is a binary file, not a table", try_="a CSV file")
    try:
        reader = csv.reader(text.splitlines(), strict=True)
        head, *lines = [line for line in reader if line] or [[]]
    except csv.Error as error:
        raise InputError(given=str(path), why=f"the CSV is broken: {error}", try_="a whole file; it may have been cut off") from None
    recipes = "recipe" in head
    twice = sorted({name for name in head if head.count(name) > 1})
    if twice:
        raise InputError(given=str(path), why=f"columns appear twice: {', '.join(twice)}", try_="each column once")
    missing = [name for name in (recipe_table.COLUMNS if recipes else _NEEDED) if name not in head]
    if missing:
        raise InputError(
            given=f"{path} with columns {', '.join(head[:8]) or 'none'}",
            why=f"columns are missing: {', '.join(missing)}",
            try_="columns " + ", ".join(recipe_table.COLUMNS if recipes else _NEEDED),
        )
    for number, line in enumerate(lines, 2):
        if len(line) != len(head):
            raise InputError(
                given=f"{path} row {number}",
                why=f"it has {len(line)} fields, the header {len(head)}: the table is cut off or badly quoted",
                try_="the whole table",
            )
    if not lines:
        raise InputError(given=str(path), why="it has a header and no rows", try_="a table with runs")
    return [dict(zip(head, line)) for line in lines]


def _clean(value: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON cannot hold become null."""
    return {key: None if isinstance(item, float) and (item != item or abs(item) == float("inf")) else item for key, item in value.items()}


def _print(result: Validation, rows: bool) -> None:
    if rows:
        lines = [
            (
                row.id,
                _number(row.measured_s),
                _number(row.predicted_s),
                _percent(row.time_error),
                _number(row.measured_gib),
                _number(row.predicted_gib),
                _percent(row.memory_error),
            )
            for row in result.rows
            if row.reason is None
        ]
        print_table("Runs", ("id", "step s", "predicted", "error", "GiB", "predicted", "error"), lines)
    refused = [(row.id, row.reason) for row in result.rows if row.reason is not None]
    if refused:
        shown = refused if rows else refused[:10]
        more = f" (first {len(shown)}; --rows shows all)" if len(shown) < len(refused) else ""
        print_table(f"{len(refused)} rows not expressed{more}", ("id", "why"), shown, text=(0, 1), wrap=(1,))
    for by in dict.fromkeys(line.by for line in result.summary):
        lines = [_summary(line) for line in result.summary if line.by == by and line.covered]
        if lines:
            print_table(f"By {by}", (by, "what", "rows", "covered", "median", "p90", "bias"), lines, text=(0, 1))
    if result.sweeps:
        lines = [(sweep.name[:44], sweep.layouts, f"{sweep.regret:.1%}", f"{sweep.tau:.2f}") for sweep in result.sweeps]
        print_table("Sweeps of one model on one cluster", ("sweep", "layouts", "best within", "tau"), lines)


def _summary(line: Summary) -> tuple[object, ...]:
    what = line.quantity.replace("_", " ")
    return (line.name, what, line.rows, line.covered, _percent(line.median), _percent(line.p90), _percent(line.bias))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}" if value < 0 else f"{value:.1%}"

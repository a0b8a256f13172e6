"""`shardwise recipes`: the recipes by name, or the keys that overrides may set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from shardwise.cli import FINDING, OK
from shardwise.cli import options as opt


def recipes(
    match: Annotated[str | None, typer.Argument(metavar="WORD", show_default=False, help="only names with this word")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="list the keys of overrides instead")] = False,
    as_json: opt.Json = False,
) -> int:
    """Recipes with their model and layout."""
    from shardwise.cli.render import print_json, print_table
    from shardwise.recipes.pretrain import RECIPES
    from shardwise.train.config import RunConfig
    from shardwise.train.overrides import keys as all_keys
    from shardwise.train.plan import layout_of

    if keys:
        names = [key for key in all_keys(RunConfig()) if match is None or match in key]
        print_json(names) if as_json else print("\n".join(names), end="\n" * bool(names))
        return _found(names, f"no key has {match!r} in its name; shardwise recipes --keys lists all")
    rows = []
    for name, make in RECIPES.items():
        if match is None or match in name:
            config = make()
            layout = layout_of(config, 1)
            degrees = " ".join(f"{axis}={getattr(layout, axis)}" for axis in ("tp", "pp", "vpp", "cp", "ep") if getattr(layout, axis) > 1)
            rows.append({"recipe": name, "layout": degrees + " sp" * layout.sp, "seq_length": config.model.seq_length, "gbs": layout.gbs})
    if as_json:
        print_json(rows)
    elif rows:
        print_table("", list(rows[0]), [list(row.values()) for row in rows], text=(0, 1))
    return _found(rows, f"no recipe has {match!r} in its name; shardwise recipes lists all")


def _found(found: Sequence[object], why_not: str) -> int:
    from shardwise.cli.render import note

    if not found:
        note(why_not)
    return OK if found else FINDING

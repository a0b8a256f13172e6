"""Reading the catalog files, each once and when first asked for."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any


@cache
def table(name: str) -> dict[str, Any]:
    text = resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def unknown(kind: str, given: str, known: Iterable[str], listed_by: str) -> str:
    """Message for an unknown name: the nearest known ones, or the command that lists them."""
    near = get_close_matches(given.lower(), list(known), n=3, cutoff=0.5)
    return f"unknown {kind} {given!r}; " + (f"did you mean {', '.join(near)}?" if near else f"`{listed_by}` lists the known ones")

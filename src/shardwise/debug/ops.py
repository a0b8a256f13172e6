"""Which ops have a sharded form, what they do under which placements, and what they say of their communication.

What they do is seen, not said: `ops_seen.json` is written by running the samples of the tests on two ranks (`python -m tests.ops_seen`).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from shardwise.debug.explain import op_name
from shardwise.shard_tensor import registry


@dataclass(frozen=True, kw_only=True)
class SupportedOp:
    """name: as in `explain`. level: `function` (its meaning is kept whole) or `dispatch` (an operator, below autograd).

    communication: what its handler's documentation says, "" where it says nothing of its own.
    placements: what it was seen to do when its tensor arguments lie as the key says, `{"Shard(1), plain": ("exchange",)}`: `local`,
        `exchange` (rows or blocks went to the ranks that need them, or a split moved to another dim), `reduce`, `gather` (an argument
        was completed on every rank) or `refused`; several where it depends on the other arguments. Empty for handlers of your own.
    """

    name: str
    level: Literal["function", "dispatch"]
    communication: str
    placements: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


KINDS = ("local", "exchange", "reduce", "gather", "refused")
SEEN = Path(__file__).with_name("ops_seen.json")


def supported_ops() -> tuple[SupportedOp, ...]:
    """Every function and operator with a handler or rule of its own, sorted by name. All others are gathered or refused (`fallback`)."""
    import shardwise.shard_tensor.ops  # noqa: F401  the handlers register themselves

    found = {}
    for func, handler in registry.functions.items():
        found[op_name(func), "function"] = getattr(handler, "handler", handler)
    for op, rule in registry.rules.items():
        if isinstance(op, torch._ops.OpOverload) and op not in registry.found_rules:
            found[op_name(op), "dispatch"] = rule
    for name, handler in registry.named_functions.items():
        found[name, "function"] = getattr(handler, "handler", handler)
    seen = json.loads(SEEN.read_text())
    alike = {handler: name for (name, _), handler in found.items() if name in seen}  # `Tensor.add` does what `torch.add` does
    return tuple(
        SupportedOp(
            name=name,
            level=level,
            communication=_communication(handler),
            placements={where: tuple(what) for where, what in seen.get(name, seen.get(alike.get(handler), {})).items()},
        )
        for (name, level), handler in sorted(found.items())
    )


def _communication(handler: Callable) -> str:
    """The sentence after `Communication:` in a docstring, on one line."""
    match = re.search(r"Communication: (.*?)(?:\n\s*\n|\n\s*[A-Z]\w+:|\Z)", inspect.getdoc(handler) or "", re.DOTALL)
    return " ".join(match[1].split()) if match else ""


def supported_ops_page() -> str:
    """A Markdown page of `supported_ops()`."""
    lines = [
        "# Ops with a sharded form",
        "",
        "Made by `python -m shardwise.debug.ops`. The middle columns were seen by running each op's test samples on two ranks: under which",
        "placements of its tensor arguments (`plain`: a plain tensor, equal on all ranks) it sends nothing, sends rows or blocks to the",
        "ranks that need them or moves the split to another dim, sums or compares over ranks, completes an argument on every rank, or",
        "refuses on all ranks. A placement stands in several columns where it depends on other arguments (a dim, a kernel size). Any other",
        "op is gathered, with a warning that tells the bytes, or refused under `shardwise.fallback('error')`.",
        "",
        "Two families are served whole and not listed op by op: pointwise operators (those that torch tags so: local for operands that",
        "lie alike, broadcast or are plain; the smaller of two that do not is moved) and random ones (local; equal numbers for any split).",
        "",
        f"| op | level | {' | '.join(KINDS)} | communication |",
        f"| --- | --- |{' --- |' * len(KINDS)} --- |",
    ]
    for op in supported_ops():
        cells = ["; ".join(where for where, what in op.placements.items() if kind in what) for kind in KINDS]
        lines.append(f"| `{op.name}` | {op.level} | {' | '.join(cells)} | {op.communication.replace('|', '/')} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(supported_ops_page(), end="")

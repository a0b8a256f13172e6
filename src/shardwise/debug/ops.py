"""Which ops have a sharded form, and what they say of their communication."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from shardwise.debug.explain import op_name
from shardwise.shard_tensor import registry


@dataclass(frozen=True, kw_only=True)
class SupportedOp:
    """name: as in `explain`. level: `function` (its meaning is kept whole) or `dispatch` (an operator, below autograd).

    communication: what its handler's documentation says, "" where it says nothing of its own.
    """

    name: str
    level: Literal["function", "dispatch"]
    communication: str


def supported_ops() -> tuple[SupportedOp, ...]:
    """Every function and operator with a handler or rule of its own, sorted by name. All others are gathered or refused (`fallback`)."""
    import shardwise.shard_tensor.ops  # noqa: F401  the handlers register themselves

    found = {}
    for func, handler in registry.functions.items():
        found[op_name(func), "function"] = getattr(handler, "handler", handler)
    for op, rule in registry.rules.items():
        if isinstance(op, torch._ops.OpOverload):
            found[op_name(op), "dispatch"] = rule
    return tuple(
        SupportedOp(name=name, level=level, communication=_communication(handler)) for (name, level), handler in sorted(found.items())
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
        "Made by `python -m shardwise.debug.ops`. Any other op is gathered, with a warning that tells the bytes, or refused under",
        "`shardwise.fallback('error')`.",
        "",
        "| op | level | communication |",
        "| --- | --- | --- |",
    ]
    rows = (f"| `{op.name}` | {op.level} | {op.communication.replace('|', '/')} |" for op in supported_ops())
    return "\n".join([*lines, *rows, ""])


if __name__ == "__main__":
    print(supported_ops_page(), end="")

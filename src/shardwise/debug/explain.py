"""What each op of each module sends, in forward and backward, and which ops gather.

print(shardwise.explain(model, (x,)))

with count_by_module(model) as sent:
    F.mse_loss(model(x), y).backward()
print(sent)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.collectives.counter import Communication, Direction, count_communication

Kind = Literal["gathered", "redistributed", "exchanged", "reduced"]
_LOCATION = "shardwise_module"  # key in the metadata of autograd nodes
_KINDS: dict[str, Kind] = {"all_reduce": "reduced", "reduce_scatter": "reduced"}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One collective. kind: `gathered` (the op has no sharded form: its arguments were completed), `redistributed` (a tensor changed
    its layout for the op), `exchanged` (rows or blocks went to those that need them) or `reduced` (sums or extremes over ranks).

    module: path of the innermost module, "" for the outermost. op: the innermost function or operator that met a `ShardTensor`.
    bytes: sent by this rank. where: file and line outside this package and torch; in backward, unknown.
    """

    module: str
    op: str
    kind: Kind
    collective: str
    axis: str
    direction: Direction
    bytes: int
    where: str


class Explanation(Communication):
    """Everything that was sent, op by op; also a `Communication` with its sums."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.module = ""

    @property
    def gathers(self) -> list[Event]:
        """The events of ops that gathered or redistributed: what to look at first when a split saves too little."""
        return [event for event in self.events if event.kind in ("gathered", "redistributed")]

    @property
    def by_module(self) -> dict[str, tuple[int, int]]:
        """(collectives, bytes sent) of each module's own ops."""
        table: dict[str, tuple[int, int]] = {}
        for event in self.events:
            calls, size = table.get(event.module, (0, 0))
            table[event.module] = (calls + 1, size + event.bytes)
        return table

    def add(self, key: tuple[str, str, Direction], size: int) -> None:
        super().add(key, size)
        collective, axis, direction = key
        op, kind, where = _origin(collective)
        self.events.append(
            Event(module=self.module, op=op, kind=kind, collective=collective, axis=axis, direction=direction, bytes=size, where=where)
        )

    def __repr__(self) -> str:
        lines = [f"{self.calls} collectives, {self.bytes:,} bytes sent by this rank"]
        rows: dict[tuple, tuple[int, int]] = {}
        for e in self.events:
            key = (e.direction, e.module or "(outermost)", e.op, e.kind, e.collective, e.axis, e.where)
            calls, size = rows.get(key, (0, 0))
            rows[key] = (calls + 1, size + e.bytes)
        for (direction, module, op, kind, collective, axis, where), (calls, size) in rows.items():
            at = f" at {where}" if where else ""
            lines.append(f"  {direction:8} {module}: {op} {kind}: {calls} x {collective} over {axis}, {size:,} bytes{at}")
        gathered = sorted({e.op for e in self.gathers if e.kind == "gathered"})
        if gathered:
            lines.append(f"  ops without a sharded form, gathered: {', '.join(gathered)}")
        return "\n".join(lines)


def explain(module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Explanation:
    """Run one forward and tell what each op sends. Call it on every rank.

    Returns: an `Explanation`; print it, or read `events`, `gathers` and `by_module`.
    """
    with count_by_module(module) as sent, torch.no_grad():
        module(*inputs, **(kwargs or {}))
    return sent


@contextmanager
def count_by_module(module: nn.Module) -> Iterator[Explanation]:
    """Count what this rank sends inside the block, by the innermost module that asked for it, in forward and backward.

    Sums of weight gradients travel together; they count for the module in which backward is when they start or are waited for.
    Collectives that DDP, FSDP2 or compiled graphs start themselves do not pass through this package and are not counted.
    """
    sent = Explanation()
    handles = []
    for path, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(_Enter(sent, path), with_kwargs=True, prepend=True))
        handles.append(child.register_forward_hook(_Leave(sent, path), with_kwargs=True, always_call=True))
    try:
        with count_communication(sent):
            yield sent
    finally:
        for handle in handles:
            handle.remove()


class _Enter:
    def __init__(self, sent: Explanation, path: str) -> None:
        self.sent, self.path = sent, path

    def __call__(self, module, args, kwargs) -> None:
        if torch._C._current_graph_task_id() == -1:
            _mark(self.sent, (args, kwargs), self.sent.module)
        self.sent.module = self.path


class _Leave:
    def __init__(self, sent: Explanation, path: str) -> None:
        self.sent, self.path = sent, path

    def __call__(self, module, args, kwargs, output) -> None:
        _mark(self.sent, output, self.path)
        self.sent.module = self.path.rpartition(".")[0]


def _mark(sent: Explanation, values: Any, path: str) -> None:
    """Let backward know whose node comes next: the first module to mark a node, the innermost, owns it."""
    for value in tree_leaves(values):
        node = value.grad_fn if isinstance(value, Tensor) else None
        if node is not None and _LOCATION not in node.metadata:
            node.metadata[_LOCATION] = path
            node.register_prehook(lambda *_: setattr(sent, "module", path))


def _origin(collective: str) -> tuple[str, Kind, str]:
    """The op on whose behalf a collective runs, what became of its tensors, and the user's line: read from the stack."""
    kind: Kind = _KINDS.get(collective, "exchanged")
    op, where = "", ""
    frame = sys._getframe(3)
    while frame is not None:
        name, package = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        inside = package.partition(".")[0]
        if package == "shardwise.shard_tensor.fallback" and name == "fallback_rule":
            kind = "gathered"
        elif package == "shardwise.shard_tensor.redistribute" and name == "redistribute_local" and kind == "exchanged":
            kind = "redistributed"
        if not op and package == "shardwise.shard_tensor.tensor" and name in ("__torch_function__", "__torch_dispatch__"):
            op = op_name(frame.f_locals["func"])
        if not where and inside not in ("shardwise", "torch", "contextlib"):
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    if torch._C._current_graph_task_id() != -1:
        where = ""
    if op.endswith(".backward"):
        op = "(autograd)"
    return op or "(between ops)", kind, where


def op_name(func: Any) -> str:
    """`aten.add.Tensor`, `torch.nn.functional.linear`, `Tensor.view`: how a function is written."""
    if isinstance(func, torch._ops.OpOverload):
        return str(func)
    name = getattr(func, "__name__", None) or repr(func)
    owner = getattr(func, "__objclass__", None)
    if owner is not None:
        return f"Tensor.{name}"
    package = getattr(func, "__module__", None)
    return f"{package}.{name}" if package else name

"""What this rank sends: calls and bytes per collective, mesh axis and direction.

Bytes are those that leave this rank, exact for everything sent point to point (all-to-all, exchange, ring shift, uneven gathers), and
those of a bandwidth-optimal algorithm for the rest: all-gather `(n - 1) * shard`, reduce-scatter `total - own shard`, all-reduce
`2 * (n - 1) / n * size` (Thakur, Rabenseifner and Gropp 2005; a floating maximum or minimum carries twice the size, to keep NaN),
broadcast `(n - 1) * size` at the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardwise.mesh.groups import axis_name

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """All calls of one collective on one axis in one direction. `axis` is the mesh dim name, or the description of the group."""

    collective: str
    axis: str
    direction: Direction
    calls: int
    bytes: int


class Communication:
    """The communication of one rank while it was counted."""

    def __init__(self, table: dict[tuple[str, str, Direction], tuple[int, int]] | None = None) -> None:
        self._table = {} if table is None else table

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(
            Record(collective=collective, axis=axis, direction=direction, calls=calls, bytes=size)
            for (collective, axis, direction), (calls, size) in self._table.items()
        )

    @property
    def calls(self) -> int:
        return sum(calls for calls, _ in self._table.values())

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self._table.values())

    @property
    def by_axis(self) -> dict[str, int]:
        """Bytes per mesh axis."""
        result: dict[str, int] = {}
        for (_, axis, _), (_, size) in self._table.items():
            result[axis] = result.get(axis, 0) + size
        return result

    def only(self, *, collective: str | None = None, axis: str | None = None, direction: Direction | None = None) -> Communication:
        """The part with this collective, axis and direction; None stands for any."""
        wanted = (collective, axis, direction)
        return Communication(
            {key: value for key, value in self._table.items() if all(want is None or want == have for want, have in zip(wanted, key))}
        )

    def __repr__(self) -> str:
        lines = [f"Communication: {self.calls} calls, {self.bytes} bytes sent"]
        lines += [f"  {r.direction} {r.collective} over {r.axis}: {r.calls} calls, {r.bytes} bytes" for r in self.records]
        return "\n".join(lines)

    def add(self, key: tuple[str, str, Direction], size: int) -> None:
        calls, before = self._table.get(key, (0, 0))
        self._table[key] = (calls + 1, before + size)


# The default process group tells ranks apart, also where ranks are threads and where autograd runs in a thread of its own.
_counting: list[tuple[Any, Communication]] = []


@contextmanager
def count_communication(into: Communication | None = None) -> Iterator[Communication]:
    """Count what this rank sends through `shardwise.collectives` inside the `with` block, into `into` if given. Blocks may be nested.

    Work is "backward" when it runs inside a backward pass, recomputed activations included. Compiled graphs are not counted.
    """
    entry = (dist.group.WORLD, Communication() if into is None else into)
    _counting.append(entry)
    try:
        yield entry[1]
    finally:
        _counting[:] = [other for other in _counting if other is not entry]


def record(collective: str, group: dist.ProcessGroup, size: int) -> None:
    """Count one call that sends `size` bytes to other ranks of the group."""
    if torch.compiler.is_compiling() or not _counting:
        return
    world = dist.group.WORLD
    key: tuple[str, str, Direction] | None = None
    for owner, communication in _counting:
        if owner is world:
            if key is None:
                key = (collective, axis_name(group), "forward" if torch._C._current_graph_task_id() == -1 else "backward")
            communication.add(key, size)

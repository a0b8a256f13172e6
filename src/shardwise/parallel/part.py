"""Which part of a global tensor a rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.spec.sequence import positions_at, rows_in
from shardwise.spec.spans import Span, Spans


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle: where it lies in the global tensor and in the local one."""

    offsets: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of every dim of a global tensor, in local order: `spans[d]` are the global rows of dim d."""

    shape: tuple[int, ...]
    spans: tuple[Spans, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Part:
        return cls(shape=tuple(shape), spans=tuple(((0, size),) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(rows_in(spans) for spans in self.spans)

    def split(self, dim: int, spans: Spans) -> Part:
        """The same part with other rows of `dim`."""
        dim %= len(self.shape)
        return replace(self, spans=(*self.spans[:dim], spans, *self.spans[dim + 1 :]))

    def rows(self, rows: Span) -> Part:
        """Local rows `rows` of dim 0 of this part. A scalar has none to split."""
        return self.split(0, positions_at(self.spans[0], rows) or ((0, 0),)) if self.shape else self

    def take(self, full: Tensor) -> Tensor:
        """This part of the global tensor, as a new tensor."""
        for dim, spans in enumerate(self.spans):
            if spans != ((0, self.shape[dim]),):
                full = torch.cat([full.narrow(dim, start, stop - start) for start, stop in spans], dim)
        return full.detach().clone()

    def boxes(self) -> Iterator[Box]:
        """Rectangles that make up the part; none when it is empty."""
        placed = []
        for spans in self.spans:
            at, entries = 0, []
            for start, stop in spans:
                if stop > start:
                    entries.append((start, at, stop - start))
                at += stop - start
            placed.append(entries)
        for combination in product(*placed):
            yield Box(
                offsets=tuple(entry[0] for entry in combination),
                local=tuple(entry[1] for entry in combination),
                sizes=tuple(entry[2] for entry in combination),
            )


@dataclass(kw_only=True)
class Held:
    """What is known about one parameter of this rank.

    name: its name in the whole model. part: the rows held before data parallel sharding. pending: groups over which its gradient is
    still to be summed, besides the data parallel one. copies: ranks of one stage replica that hold the same elements. expert: reduced
    over the expert data parallel group. counted: False for the second copy of a tied weight.
    """

    name: str
    part: Part
    expert: bool = False
    pending: list[dist.ProcessGroup] = field(default_factory=list)
    copies: int = 1
    counted: bool = True

"""From a sequence in order of position to a rank's rows, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.functional import all_gather
from shardwise.spec.sequence import rows_in
from shardwise.spec.spans import Span, Spans, spans_of


def local_rows(whole: Tensor, spans: Spans, dim: int) -> Tensor:
    """The rows of `dim` at the positions of `spans`, in their order: what a rank of a token order holds. No communication."""
    return reordered(whole, spans, dim)


def gather_rows(local: Tensor, order: Sequence[Spans], dim: int, group: dist.ProcessGroup) -> Tensor:
    """All rows of `dim` by position, on every rank; the inverse of `local_rows`. Communication: one all-gather; differentiable."""
    rows, _ = position_order(order)
    return reordered(all_gather(local, dim, tuple(map(rows_in, order)), group), rows, dim)


def position_order(order: Sequence[Spans]) -> tuple[Spans, Spans]:
    """For all ranks' rows laid end to end: the runs that put them in order of position, and the runs that undo that."""
    held = [span for spans in order for span in spans if span[1] > span[0]]
    lengths = [stop - start for start, stop in held]
    ascending = sorted(range(len(held)), key=held.__getitem__)
    places = spans_of(lengths)
    by_position = spans_of(lengths[run] for run in ascending)
    back = dict(zip(ascending, by_position, strict=True))
    return tuple(places[run] for run in ascending), tuple(back[run] for run in range(len(held)))


def reordered(x: Tensor, runs: Sequence[Span], dim: int) -> Tensor:
    """These runs of rows of `dim`, one after the other."""
    runs = [run for run in runs if run[1] > run[0]]
    if all(before[1] == after[0] for before, after in pairwise([(0, 0), *runs, (x.shape[dim], 0)])):
        return x
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in (*runs, (0, 0))], dim)

"""Rows moved between ranks by global row number: spans that all ranks know, and lists that only the rank that wants them knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.collectives import functional as comm
from shardwise.collectives.exchange import exchange
from shardwise.shard_tensor.halo import dim_group
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, to_local
from shardwise.spec.spans import Spans, chunk_sizes, spans_of


def take_spans(x: ShardTensor, dim: int, wanted: Sequence[Spans], sizes: tuple[int, ...]) -> ShardTensor:
    """The tensor whose block b of sharded `dim` has the rows `wanted[b]` of `x`, `sizes[b]` in all; differentiable.

    Communication: one exchange of the rows that a rank lacks.
    """
    spec = x._spec
    axes = spec.mesh_dims_of(dim)
    owned = spans_of(spec.sizes[dim])
    local = exchange(to_local(x), owned=owned, wanted=wanted, dim=dim, group=dim_group(spec, axes))
    return from_local(local, resized(spec, dim, sizes))


def resized(spec: ShardTensorSpec, dim: int, sizes: tuple[int, ...]) -> ShardTensorSpec:
    """`spec` with other rows in the blocks of sharded `dim`."""
    shape = (*spec.shape[:dim], sum(sizes), *spec.shape[dim + 1 :])
    return ShardTensorSpec(spec.mesh, spec.placements, shape, (*spec.sizes[:dim], sizes, *spec.sizes[dim + 1 :]), spec.dtype)


def repeat_spans(size: int, repeats: int, blocks: int) -> tuple[list[Spans], tuple[int, ...]]:
    """Which rows of `size` each of `blocks` blocks holds when they are repeated end to end, and how many."""
    sizes = chunk_sizes(size * repeats, blocks)
    wanted = []
    for start, stop in spans_of(sizes):
        pieces = []
        while start < stop:
            end = min(stop, (start // size + 1) * size)
            pieces.append((start % size, start % size + end - start))
            start = end
        wanted.append(tuple(pieces) or ((0, 0),))
    return wanted, sizes


@dataclass(frozen=True, kw_only=True)
class RowRoute:
    """Which rows each rank of a group wants from which: `asked` rows (of this rank's own) for the others in rank order, `place` where a
    row that comes belongs."""

    give: tuple[int, ...]
    take: tuple[int, ...]
    asked: Tensor
    place: Tensor
    group: object


def row_route(wanted: Tensor, sizes: Sequence[int], group) -> RowRoute:
    """The route for this rank's list `wanted` of global rows; rank r owns the next `sizes[r]` rows. Negative rows count from the end.

    Communication: two all-to-alls, of counts and of row numbers. Raises IndexError on all ranks if any rank's list is out of range.
    """
    total = sum(sizes)
    ranks = group.size()
    wrong = bool(((wanted < -total) | (wanted >= total)).any()) if wanted.numel() else False
    wanted = torch.where(wanted < 0, wanted + total, wanted)
    borders = torch.tensor([stop for _, stop in spans_of(sizes)], device=wanted.device)
    owner = torch.bucketize(wanted, borders, right=True)
    order = torch.argsort(owner, stable=True)
    counts = torch.full((ranks,), -1, device=wanted.device) if wrong else torch.bincount(owner, minlength=ranks)[:ranks]
    others = comm.all_to_all(counts.to(torch.int64), (1,) * ranks, (1,) * ranks, 0, group).tolist()
    if min(others) < 0 or wrong:
        raise IndexError(f"index out of range: a rank asks for a row outside the {total} rows of the dim")
    take = tuple(counts.tolist())
    give = tuple(others)
    asked = comm.all_to_all(wanted[order], take, give, 0, group)
    first = spans_of(sizes)[group.rank()][0]
    return RowRoute(give=give, take=take, asked=asked - first, place=torch.argsort(order), group=group)


def fetch_rows(local: Tensor, route: RowRoute) -> Tensor:
    """The rows of dim 0 that this rank asked for, in its order; differentiable: gradients are added up at the owners.

    Communication: one all-to-all of the rows, backward the same.
    """
    sent = local.index_select(0, route.asked)
    return comm.all_to_all(sent, route.give, route.take, 0, route.group).index_select(0, route.place)

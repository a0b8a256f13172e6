"""One primitive for everything that moves rows: halos, strided windows, slices, rebalancing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.collectives.functional import flat_exchange
from shardwise.spec.spans import Span, Spans, as_spans, segments, transfers


def exchange(
    local: torch.Tensor,
    *,
    owned: Sequence[Span],
    wanted: Sequence[Span | Spans],
    dim: int,
    group: dist.ProcessGroup,
    fill: float | int | bool | complex = 0,
) -> torch.Tensor:
    """Group rank r owns the rows `owned[r]` of a global `dim`, has them in `local`, and gets the rows `wanted[r]`.

    `wanted[r]` is one span or a tuple of spans, concatenated in order; spans may overlap, be empty, reach over any number of
    neighbours and outside the tensor. Rows that nobody owns are `fill`. All ranks give the same `owned` and `wanted`. When every rank
    wants just what it owns, the result is `local` itself.

    Communication: one all-to-all with exactly the rows that a rank reads and does not own; none, in either direction, when no rank
    needs a row of another. The gradient sends the rows back and adds them up. Differentiable any number of times.
    """
    route = _route(tuple(owned), tuple(wanted), group.rank())
    dim = dim % local.ndim
    if local.shape[dim] != route.rows:
        raise ValueError(f"exchange: this rank owns {route.rows} rows of dim {dim}, its tensor has shape {tuple(local.shape)}")
    if route.identity and route.silent:
        return local
    if local.requires_grad and torch.is_grad_enabled():
        return _Fetch.apply(local, route, dim, group, fill)
    return _fetch(local, route, dim, group, fill)


class _Route(NamedTuple):
    """What one rank sends, receives and how it puts the result together. All spans count from the first row of their buffer."""

    rows: int
    result_rows: int
    silent: bool
    identity: bool
    sends: tuple[Spans, ...]
    receives: tuple[tuple[int, ...], ...]
    result: tuple[tuple[str, int, int], ...]


@torch.compiler.assume_constant_result
def _route(owned: tuple[Span, ...], wanted: tuple[Span | Spans, ...], me: int) -> _Route:
    return _make_route(owned, wanted, me)


@lru_cache(maxsize=4096)
def _make_route(owned: tuple[Span, ...], wanted: tuple[Span | Spans, ...], me: int) -> _Route:
    if len(owned) != len(wanted):
        raise ValueError(f"exchange: {len(owned)} ranks own rows and {len(wanted)} want some: give one entry per rank of the group")
    table = transfers(owned, wanted)
    ranks = range(len(owned))
    start, stop = owned[me]
    sends = tuple(() if rank == me else tuple((a - start, b - start) for a, b in table.get((me, rank), ())) for rank in ranks)
    receives = tuple(() if rank == me else tuple(b - a for a, b in table.get((rank, me), ())) for rank in ranks)
    places = {rank: iter(_places(receives, rank)) for rank in ranks}
    result = []
    for owner, (a, b) in segments(owned, wanted[me]):
        if owner is None:
            result.append(("fill", 0, b - a))
        elif owner == me:
            result.append(("own", a - start, b - a))
        else:
            result.append(("come", next(places[owner]), b - a))
    return _Route(
        rows=stop - start,
        result_rows=sum(b - a for a, b in as_spans(wanted[me])),
        silent=all(source == destination for source, destination in table),
        identity=result == [("own", 0, stop - start)] or (not result and start == stop),
        sends=sends,
        receives=receives,
        result=tuple(result),
    )


def _places(receives: tuple[tuple[int, ...], ...], rank: int) -> list[int]:
    """Where the pieces from `rank` begin among all received rows."""
    at = sum(sum(pieces) for pieces in receives[:rank])
    starts = []
    for rows in receives[rank]:
        starts.append(at)
        at += rows
    return starts


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, route: _Route, dim: int, group: dist.ProcessGroup, fill: Any) -> torch.Tensor:
        ctx.route, ctx.dim, ctx.group = route, dim, group
        return _fetch(local, route, dim, group, fill)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return _Return.apply(grad, ctx.route, ctx.dim, ctx.group), None, None, None, None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, route: _Route, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.route, ctx.dim, ctx.group = route, dim, group
        return _return(grad, route, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return _Fetch.apply(grad, ctx.route, ctx.dim, ctx.group, 0), None, None, None


def _fetch(local: torch.Tensor, route: _Route, dim: int, group: dist.ProcessGroup, fill: Any) -> torch.Tensor:
    shape = list(local.shape)
    row = _elements_per_row(local, dim)
    come = None
    if not route.silent:
        pieces = [local.narrow(dim, a, b - a) for spans in route.sends for a, b in spans]
        sent = [row * sum(b - a for a, b in spans) for spans in route.sends]
        received = [row * sum(rows) for rows in route.receives]
        come = flat_exchange("exchange", pieces, sent, received, local, group)
    parts = []
    for kind, at, rows in route.result:
        shape[dim] = rows
        if kind == "own":
            parts.append(local.narrow(dim, at, rows))
        elif kind == "come":
            parts.append(come.narrow(0, at * row, rows * row).view(shape))
        else:
            parts.append(local.new_full(shape, fill))
    if not parts:
        shape[dim] = 0
        return local.new_empty(shape)
    return torch.cat(parts, dim)


def _return(grad: torch.Tensor, route: _Route, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    shape = list(grad.shape)
    row = _elements_per_row(grad, dim)
    shape[dim] = route.rows
    result = None
    pieces: list[tuple[int, torch.Tensor]] = []
    at = 0
    for kind, start, rows in route.result:
        part = grad.narrow(dim, at, rows)
        at += rows
        if kind == "come":
            pieces.append((start, part))
        elif kind == "own":
            if result is None and rows == route.rows:
                result = part.clone(memory_format=torch.contiguous_format)
                continue
            if result is None:
                result = grad.new_zeros(shape)
            result.narrow(dim, start, rows).add_(part)
    if result is None:
        result = grad.new_zeros(shape)
    if route.silent:
        return result
    ordered = [part for _, part in sorted(pieces, key=lambda piece: piece[0])]
    sent = [row * sum(rows) for rows in route.receives]
    received = [row * sum(b - a for a, b in spans) for spans in route.sends]
    come = flat_exchange("exchange", ordered, sent, received, grad, group)
    at = 0
    for spans in route.sends:
        for a, b in spans:
            shape[dim] = b - a
            size = math.prod(shape)
            result.narrow(dim, a, b - a).add_(come.narrow(0, at, size).view(shape))
            at += size
    return result


def _elements_per_row(x: torch.Tensor, dim: int) -> int:
    return math.prod(x.shape[:dim]) * math.prod(x.shape[dim + 1 :])

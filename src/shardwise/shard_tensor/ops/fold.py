"""Sliding blocks: `F.unfold`, `F.fold` and `Tensor.unfold`.

The blocks of an image lie row after row in one dim, so an image split over its columns is first split over its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

from shardwise.shard_tensor.aliases import copied, same_memory
from shardwise.shard_tensor.empty import connected_empty
from shardwise.shard_tensor.halo import Halo, aligned, fetch, make_halo, rows_at
from shardwise.shard_tensor.ops.conv import each
from shardwise.shard_tensor.redistribute import redistribute_local
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, needs_grad, redistribute, to_local
from shardwise.spec.spans import Span, Window
from shardwise.spec.windows import anchor, transposed_span, window_reads

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the ranks do: `source` is the layout the input must have, `piece` (dim, first row, rows) of the local result is the output."""

    source: ShardTensorSpec
    halos: tuple[Halo, ...]
    args: tuple
    piece: tuple[int, int, int] | None
    out: ShardTensorSpec


@shard_function(F.unfold)
def unfold(input, kernel_size, dilation=1, padding=0, stride=1):
    """Communication: one exchange of the rows that blocks read across borders; with column shards first an all-to-all to row shards."""
    x = redistribute(input, input._spec.gradient())
    args = tuple(each(value, 2) for value in (kernel_size, dilation, padding, stride))
    plan = x._spec.cached(("unfold", args), lambda: _unfold_plan(x._spec, *args))
    x = redistribute(x, plan.source)
    local = fetch(to_local(x), plan.source, plan.halos)
    local = F.unfold(local, *plan.args) if 0 not in plan.out.local_shape else connected_empty(plan.out.local_shape, local)
    return from_local(local, plan.out)


def _unfold_plan(spec: ShardTensorSpec, kernel: tuple, dilation: tuple, padding: tuple, stride: tuple) -> _Plan:
    shape = tuple(F.unfold(torch.empty(spec.shape, device="meta"), kernel, dilation, padding, stride).shape)
    rows, columns = spec.ndim - 2, spec.ndim - 1
    spec = spec.with_placements([Shard(rows) if p == Shard(columns) else p for p in spec.placements])
    sizes = [*spec.sizes[:-2], None]
    if sizes[rows - 1] is not None:
        sizes[rows - 1] = tuple(size * kernel[0] * kernel[1] for size in sizes[rows - 1])
    halos = []
    if spec.sizes[rows] is not None:
        size = spec.shape[rows]
        window = Window(size=kernel[0], stride=stride[0], dilation=dilation[0], pad_before=padding[0], pad_after=padding[0])
        outputs = window.output_size(size)
        at = anchor(window, spec.sizes[rows], outputs)
        halo = make_halo(spec, rows, outputs, lambda o: o * stride[0] + at, lambda owned, makes: window_reads(window, owned, makes, size))
        halos.append(halo)
        sizes[-1] = tuple(made * (shape[-1] // outputs) for made in halo.make_sizes)
        padding = (0, padding[1])
    out = ShardTensorSpec(spec.mesh, spec.placements, shape, tuple(sizes), spec.dtype)
    return _Plan(source=spec, halos=tuple(halos), args=(kernel, dilation, padding, stride), piece=None, out=out)


@shard_function(F.fold)
def fold(input, output_size, kernel_size, dilation=1, padding=0, stride=1):
    """Communication: one exchange of the blocks that reach a rank's rows of the image, after one that moves shards to borders of rows
    of blocks."""
    x = redistribute(input, input._spec.gradient())
    args = tuple(each(value, 2) for value in (output_size, kernel_size, dilation, padding, stride))
    plan = x._spec.cached(("fold", args), lambda: _fold_plan(x._spec, *args))
    x = redistribute(x, plan.source)
    local = fetch(to_local(x), plan.source, plan.halos)
    if local.numel():
        local = F.fold(local, *plan.args)
        local = local if plan.piece is None else rows_at(local, *plan.piece)
    else:  # no block reaches the rows of this rank
        local = connected_empty((*plan.out.local_shape, 0), local).sum(-1)
    return from_local(local, plan.out)


def _fold_plan(spec: ShardTensorSpec, size: tuple, kernel: tuple, dilation: tuple, padding: tuple, stride: tuple) -> _Plan:
    shape = tuple(F.fold(torch.empty(spec.shape, device="meta"), size, kernel, dilation, padding, stride).shape)
    blocks, channels = spec.ndim - 1, spec.ndim - 2
    per_row = (size[1] + 2 * padding[1] - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    per_channel = kernel[0] * kernel[1]
    spec = aligned(aligned(spec, blocks, per_row), channels, per_channel)
    sizes = [*spec.sizes[:-2], None, None, None]
    if spec.sizes[channels] is not None:
        sizes[channels] = tuple(rows // per_channel for rows in spec.sizes[channels])
    halos, piece = [], None
    if spec.sizes[blocks] is not None:
        reach = dilation[0] * (kernel[0] - 1)

        def nearest(output: int) -> int:
            """The first block of the row of blocks that lies nearest to an output row."""
            return (2 * (output + padding[0]) - reach + stride[0] - 1) // (2 * stride[0]) * per_row

        def reads(owned: Span, makes: Span) -> Span:
            start, stop = transposed_span(makes, size=kernel[0], stride=stride[0], dilation=dilation[0], pad=padding[0])
            start, stop = max(start, 0), min(stop, spec.shape[blocks] // per_row)
            return (start * per_row, stop * per_row) if stop > start else (0, 0)

        halo = make_halo(spec, blocks, size[0], nearest, reads)
        halos.append(halo)
        sizes[-2] = halo.make_sizes
        low, high = (row // per_row for row in halo.reads[halo.block])
        piece = (spec.ndim - 1, halo.made[0] + padding[0] - low * stride[0], halo.made[1] - halo.made[0])
        size = ((high - low - 1) * stride[0] + reach + 1, size[1])
        padding = (0, padding[1])
    out = ShardTensorSpec(spec.mesh, spec.placements, shape, tuple(sizes), spec.dtype)
    return _Plan(source=spec, halos=tuple(halos), args=(size, kernel, dilation, padding, stride), piece=piece, out=out)


# ---------------------------------------------------------------------- windows of one dim


@shard_function(Tensor.unfold)
def tensor_unfold(self, dimension, size, step):
    """Communication: on a sharded dim one exchange of the rows that windows read across borders, backward the same. The result is
    then a copy, not a view."""
    spec = self._spec
    dim = dimension % spec.ndim if spec.ndim else 0
    if not spec.ndim or spec.sizes[dim] is None:
        return NotImplemented
    x = redistribute(self, spec.gradient())
    halo, out = x._spec.cached(("windows", dim, size, step), lambda: _windows_plan(x._spec, dim, size, step))
    local = fetch(to_local(x), x._spec, (halo,))
    windows = connected_empty(out.local_shape, local) if halo.made[0] == halo.made[1] else local.unfold(dim, size, step)
    again = None if needs_grad(self) else lambda source: tensor_unfold(source, dimension, size, step)._local_tensor
    return copied(from_local(windows, out), self, again)


def _windows_plan(spec: ShardTensorSpec, dim: int, size: int, step: int) -> tuple[Halo, ShardTensorSpec]:
    whole = torch.empty_strided(spec.shape, spec.stride, device="meta").unfold(dim, size, step)
    shape = tuple(whole.shape)
    total = spec.shape[dim]
    window = Window(size=size, stride=step)
    at = anchor(window, spec.sizes[dim], shape[dim])
    halo = make_halo(spec, dim, shape[dim], lambda o: o * step + at, lambda owned, makes: window_reads(window, owned, makes, total))
    sizes = (*spec.sizes[:dim], halo.make_sizes, *spec.sizes[dim + 1 :], None)
    return halo, ShardTensorSpec(spec.mesh, spec.placements, shape, sizes, spec.dtype, whole.stride())


@shard_rule(aten.unfold.default)
def unfold_rule(op, args, kwargs):
    """Communication: none; `dimension` is not sharded (else the function above has handled it)."""
    x, dim, size, step = args
    spec = x._spec
    whole = torch.empty_strided(spec.shape, spec.stride, device="meta").unfold(dim, size, step)
    out = spec.with_dims(whole.shape, [*range(spec.ndim), None], whole.stride())
    return same_memory(ShardTensor(op(x._local_tensor, dim, size, step), out), x)


@shard_rule(aten.unfold_backward.default)
def unfold_backward(op, args, kwargs):
    """Communication: none, unless the gradient is sharded along the windows or inside them: then it is gathered along these dims."""
    grad, shape, dim, size, step = args
    dim %= len(shape)
    inner = grad._spec.ndim - 1
    whole = [axis for d in {dim, inner} if grad._spec.sizes[d] is not None for axis in grad._spec.mesh_dims_of(d)]
    spec = grad._spec.replicate(sorted(whole)) if whole else grad._spec
    out = spec.with_dims(shape, [d if d != dim else None for d in range(inner)])
    return ShardTensor(op(redistribute_local(grad._local_tensor, grad._spec, spec), out.local_shape, dim, size, step), out)

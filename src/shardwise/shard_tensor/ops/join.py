"""Joining tensors: `cat` and `stack`.

Communication: none along an unsharded dim or where all rows can stay in place; else the rows of the smaller operands move.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from shardwise.shard_tensor.fallback import replicated
from shardwise.shard_tensor.redistribute import redistribute_local
from shardwise.shard_tensor.registry import shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec, contiguous_stride
from shardwise.shard_tensor.tensor import ShardTensor

aten = torch.ops.aten


@shard_rule(aten.cat.default)
def cat(op, args, kwargs):
    """Along an unsharded dim the operands take the layout of the largest. Along a sharded dim each rank gets the rows of the
    result that `torch.chunk` would give it."""
    tensors, dim = (*args, 0)[:2]
    sharded = [x for x in tensors if isinstance(x, ShardTensor)]
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    tensors = [x for x in tensors if x.ndim != 1 or x.shape[0] != 0] or sharded[:1]  # torch leaves empty vectors out
    if not any(isinstance(x, ShardTensor) for x in tensors):
        return replicated(op(tensors, dim).to(dtype), sharded[0]._spec.mesh)
    dim %= tensors[0].ndim
    largest = max((x for x in tensors if isinstance(x, ShardTensor)), key=lambda x: x._spec.numel)
    base = largest._spec.gradient()
    total = sum(x.shape[dim] for x in tensors)
    shape = (*base.shape[:dim], total, *base.shape[dim + 1 :])
    if base.sizes[dim] is None:
        out = ShardTensorSpec(base.mesh, base.placements, shape, base.sizes, dtype)
        parts = [_laid(x, base) for x in tensors]
        return ShardTensor(op(parts, dim).to(dtype), out)
    return _cat_sharded(tensors, dim, base, shape, dtype)


def _laid(x, base: ShardTensorSpec) -> torch.Tensor:
    """The shard of `x` in the layout of `base`, whatever its size along unsharded dims."""
    shape = tuple(x.shape)
    want = ShardTensorSpec(base.mesh, base.placements, shape, base.sizes, x.dtype)
    if isinstance(x, ShardTensor):
        return redistribute_local(x._local_tensor, x._spec, want)
    return redistribute_local(x, want.replicate(), want)


def _cat_sharded(tensors, dim: int, base: ShardTensorSpec, shape: tuple[int, ...], dtype: torch.dtype) -> ShardTensor:
    """Rows stay where they are if that keeps their order; else they go where `torch.chunk` of the result puts them."""
    ranks = len(base.sizes[dim])
    pieces = _pieces_in_place(tensors, dim, base, ranks)
    if pieces is None:
        blocks = ShardTensorSpec.chunked(base.mesh, base.placements, shape, dtype).sizes[dim]
        borders = [sum(blocks[:i]) for i in range(ranks + 1)]
        pieces, start = [], 0
        for x in tensors:
            stop = start + x.shape[dim]
            pieces.append(tuple(max(0, min(borders[i + 1], stop) - max(borders[i], start)) for i in range(ranks)))
            start = stop
    sizes = (*base.sizes[:dim], tuple(map(sum, zip(*pieces, strict=True))), *base.sizes[dim + 1 :])
    out = ShardTensorSpec(base.mesh, base.placements, shape, sizes, dtype)
    parts = []
    for x, mine in zip(tensors, pieces, strict=True):
        want = ShardTensorSpec(base.mesh, base.placements, tuple(x.shape), (*base.sizes[:dim], mine, *base.sizes[dim + 1 :]), x.dtype)
        have = x._spec if isinstance(x, ShardTensor) else want.replicate()
        parts.append(redistribute_local(x._local_tensor if isinstance(x, ShardTensor) else x, have, want))
    return ShardTensor(aten.cat.default(parts, dim).to(dtype), out)


def _pieces_in_place(tensors, dim: int, base: ShardTensorSpec, ranks: int) -> list[tuple[int, ...]] | None:
    """Rows of each operand on each rank if all stay in place: those of a replicated operand join the rank of the rows before
    them (of the rows after them at the start). None where the ranks of successive operands would overlap."""
    blocks = [
        x._spec.sizes[dim] if isinstance(x, ShardTensor) and x._spec.mesh_dims_of(dim) == base.mesh_dims_of(dim) else None for x in tensors
    ]
    held = [[i for i, n in enumerate(b) if n] for b in blocks if b is not None and any(b)]
    if not held or any(a[-1] > b[0] for a, b in pairwise(held)):
        return None
    if any(b is None and isinstance(x, ShardTensor) and x._spec.sizes[dim] is not None for b, x in zip(blocks, tensors, strict=True)):
        return None
    pieces, at = [], held[0][0]
    for x, own in zip(tensors, blocks, strict=True):
        if own is None:
            own = tuple(x.shape[dim] if i == at else 0 for i in range(ranks))
        elif any(own):
            at = max(i for i, n in enumerate(own) if n)
        pieces.append(own)
    return pieces


@shard_rule(aten.stack.default)
def stack(op, args, kwargs):
    tensors, dim = (*args, 0)[:2]
    dim %= tensors[0].ndim + 1
    base = max((x for x in tensors if isinstance(x, ShardTensor)), key=lambda x: len(x._spec.sharded_mesh_dims))._spec.gradient()
    local = op([_laid(x, base) for x in tensors], dim)
    shape = (*base.shape[:dim], len(tensors), *base.shape[dim:])
    return ShardTensor(local, base.with_dims(shape, [*range(dim), None, *range(dim, base.ndim)], contiguous_stride(shape), local.dtype))

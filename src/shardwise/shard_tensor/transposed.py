"""Ops that need a whole dim: the split moves to another dim, the op runs on what is now complete, and the split moves back.

Moving a split from one dim to another is one all-to-all in which each rank sends the part of its rows that others need, 1/n of what
gathering would cost. Where no other dim has rows to split, the tensor is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils._pytree import tree_map_only

from shardwise.shard_tensor.halo import grown
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local


def whole_spec(spec: ShardTensorSpec, dims: Sequence[int]) -> ShardTensorSpec:
    """`spec` with `dims` unsharded and no pending sums: the axes that this frees split the largest other dim, if there is one of two
    rows for each of its blocks at least."""
    key = ("whole", tuple(sorted(dims)))
    return spec.cached(key, lambda: _whole_spec(spec, frozenset(dims)))


def _whole_spec(spec: ShardTensorSpec, dims: frozenset[int]) -> ShardTensorSpec:
    freed = {axis for dim in dims for axis in spec.mesh_dims_of(dim)}
    if not freed:
        return spec.gradient()
    freed |= set(spec.partial_mesh_dims)
    host = _host(spec, dims)
    placements = [p if axis not in freed else Replicate() if host is None else Shard(host) for axis, p in enumerate(spec.placements)]
    return spec.with_placements(placements)


def _host(spec: ShardTensorSpec, dims: frozenset[int]) -> int | None:
    """The dim that takes the split over: unsharded if possible, the largest, the first among equals."""
    candidates = []
    for dim in range(spec.ndim):
        blocks = prod(spec.mesh.size(axis) for axis in spec.mesh_dims_of(dim))
        if dim not in dims and spec.shape[dim] >= 2 * blocks:
            candidates.append((spec.sizes[dim] is not None, -spec.shape[dim], dim))
    return min(candidates)[2] if candidates else None


def result_spec(spec: ShardTensorSpec, local: Tensor) -> ShardTensorSpec:
    """The layout of a result of as many dims as `spec`, computed from a shard laid out as `spec`: what was sharded keeps its rows."""
    shape = tuple(size if blocks is None else whole for size, blocks, whole in zip(local.shape, spec.sizes, spec.shape, strict=True))
    return ShardTensorSpec(spec.mesh, spec.placements, shape, spec.sizes, local.dtype)


def run_whole(x: ShardTensor, dims: Sequence[int], function: Callable[[Tensor], Any]) -> Any:
    """`function` of the shard of `x` in a layout in which `dims` are whole; its results are in that layout. Differentiable.

    `function` keeps the number of dims, and the size of every dim but `dims`. Communication: one all-to-all if one of `dims` is sharded.
    """
    spec = whole_spec(x._spec, dims)
    local = to_local(redistribute(x, spec))
    empty = [dim for dim in spec.sharded_dims if not local.shape[dim] and spec.shape[dim]]
    for dim in empty:  # a row of zeros, so that the op does, and refuses, on this rank what it does on every other
        local = grown(local, dim, 1)

    def laid(part: Tensor) -> ShardTensor:
        for dim in empty:
            part = part.narrow(dim, 0, 0)
        return from_local(part.resolve_neg(), result_spec(spec, part))

    return tree_map_only(Tensor, laid, function(local))


def laid_as(x: ShardTensor, spec: ShardTensorSpec) -> ShardTensor:
    """`x` under the placements of `spec`, dims of equal size with the same rows; differentiable."""
    return redistribute(x, like_spec(spec, tuple(x._spec.shape)))


def like_spec(spec: ShardTensorSpec, shape: tuple[int, ...]) -> ShardTensorSpec:
    """The layout of a tensor of `shape` under the placements of `spec`; dims of another size are split as `torch.chunk` does."""
    spec = spec.gradient()
    if shape == spec.shape:
        return spec
    fresh = ShardTensorSpec.chunked(spec.mesh, spec.placements, shape, spec.dtype)
    sizes = tuple(old if shape[dim] == spec.shape[dim] else new for dim, (old, new) in enumerate(zip(spec.sizes, fresh.sizes, strict=True)))
    return ShardTensorSpec(spec.mesh, spec.placements, shape, sizes, spec.dtype)


def run_there_and_back(x: ShardTensor, dims: Sequence[int], function: Callable[[Tensor], Any]) -> Any:
    """As `run_whole`, with the results back in the layout of `x`. Communication: two all-to-alls if one of `dims` is sharded, one more for
    each further result."""
    result = run_whole(x, dims, function)
    return tree_map_only(ShardTensor, lambda y: laid_as(y, x._spec), result)

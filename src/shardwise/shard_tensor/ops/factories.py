"""New tensors made like another: same layout where the shape is the same, replicated otherwise."""

from __future__ import annotations

import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardwise.shard_tensor.registry import shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec, contiguous_stride
from shardwise.shard_tensor.tensor import ShardTensor

aten = torch.ops.aten


@shard_rule(aten.ones_like.default, aten.zeros_like.default, aten.empty_like.default, aten.full_like.default)
def like(op, args, kwargs):
    """In the layout of the argument; a pending sum gives a replicated result. Communication: none."""
    x = args[0]
    spec = x._spec.gradient()
    local = op(x._local_tensor, *args[1:], **kwargs)
    if not isinstance(local, torch.Tensor):
        return local
    if kwargs.get("memory_format") is torch.contiguous_format:
        spec = spec.contiguous()
    return ShardTensor(local, spec)


@shard_rule(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default, aten.new_empty_strided.default)
def new(op, args, kwargs):
    """Of another shape: replicated, unless it is the argument's own shape, or has as many rows as a tensor from which rows were picked by
    index: what is added up over edges or groups then lies as the nodes do. Communication: none."""
    x, shape = args[0], tuple(args[1])
    spec = x._spec.gradient()
    if shape == tuple(spec.shape):
        local_shape, out = spec.local_shape, spec
    else:
        out = _rows_picked_from(spec, shape)
        if out is None:
            whole = spec.replicate()
            out = ShardTensorSpec(whole.mesh, whole.placements, shape, (None,) * len(shape), whole.dtype)
        local_shape = out.local_shape
    rest = args[2:]
    if op is aten.new_empty_strided.default:
        op, rest = aten.new_empty.default, ()
    return ShardTensor(
        op(x._local_tensor, local_shape, *rest, **kwargs), out.contiguous() if out.stride != contiguous_stride(shape) else out
    )


def _rows_picked_from(spec: ShardTensorSpec, shape: tuple[int, ...]) -> ShardTensorSpec | None:
    known = spec.mesh.__dict__.get("_shardwise_rows", {}).get(shape[0]) if shape else None
    if known is None:
        return None
    axes, sizes = known
    placements = tuple(Shard(0) if axis in axes else Replicate() for axis in range(spec.mesh.ndim))
    return ShardTensorSpec(spec.mesh, placements, shape, (sizes, *(None,) * (len(shape) - 1)), spec.dtype)

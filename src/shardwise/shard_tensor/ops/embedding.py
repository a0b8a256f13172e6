"""Rows of a table picked by index: the indices may be split, or the table by rows or by features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

from shardwise.errors import MissingShardPatch
from shardwise.shard_tensor.ops.pointwise import operand_spec
from shardwise.shard_tensor.promote import plain_operand
from shardwise.shard_tensor.readable import values_readable
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local

aten = torch.ops.aten


@shard_function(F.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Split indices and a whole table: local. A table split by features: local. A table split by rows: a pending sum.

    Communication: none forward. Backward: the gradient of a whole table is summed.
    Errors: IndexError for an index out of range on the ranks that hold it: all for plain indices, one for split ones. CUDA: a device
    assertion, as in plain torch.
    """
    if max_norm is not None or scale_grad_by_freq or sparse:
        option = "max_norm" if max_norm is not None else "scale_grad_by_freq" if scale_grad_by_freq else "sparse"
        raise MissingShardPatch(
            f"embedding of sharded indices with {option}={locals()[option]}",
            "it depends on all indices of the batch, of which a rank sees its own",
            f"leave {option} at its default, or gather the indices with full_tensor()",
        )
    if isinstance(weight, ShardTensor):
        weight = redistribute(weight, weight._spec.gradient())
        if weight._spec.sharded_dims:
            return _split_table(input, weight, padding_idx)
    spec = input._spec if isinstance(input, ShardTensor) else weight._spec
    table = plain_operand(weight, [spec])
    if not isinstance(input, ShardTensor):
        local = F.embedding(input, table, padding_idx)
        whole = spec.replicate()
        return from_local(local, ShardTensorSpec(whole.mesh, whole.placements, tuple(local.shape), (None,) * local.ndim, local.dtype))
    local = F.embedding(input._local_tensor, table, padding_idx)
    return from_local(local, spec.with_dims((*spec.shape, weight.shape[1]), [*range(spec.ndim), None], dtype=local.dtype))


def _split_table(input: Tensor, weight: ShardTensor, padding_idx: int | None) -> ShardTensor:
    """Axes that split the table keep doing so; indices split over the same axis are made whole there."""
    spec = weight._spec
    axes = spec.sharded_mesh_dims
    if isinstance(input, ShardTensor):
        input = redistribute(input, input._spec.replicate([i for i in input._spec.sharded_mesh_dims if i in axes]))
        ispec, indices = input._spec, input._local_tensor
    else:
        whole = spec.replicate()
        ispec = ShardTensorSpec(spec.mesh, whole.placements, tuple(input.shape), (None,) * input.ndim, input.dtype)
        indices = input
    grads = tuple(Partial() if i in ispec.sharded_mesh_dims else p for i, p in enumerate(spec.placements))
    table = to_local(weight, ShardTensorSpec(spec.mesh, grads, spec.shape, spec.sizes, spec.dtype))
    start, stop = spec.box()[0]
    _check_range(indices, spec.shape[0])
    inside = (indices >= start) & (indices < stop)
    if padding_idx is not None:
        padding_idx = padding_idx % spec.shape[0]
        table = table.clone() if start <= padding_idx < stop else table
    safe = torch.where(inside, indices - start, 0)
    rows = table if table.shape[0] else torch.cat([table, table.new_zeros(1, table.shape[1])])
    own_padding = padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None
    local = F.embedding(safe, rows, own_padding)
    if spec.sizes[0] is not None:
        local = torch.where(inside.unsqueeze(-1), local, 0)
    placements = []
    for i, p in enumerate(spec.placements):
        split_here = isinstance(p, Shard)
        placements.append(Partial() if split_here and p.dim == 0 else Shard(ispec.ndim) if split_here else ispec.placements[i])
    sizes = (*ispec.sizes, spec.sizes[1])
    out = ShardTensorSpec(spec.mesh, tuple(placements), (*ispec.shape, spec.shape[1]), sizes, local.dtype)
    return from_local(local, out)


def _check_range(indices: Tensor, rows: int) -> None:
    """Refuse an index that no rank has a row for: it would read as zeros. Elsewhere than on the CPU without waiting for the device."""
    inside = ((indices >= 0) & (indices < rows)).all()
    if not values_readable(indices):
        torch._assert_async(inside)
    elif not inside:
        raise IndexError(f"an index of embedding is out of range: the table has rows 0 to {rows - 1}")


@shard_rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(op, args, kwargs):
    """Reached when a compiled graph calls it: each rank adds up its own rows, the table's gradient is a pending sum."""
    grad, indices, *rest = args
    spec = (grad if isinstance(grad, ShardTensor) else indices)._spec.gradient()
    gspec = spec if isinstance(grad, ShardTensor) else None
    if gspec is None or gspec.sizes[-1] is not None:
        raise MissingShardPatch("embedding_dense_backward with split features", "only whole features are supported here", "use F.embedding")
    local_grad = redistribute(grad, gspec)._local_tensor
    ispec = operand_spec(
        indices, ShardTensorSpec(spec.mesh, spec.placements, tuple(indices.shape), spec.sizes[:-1], indices.dtype), indices.ndim
    )
    local_indices = redistribute(indices, ispec)._local_tensor
    local = op(local_grad, local_indices, *rest)
    placements = tuple(Partial() if isinstance(p, Shard) else p for p in spec.placements)
    return ShardTensor(local, ShardTensorSpec(spec.mesh, placements, tuple(local.shape), (None, None), local.dtype))

"""Triangles and diagonals of matrices whose rows or columns may be sharded: each rank knows where its block lies."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.shard_tensor.aliases import after_write, check_writable, copied, same_memory
from shardwise.shard_tensor.arguments import normal_dim, torch_names
from shardwise.shard_tensor.redistribute import redistribute_local
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.shard_tensor.transposed import whole_spec
from shardwise.spec.spans import spans_of

aten = torch.ops.aten


@shard_rule(aten.tril.default, aten.triu.default)
def triangle(op, args, kwargs):
    """Communication: none; a pending sum stays one."""
    x, diagonal = (*args, 0)[:2]
    return ShardTensor(op(x._local_tensor, _shifted(x._spec, kwargs.get("diagonal", diagonal))), x._spec.contiguous())


@shard_rule(aten.tril_.default, aten.triu_.default)
def triangle_(op, args, kwargs):
    """Communication: none."""
    x, diagonal = (*args, 0)[:2]
    check_writable(x)
    op(x._local_tensor, _shifted(x._spec, kwargs.get("diagonal", diagonal)))
    after_write(x)
    return x


def _shifted(spec: ShardTensorSpec, diagonal: int) -> int:
    """Which diagonal of this rank's block is diagonal `diagonal` of the whole matrix."""
    if spec.ndim < 2:
        return diagonal
    rows, columns = spec.box()[-2:]
    return diagonal + rows[0] - columns[0]


@shard_rule(aten.diagonal.default)
def diagonal(op, args, kwargs):
    """The entries stay with the ranks that hold them. Communication: none if at most one of the two dims is sharded, else the second
    is made whole first."""
    with torch.no_grad():
        return _diagonal(*args, **kwargs)


def _diagonal(input: ShardTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ShardTensor:
    first, second = normal_dim(dim1, input.ndim), normal_dim(dim2, input.ndim)
    if first == second:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dim1}, {dim2}")
    x = redistribute(input, input._spec.gradient())
    if x._spec.sizes[first] is not None and x._spec.sizes[second] is not None:
        x = redistribute(x, x._spec.replicate(x._spec.mesh_dims_of(second)))
    spec = x._spec
    rows, columns = spec.shape[first], spec.shape[second]
    split = first if spec.sizes[first] is not None else second
    counts = None
    local_offset = offset
    if spec.sizes[split] is not None:
        low = max(0, -offset) if split == first else max(0, offset)  # the first entry, counted along the split dim
        count = max(0, min(rows - max(0, -offset), columns - max(0, offset)))
        counts = tuple(max(0, min(stop, low + count) - max(start, low)) for start, stop in spans_of(spec.sizes[split]))
        start = spec.box()[split][0]
        local_offset = offset + start if split == first else offset - start
    local = to_local(x).diagonal(local_offset, first, second)
    kept = [d for d in range(spec.ndim) if d not in (first, second)]
    total = local.shape[-1] if counts is None else sum(counts)
    shape = (*(spec.shape[d] for d in kept), total)
    out = spec.with_dims(shape, (*kept, split), dtype=local.dtype)
    stride = (*(spec.stride[d] for d in kept), spec.stride[first] + spec.stride[second])
    result = from_local(local, ShardTensorSpec(out.mesh, out.placements, shape, (*out.sizes[:-1], counts), local.dtype, stride))
    if x is input:
        return same_memory(result, input)
    return copied(result, input, lambda source: _diagonal(source, offset, dim1, dim2)._local_tensor)


@shard_function(torch.diag, Tensor.diag)
@torch_names
def diag(input: Tensor, diagonal: int = 0):
    """Of a matrix: as `torch.diagonal`. Of a vector: each rank makes its own rows. Communication: none."""
    if not isinstance(input, ShardTensor) or input.ndim not in (1, 2):
        return NotImplemented
    if input.ndim == 2:
        return torch.diagonal(input, diagonal).clone()
    return diag_embed(input, diagonal)


@shard_function(torch.trace, Tensor.trace)
def trace(input: Tensor):
    """Communication: that of the diagonal; the sum is pending."""
    if not isinstance(input, ShardTensor) or input.ndim != 2:
        return NotImplemented
    return torch.diagonal(input).sum()


@shard_function(torch.diag_embed, Tensor.diag_embed)
@torch_names
def diag_embed(input: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1):
    """The rows of the diagonal stay split. Communication: none."""
    if not isinstance(input, ShardTensor) or not input.ndim:
        return NotImplemented
    x = redistribute(input, input._spec.gradient())
    spec = x._spec
    size = spec.shape[-1] + abs(offset)
    local = to_local(x)
    rows = local.shape[-1]
    blocks = spec.sizes[-1]
    start = spec.box()[-1][0]
    column = start + max(0, offset)
    wide = (
        local.new_zeros((*local.shape[:-1], rows, column)),
        local.diag_embed(),
        local.new_zeros((*local.shape[:-1], rows, size - column - rows)),
    )
    matrix = torch.cat(wide, -1)
    extra = max(0, -offset)  # rows of zeros above the diagonal, and below it
    below = size - spec.shape[-1] - extra
    first = blocks is None or spec.block_index(spec.ndim - 1, spec.coordinate) == 0
    last = blocks is None or spec.block_index(spec.ndim - 1, spec.coordinate) == len(blocks) - 1
    matrix = torch.nn.functional.pad(matrix, (0, 0, extra if first else 0, below if last else 0))
    if blocks is not None:
        blocks = tuple(n + (extra if i == 0 else 0) + (below if i == len(blocks) - 1 else 0) for i, n in enumerate(blocks))
    shape = (*spec.shape[:-1], size, size)
    out = ShardTensorSpec(spec.mesh, spec.placements, shape, (*spec.sizes[:-1], blocks, None), spec.dtype)
    result = from_local(matrix, out)
    return (
        result if (dim1 % (spec.ndim + 1), dim2 % (spec.ndim + 1)) == (spec.ndim - 1, spec.ndim) else result.movedim((-2, -1), (dim1, dim2))
    )


@shard_rule(aten.diagonal_backward.default)
def diagonal_backward(op, args, kwargs):
    """Communication: the gradient of the diagonal is gathered if it is split along the diagonal."""
    grad, shape, offset, dim1, dim2 = args
    spec = whole_spec(grad._spec, [grad._spec.ndim - 1])
    local = redistribute_local(grad._local_tensor, grad._spec, spec)
    first, second = sorted((dim1 % len(shape), dim2 % len(shape)))
    source: list[int | None] = list(range(spec.ndim - 1))
    source.insert(first, None)
    source.insert(second, None)
    out = spec.with_dims(shape, source)
    return ShardTensor(op(local, out.local_shape, offset, dim1, dim2), out)

"""Running sums, products and extremes along a dim that may be sharded.

Each rank scans its own rows and adds what the ranks before it hold in total; running extremes, whose places count, move the split.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial

from shardwise.shard_tensor.arguments import is_dim, normal_dim, torch_names
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.shard_tensor.transposed import run_there_and_back

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def _scan(x: ShardTensor, dim: int, scan: Callable, total: Callable, combine: Callable) -> ShardTensor:
    """`scan` of each rank's rows, combined with the `total` of all rows before them."""
    x = redistribute(x, x._spec.gradient())
    spec = x._spec
    dim = normal_dim(dim, spec.ndim)
    local = to_local(x)
    part = scan(local, dim)
    if not spec.ndim or spec.sizes[dim] is None:
        return from_local(part, spec)
    totals, read = spec.cached(("totals", dim), lambda: _totals_specs(spec, dim))
    own = total(local, dim)
    before = to_local(redistribute(from_local(own, totals.with_dtype(own.dtype)), totals.replicate(spec.mesh_dims_of(dim))), read)
    return from_local(combine(part, before, dim, spec.block_index(dim, spec.coordinate)), spec)


def _totals_specs(spec: ShardTensorSpec, dim: int) -> tuple[ShardTensorSpec, ShardTensorSpec]:
    """The layout of one row for each block, and how the gradient of all of them comes: each rank has a summand."""
    axes = spec.mesh_dims_of(dim)
    blocks = len(spec.sizes[dim])
    shape = (*spec.shape[:dim], blocks, *spec.shape[dim + 1 :])
    totals = ShardTensorSpec(spec.mesh, spec.placements, shape, (*spec.sizes[:dim], (1,) * blocks, *spec.sizes[dim + 1 :]), spec.dtype)
    whole = totals.replicate(axes)
    placements = tuple(Partial() if i in axes else p for i, p in enumerate(whole.placements))
    return totals, ShardTensorSpec(spec.mesh, placements, shape, whole.sizes, spec.dtype)


@shard_function(torch.cumsum, Tensor.cumsum)
@torch_names
def cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Communication: none along an unsharded dim, else one all-gather of a row for each rank; backward a reduce-scatter of them."""
    if not isinstance(input, ShardTensor) or not is_dim(dim):
        return NotImplemented
    kept = input.dtype if dtype is None and input.dtype in HALF else None  # half types are summed in float32
    wide = torch.float32 if kept else dtype
    result = _scan(
        input,
        dim,
        lambda x, d: x.cumsum(d, dtype=wide),
        lambda x, d: x.sum(d, keepdim=True, dtype=wide),
        lambda part, before, d, block: part + before.narrow(d, 0, block).sum(d, keepdim=True, dtype=part.dtype),
    )
    return result.to(kept) if kept else result


@shard_function(torch.cumprod, Tensor.cumprod)
@torch_names
def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Communication: as `cumsum`."""
    if not isinstance(input, ShardTensor) or not is_dim(dim):
        return NotImplemented
    return _scan(
        input,
        dim,
        lambda x, d: x.cumprod(d, dtype=dtype),
        lambda x, d: x.prod(d, keepdim=True, dtype=dtype),
        lambda part, before, d, block: part * before.narrow(d, 0, block).prod(d, keepdim=True, dtype=part.dtype),
    )


@shard_function(torch.logcumsumexp, Tensor.logcumsumexp)
@torch_names
def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    """Communication: as `cumsum`."""
    if not isinstance(input, ShardTensor) or not is_dim(dim) or input.dtype.is_complex:
        return NotImplemented
    return _scan(input, dim, torch.logcumsumexp, lambda x, d: _log_total(x, d), _log_add)


def _log_total(x: Tensor, dim: int) -> Tensor:
    if x.shape[dim]:
        return x.logsumexp(dim, keepdim=True)
    return x.sum(dim, keepdim=True) - torch.inf


def _log_add(part: Tensor, before: Tensor, dim: int, block: int) -> Tensor:
    if block and part.shape[dim]:
        prefix = before.narrow(dim, 0, block).logsumexp(dim, keepdim=True)
        part = torch.logaddexp(part, prefix)
    unused = before.narrow(dim, block, before.shape[dim] - block) if block and part.shape[dim] else before
    return torch.where(part.new_zeros((), dtype=torch.bool), unused.sum(dim, keepdim=True), part)  # every rank answers in backward


def _running_extreme(func, return_type):
    def handler(input: Tensor, dim: int):
        if not isinstance(input, ShardTensor) or not is_dim(dim) or not input.ndim:
            return NotImplemented
        dim = normal_dim(dim, input.ndim)
        values, indices = run_there_and_back(input, [dim], lambda x: tuple(func(x, dim)))
        return return_type((values, indices))

    handler.__doc__ = "Values and global indices. Communication: none along an unsharded dim, else three all-to-alls."
    return handler


cummax = shard_function(torch.cummax, Tensor.cummax)(torch_names(_running_extreme(torch.cummax, torch.return_types.cummax)))
cummin = shard_function(torch.cummin, Tensor.cummin)(torch_names(_running_extreme(torch.cummin, torch.return_types.cummin)))

_HANDLERS = {
    aten.cumsum.default: cumsum,
    aten.cumprod.default: cumprod,
    aten.logcumsumexp.default: logcumsumexp,
}


@shard_rule(*_HANDLERS)
def scan_rule(op, args, kwargs):
    """Below autograd. Communication: as the function."""
    with torch.no_grad():
        result = _HANDLERS[op](*args, **kwargs)
    if result is NotImplemented:
        from shardwise.shard_tensor.fallback import fallback_rule

        return fallback_rule(op, args, kwargs)
    return result

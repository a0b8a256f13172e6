"""Maxima, minima, their places, and any and all, over dims that may be sharded.

Indices are global; among equal values the lowest index wins, and NaN counts as both largest and smallest, as in torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.collectives import functional as comm
from shardwise.shard_tensor.reduction_plan import (
    ReductionPlan,
    completed,
    extreme_over_ranks,
    highest,
    lowest,
    padded,
    reduction_plan,
)
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, needs_grad, redistribute, to_local

aten = torch.ops.aten
_NoTorchFunction = torch._C.DisableTorchFunctionSubclass
_NOWHERE = torch.iinfo(torch.int64).max
LARGEST = {aten.amax.default, aten.max.default, aten.max.dim, aten.argmax.default}


def _identity(op, dtype: torch.dtype) -> float | int | bool:
    return lowest(dtype) if op in LARGEST else highest(dtype)


# ---------------------------------------------------------------------- values


@shard_rule(aten.amax.default, aten.amin.default)
def amax(op, args, kwargs):
    """Communication: one all-reduce of the result's size."""
    x, dim, keepdim = (*args, *((), False)[len(args) - 1 :])
    return _values(op, x, kwargs.get("dim", dim), kwargs.get("keepdim", keepdim))


@shard_rule(aten.max.default, aten.min.default)
def max_of_all(op, args, kwargs):
    """Communication: one all-reduce of one element."""
    (x,) = args
    return _values(op, x, None, False)


@shard_rule(aten.aminmax.default)
def aminmax(op, args, kwargs):
    """Communication: two all-reduces of the result's size."""
    (x,) = args
    dim, keepdim = kwargs.get("dim"), kwargs.get("keepdim", False)
    return _values(aten.amin.default, x, dim, keepdim), _values(aten.amax.default, x, dim, keepdim)


def _values(op, x: ShardTensor, dim, keepdim: bool) -> ShardTensor:
    local, spec = completed(x)
    plan = reduction_plan(spec, dim, keepdim)
    value = padded(local, plan, _identity(op, local.dtype))
    value = op(value) if op in (aten.max.default, aten.min.default) else op(value, plan.dims, keepdim)
    if plan.axes:
        value = extreme_over_ranks(value, plan.group, largest=op in LARGEST)
    return ShardTensor(value, plan.out)


@shard_rule(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
def any_all(op, args, kwargs):
    """Communication: one all-reduce of the result's size."""
    x, dim, keepdim = (*args, *(None, False)[len(args) - 1 :])
    dim, keepdim = kwargs.get("dim", dim), kwargs.get("keepdim", keepdim)
    is_all = op in (aten.all.default, aten.all.dim, aten.all.dims)
    local, spec = completed(x)
    if dim is not None and not isinstance(dim, int) and not len(dim):  # an empty list reduces nothing
        return ShardTensor(op(local, dim, keepdim), spec)
    plan = reduction_plan(spec, dim, keepdim)
    local = padded(local, plan, is_all)
    value = (aten.all.dims if is_all else aten.any.dims)(local, plan.dims, keepdim)
    if plan.axes:
        value = comm.all_reduce(value, plan.group, op="min" if is_all else "max")
    return ShardTensor(value, plan.out)


# ---------------------------------------------------------------------- places


@shard_rule(aten.max.dim, aten.min.dim)
def max_dim(op, args, kwargs):
    """Values and global indices. Communication: two all-reduces of the result's size if `dim` is sharded."""
    x, dim, keepdim = (*args, False)[:3]
    keepdim = kwargs.get("keepdim", keepdim)
    local, spec = completed(x)
    plan = reduction_plan(spec, dim, keepdim)
    value, index = op(padded(local, plan, _identity(op, local.dtype)), dim, keepdim)
    if plan.axes:
        index = index + spec.box()[plan.dims[0]][0]
        value, index = _first_extreme(value, index, plan, largest=op in LARGEST)
    return ShardTensor(value, plan.out), ShardTensor(index, plan.out)


@shard_rule(aten.argmax.default, aten.argmin.default)
def argmax(op, args, kwargs):
    """Global index. Communication: two all-reduces of the result's size if a reduced dim is sharded."""
    x, dim, keepdim = (*args, *(None, False)[len(args) - 1 :])
    dim, keepdim = kwargs.get("dim", dim), kwargs.get("keepdim", keepdim)
    local, spec = completed(x)
    plan = reduction_plan(spec, dim, keepdim)
    local = padded(local, plan, _identity(op, local.dtype))
    index = op(local, dim, keepdim)
    if plan.axes:
        best = aten.amax.default if op in LARGEST else aten.amin.default
        value = best(local, plan.dims, keepdim)
        index = _global_flat(index, local.shape, spec) if dim is None else index + spec.box()[plan.dims[0]][0]
        _, index = _first_extreme(value, index, plan, largest=op in LARGEST)
    return ShardTensor(index, plan.out)


def _global_flat(index: Tensor, local_shape, spec: ShardTensorSpec) -> Tensor:
    """The row-major index in the whole tensor of a row-major index in the shard."""
    result, step = torch.zeros_like(index), 1
    for size, (start, _), whole in zip(reversed(local_shape), reversed(spec.box()), reversed(spec.shape), strict=True):
        result = result + (index % size + start) * step
        index = index // size
        step *= whole
    return result


def _first_extreme(value: Tensor, index: Tensor, plan: ReductionPlan, *, largest: bool) -> tuple[Tensor, Tensor]:
    """The extreme over ranks and the lowest index that has it. A rank without rows offers none."""
    best = extreme_over_ranks(value, plan.group, largest=largest)
    hit = value == best
    if value.dtype.is_floating_point:
        hit = hit | (value.isnan() & best.isnan())
    offered = torch.where(hit, index, _NOWHERE) if plan.local_count else torch.full_like(index, _NOWHERE)
    return best, comm.all_reduce(offered, plan.group, op="min")


# ---------------------------------------------------------------------- the gradient of a chosen value


class _Select(torch.autograd.Function):
    """One value of each row, and its index. The gradient goes to the rank that holds the row; nothing is gathered."""

    @staticmethod
    def forward(ctx, x: ShardTensor, op, dim: int, keepdim: bool):
        values, indices = op(x, dim, keepdim)
        ctx.save_for_backward(indices)
        ctx.spec, ctx.dim, ctx.keepdim = x._spec.gradient(), dim, keepdim
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    def backward(ctx, grad, _):
        (indices,) = ctx.saved_tensors
        return chosen_gradient(grad, indices, ctx.spec, ctx.dim, ctx.keepdim), None, None, None


def chosen_gradient(grad: ShardTensor, indices: ShardTensor, spec: ShardTensorSpec, dim: int, keepdim: bool) -> ShardTensor:
    """Zeros laid out as `spec`, with `grad` where the global `indices` along `dim` point; differentiable in `grad`.

    grad, indices: the shape of `spec` with `dim` reduced (or of size 1, with `keepdim`). Communication: none.
    """
    plan = reduction_plan(spec, dim, keepdim)
    local = to_local(redistribute(grad, plan.out), plan.pending)
    index = redistribute(indices, plan.out)._local_tensor
    if not spec.ndim:
        return from_local(local, spec)
    (dim,) = plan.dims
    if not keepdim:
        local, index = local.unsqueeze(dim), index.unsqueeze(dim)
    start, stop = spec.box()[dim]
    inside = (index >= start) & (index < stop)
    rows = max(stop - start, 1)  # one row more where there is none, so that the graph stays whole
    shape = [*local.shape[:dim], rows, *local.shape[dim + 1 :]]
    zeros = torch.zeros(shape, dtype=local.dtype, device=local.device)
    result = zeros.scatter(dim, (index - start).clamp(0, rows - 1), torch.where(inside, local, 0))
    return from_local(result.narrow(dim, 0, stop - start), spec)


def _selecting(func, op, return_type):
    def handler(input, *args, **kwargs):
        named = dict(zip(("dim", "keepdim"), args, strict=False)) | kwargs
        dim = named.pop("dim", named.pop("axis", None))
        keepdim = named.pop("keepdim", named.pop("keepdims", False))
        if named or not isinstance(dim, int) or isinstance(dim, bool) or not isinstance(input, ShardTensor) or not needs_grad(input):
            return NotImplemented
        with _NoTorchFunction():
            return return_type(_Select.apply(input, op, dim, bool(keepdim)))

    handler.__name__ = func
    return handler


shard_function(torch.max, Tensor.max)(_selecting("max", aten.max.dim, torch.return_types.max))
shard_function(torch.min, Tensor.min)(_selecting("min", aten.min.dim, torch.return_types.min))

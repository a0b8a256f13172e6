"""Sums, means, moments and norms over dims that may be sharded.

A sum or mean over a sharded dim is a pending sum (`Partial`): nothing is sent until its value is needed. Half types are
summed in float32 and completed at once. A mean divides by the global count. Variances combine the ranks' means and
squared deviations (Chan, Golub and LeVeque 1979), never E[x^2] - E[x]^2. A rank with no rows contributes the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

from shardwise.collectives import functional as comm
from shardwise.shard_tensor.reduction_plan import (
    HALF,
    ReductionPlan,
    accumulation_dtype,
    completed,
    extreme_over_ranks,
    lowest,
    moments,
    padded,
    reduction_plan,
)
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, needs_grad, redistribute, to_local

aten = torch.ops.aten


# ---------------------------------------------------------------------- sums and means


def _linear_input(x: ShardTensor) -> tuple[Tensor, ShardTensorSpec]:
    """The shard of `x`, its pending sums kept: a sum of sums may stay pending."""
    return (x._local_tensor, x._spec) if _stays_pending(x._spec) else completed(x)


def _stays_pending(spec: ShardTensorSpec) -> bool:
    return all(spec.placements[i].reduce_op in ("sum", "avg") for i in spec.partial_mesh_dims)


def _summed(op, local: Tensor, spec: ShardTensorSpec, dim, keepdim: bool, dtype, divide: bool = False) -> ShardTensor:
    plan = reduction_plan(spec, dim, keepdim)
    half = local.dtype in HALF and (dtype is None or dtype in HALF)
    total = op(local, plan.dims, keepdim, dtype=torch.float32 if half and (plan.axes or divide) else dtype)
    if divide:
        total = total / plan.count
    if not half:
        return ShardTensor(total, plan.pending)
    return ShardTensor(_completed_half(total, plan).to(dtype or local.dtype), plan.out)


def _completed_half(total: Tensor, plan: ReductionPlan) -> Tensor:
    return comm.all_reduce(total, plan.group) if plan.axes else total


@shard_rule(aten.sum.default, aten.sum.dim_IntList, aten.nansum.default)
def sum_rule(op, args, kwargs):
    """Communication: none, the result is a pending sum; half types over a sharded dim: one all-reduce in float32."""
    x, dim, keepdim = (*args, None, False)[:3] if len(args) < 3 else args
    local, spec = completed(x) if op is aten.nansum.default else _linear_input(x)
    reduce = aten.nansum.default if op is aten.nansum.default else aten.sum.dim_IntList
    return _summed(reduce, local, spec, kwargs.get("dim", dim), kwargs.get("keepdim", keepdim), kwargs.get("dtype"))


@shard_rule(aten.mean.default, aten.mean.dim)
def mean_rule(op, args, kwargs):
    """Divides by the global count. Communication: as `sum`."""
    x, dim, keepdim = (*args, None, False)[:3] if len(args) < 3 else args
    dim, keepdim, dtype = kwargs.get("dim", dim), kwargs.get("keepdim", keepdim), kwargs.get("dtype")
    local, spec = _linear_input(x)
    result_dtype = dtype or local.dtype
    if not (result_dtype.is_floating_point or result_dtype.is_complex):
        raise RuntimeError(
            f"mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype. Got: {result_dtype}"
        )
    return _summed(aten.sum.dim_IntList, local, spec, dim, keepdim, dtype, divide=True)


@shard_rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(op, args, kwargs):
    """Communication: none, the result is a pending sum."""
    x, dim = (*args, None)[:2]
    local, spec = completed(x)
    plan = reduction_plan(spec, kwargs.get("dim", dim))
    return ShardTensor(aten.count_nonzero.dim_IntList(local, plan.dims), plan.pending)


def _sum_function(name: str, divide: bool):
    """Sum or mean of floats: the gradient is expanded on each rank's shard alone, never at global size."""

    def handler(input, dim=None, keepdim=False, *, dtype=None, **other):
        dim = other.pop("axis", dim)
        keepdim = other.pop("keepdims", keepdim)
        if other or dtype is not None or not input.dtype.is_floating_point or not isinstance(input, ShardTensor) or not _is_dim(dim):
            return NotImplemented
        half = input.dtype in HALF
        x = input if _stays_pending(input._spec) and not half else redistribute(input, input._spec.gradient())
        plan = reduction_plan(x._spec, dim, bool(keepdim))
        total = to_local(x).sum(plan.dims, keepdim, dtype=torch.float32 if half else None)
        if half and plan.axes:
            total = comm.sum_forward(total, plan.group)
        if divide:
            total = total / plan.count
        return from_local(total.to(input.dtype), plan.out if half else plan.pending)

    handler.__name__ = name
    return handler


def _is_dim(dim) -> bool:
    return dim is None or isinstance(dim, int) or all(isinstance(d, int) for d in dim)


shard_function(torch.sum, Tensor.sum)(_sum_function("sum", divide=False))
shard_function(torch.mean, Tensor.mean)(_sum_function("mean", divide=True))


# ---------------------------------------------------------------------- moments


@shard_rule(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def variance(op, args, kwargs):
    """Communication: two all-reduces of the result's size over the axes that shard the reduced dims."""
    x, dim = (*args, None)[:2]
    keepdim, correction = kwargs.get("keepdim", False), kwargs.get("correction")
    local, spec = completed(x)
    plan = reduction_plan(spec, kwargs.get("dim", dim), keepdim)
    if not plan.axes and local.numel():
        result = op(local, plan.dims, correction=correction, keepdim=keepdim)
        return tuple(ShardTensor(r, plan.out) for r in result) if isinstance(result, tuple) else ShardTensor(result, plan.out)
    mean, squares = moments(local, plan, keepdim)
    spread = squares / max(plan.count - (1 if correction is None else correction), 0)
    if op in (aten.std.correction, aten.std_mean.correction):
        spread = spread.sqrt()
    if local.dtype in HALF:
        mean, spread = mean.to(local.dtype), spread.to(local.dtype)
    if op in (aten.var.correction, aten.std.correction):
        return ShardTensor(spread, plan.out)
    return ShardTensor(spread, plan.out), ShardTensor(mean, plan.out)


# ---------------------------------------------------------------------- norms


@shard_rule(aten.linalg_vector_norm.default)
def vector_norm(op, args, kwargs):
    """Any order. Communication: one all-reduce of the result's size."""
    x, order, dim, keepdim = (*args, *(2, None, False)[len(args) - 1 :])
    order, dim, keepdim = kwargs.get("ord", order), kwargs.get("dim", dim), kwargs.get("keepdim", keepdim)
    return _norm(x, order, dim, keepdim, kwargs.get("dtype"))


@shard_rule(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype)
def norm(op, args, kwargs):
    """As `linalg.vector_norm`."""
    x, order, dim, keepdim = (*args, *(2, None, False)[len(args) - 1 :])
    order = kwargs.get("p", order)
    dim, keepdim = kwargs.get("dim", dim), kwargs.get("keepdim", keepdim)
    return _norm(x, 2 if order is None else order, dim, keepdim, kwargs.get("dtype"))


@shard_rule(aten._foreach_norm.Scalar)
def foreach_norm(op, args, kwargs):
    """The norm of each tensor. Communication: one all-reduce each."""
    tensors, order = (*args, 2)[:2]
    dtype = kwargs.get("dtype", args[2] if len(args) > 2 else None)
    order = kwargs.get("ord", order)
    return [
        _norm(x, order, None, False, dtype) if isinstance(x, ShardTensor) else aten.linalg_vector_norm(x, order, dtype=dtype)
        for x in tensors
    ]


def _norm(x: ShardTensor, order: float, dim, keepdim: bool, dtype) -> ShardTensor:
    local, spec = completed(x)
    plan = reduction_plan(spec, dim, keepdim)
    if not plan.axes:
        return ShardTensor(aten.linalg_vector_norm(local, order, plan.dims, keepdim, dtype=dtype), plan.out)
    largest = order == float("inf")
    smallest = order < 0
    local = padded(local, plan, float("inf") if smallest else 0)
    accumulate = dtype or local.dtype
    result_dtype = accumulate.to_real()
    value = aten.linalg_vector_norm(local, order, plan.dims, keepdim, dtype=accumulation_dtype(accumulate))
    if largest or order == float("-inf"):
        value = extreme_over_ranks(value, plan.group, largest=largest)
    elif order == 0:
        value = comm.all_reduce(value, plan.group)
    else:
        value = comm.all_reduce(value if order == 1 else value**order, plan.group)
        value = value if order == 1 else value ** (1 / order)
    return ShardTensor(value.to(result_dtype), plan.out)


# ---------------------------------------------------------------------- products and exponents


@shard_rule(aten.prod.default, aten.prod.dim_int)
def prod_rule(op, args, kwargs):
    """Communication: one all-reduce of the result's size."""
    x, dim, keepdim = (*args, *(None, False)[len(args) - 1 :])
    dim, keepdim, dtype = kwargs.get("dim", dim), kwargs.get("keepdim", keepdim), kwargs.get("dtype")
    local, spec = completed(x)
    plan = reduction_plan(spec, dim, keepdim)
    half = local.dtype in HALF and dtype is None and bool(plan.axes)
    named = () if dim is None else (dim, keepdim)
    value = op(local, *named, dtype=torch.float32 if half else dtype)
    if plan.axes:
        value = _product_over_ranks(value, plan.group)
    return ShardTensor(value.to(local.dtype) if half else value, plan.out)


def _product_over_ranks(value: Tensor, group) -> Tensor:
    if value.is_complex():
        return comm.all_gather(value.unsqueeze(0), 0, (1,) * group.size(), group).prod(0)
    return comm.all_reduce(value, group, op="product")


@shard_function(torch.prod, Tensor.prod)
def prod_function(input, dim=None, keepdim=False, *, dtype=None, **other):
    """Where autograd records: each rank's product, gathered, multiplied; right at zeros too. Communication: one all-gather."""
    if other or not isinstance(input, ShardTensor) or not needs_grad(input) or not (dim is None or isinstance(dim, int)):
        return NotImplemented
    x = redistribute(input, input._spec.gradient())
    plan = reduction_plan(x._spec, dim, keepdim)
    local = to_local(x)
    part = local.prod(dtype=dtype) if dim is None else local.prod(dim, keepdim, dtype=dtype)
    if not plan.axes:
        return from_local(part, plan.out)
    return from_local(gathered_over_ranks(part, plan).prod(0), plan.out)


def gathered_over_ranks(part: Tensor, plan: ReductionPlan) -> Tensor:
    """The ranks' values on a new leading dim, complete on each rank; differentiable. Communication: one all-gather."""
    mesh, out = plan.out.mesh, plan.out
    ranks = 1
    for axis in plan.axes:
        ranks *= mesh.size(axis)
    stacked = out.cached(("stacked", plan.axes), lambda: _stacked(plan, ranks))
    x = redistribute(from_local(part.unsqueeze(0), stacked), stacked.replicate(plan.axes))
    return to_local(x)


def _stacked(plan: ReductionPlan, ranks: int) -> ShardTensorSpec:
    out = plan.out
    shifted = out.with_dims((ranks, *out.shape), (None, *range(out.ndim)))
    placements = tuple(Shard(0) if i in plan.axes else p for i, p in enumerate(shifted.placements))
    return ShardTensorSpec(out.mesh, placements, shifted.shape, ((1,) * ranks, *shifted.sizes[1:]), out.dtype)


@shard_rule(aten.logsumexp.default)
def logsumexp(op, args, kwargs):
    """Communication: two all-reduces of the result's size (the maximum, the sum)."""
    x, dim, keepdim = (*args, False)[:3]
    dim, keepdim = kwargs.get("dim", dim), kwargs.get("keepdim", keepdim)
    local, spec = completed(x)
    plan = reduction_plan(spec, dim, keepdim)
    if not plan.axes:
        return ShardTensor(op(local, plan.dims, keepdim), plan.out)
    if not local.dtype.is_floating_point and not local.dtype.is_complex:
        local = local.to(torch.get_default_dtype())
    value = op(padded(local, plan, lowest(local.dtype)).to(accumulation_dtype(local.dtype)), plan.dims, keepdim)
    return ShardTensor(log_sum_over_ranks(value, plan.group).to(local.dtype), plan.out)


def log_sum_over_ranks(value: Tensor, group) -> Tensor:
    """log of the sum over ranks of exp(value); no gradient."""
    top = extreme_over_ranks(value, group, largest=True)
    top = torch.where(top.abs() == torch.inf, 0, top)
    return comm.all_reduce((value - top).exp(), group).log() + top

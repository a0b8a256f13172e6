"""Softmax and log-softmax along dims that may be sharded.

Source of the stable form: the maximum is subtracted before the exponential, over all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.collectives import functional as comm
from shardwise.shard_tensor.redistribute import redistribute_local
from shardwise.shard_tensor.reduction_plan import (
    ReductionPlan,
    accumulation_dtype,
    completed,
    extreme_over_ranks,
    lowest,
    padded,
    reduction_plan,
)
from shardwise.shard_tensor.registry import shard_rule
from shardwise.shard_tensor.tensor import ShardTensor

aten = torch.ops.aten


@shard_rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def softmax(op, args, kwargs):
    """Communication: none along an unsharded dim, else two all-reduces of the size of one row (the maximum, the sum)."""
    x, dim = args[:2]
    local, spec = completed(x)
    plan = reduction_plan(spec, dim, keepdim=True)
    if not plan.axes or not plan.count:
        return ShardTensor(op(local, *args[1:], **kwargs), spec)
    if op is aten._safe_softmax.default:
        dtype = kwargs.get("dtype", args[2] if len(args) > 2 else None) or local.dtype
    else:
        dtype = torch.float32 if args[2] else local.dtype
    shifted, total = _shifted(local.to(accumulation_dtype(dtype)), plan)
    if op is aten._log_softmax.default:
        return ShardTensor((shifted - total.log()).to(dtype), spec)
    result = shifted.exp() / total
    if op is aten._safe_softmax.default:  # rows of -inf only
        result = result.masked_fill(total == 0, 0)
    return ShardTensor(result.to(dtype), spec)


def _shifted(local: Tensor, plan: ReductionPlan) -> tuple[Tensor, Tensor]:
    """`local` less the maximum over all ranks, and the sum of exponentials of that over all ranks."""
    dim = plan.dims
    top = padded(local, plan, lowest(local.dtype)).amax(dim, keepdim=True)
    top = extreme_over_ranks(top, plan.group, largest=True)
    shifted = local - torch.where(top == -torch.inf, 0, top)
    return shifted, comm.all_reduce(shifted.exp().sum(dim, keepdim=True), plan.group)


@shard_rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(op, args, kwargs):
    """Communication: none along an unsharded dim, else one all-reduce of the size of one row."""
    grad, output, dim, dtype = args
    output_local, spec = completed(output) if isinstance(output, ShardTensor) else (output, grad._spec.gradient())
    grad_local = _laid(grad, spec)
    output_local = output_local if isinstance(output, ShardTensor) else _laid(output, spec)
    plan = reduction_plan(spec, dim, keepdim=True)
    if not plan.axes or not plan.count:
        return ShardTensor(op(grad_local, output_local, dim, dtype), spec)
    wide = accumulation_dtype(output_local.dtype)
    g, y = grad_local.to(wide), output_local.to(wide)
    log = op is aten._log_softmax_backward_data.default
    total = comm.all_reduce((g if log else g * y).sum(plan.dims, keepdim=True), plan.group)
    result = g - y.exp() * total if log else y * (g - total)
    return ShardTensor(result.to(dtype), spec)


def _laid(x: Tensor, spec) -> Tensor:
    """The shard of `x` (plain: complete on every rank) in the layout of `spec`."""
    if isinstance(x, ShardTensor):
        return redistribute_local(x._local_tensor, x._spec, spec)
    return redistribute_local(x, spec.replicate(), spec)

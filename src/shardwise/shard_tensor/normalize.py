"""Subtracting the mean and dividing by the spread of groups of elements that lie on several ranks.

One autograd function for every norm whose groups cross shards. Statistics are taken over all ranks in two passes, in
float32 for half types, so that a large offset costs no digits; only the shard and the statistics are kept for backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.collectives import functional as comm
from shardwise.shard_tensor.reduction_plan import ReductionPlan, accumulation_dtype, moments


class Normalize(torch.autograd.Function):
    """`(x - mean) / sqrt(var + eps) * weight + bias` on this rank's shard; also the mean and the sum of squared deviations.

    plan: which dims of `x` make a group, on which ranks, and how many elements it has (a plan with `keepdim`).
    centered: False leaves the mean in, as RMS norm does. weight, bias: plain, broadcast against the shard.

    Communication: forward two all-reduces of the size of the statistics (one if not centered), backward one of twice that.
    Gradient, with `n` elements in a group, `h` the normalised input and `g` the gradient times the weight:
    `(g - mean(g) - h * mean(g * h)) / sqrt(var + eps)` (Ioffe and Szegedy 2015). Differentiable any number of times.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: ReductionPlan, eps: float, centered: bool):
        wide = x.to(accumulation_dtype(x.dtype))
        if centered:
            mean, squares = moments(wide, plan, True)
            result = wide - mean
        else:
            mean, squares = None, _over_ranks(wide.square().sum(plan.dims, keepdim=True), plan)
            result = wide
        scale = torch.rsqrt(squares / plan.count + eps)
        result = result * scale
        if weight is not None:
            result = result * weight
        if bias is not None:
            result = result + bias
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.plan, ctx.eps = plan, eps
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in (mean, squares) if t is not None))
        return result.to(x.dtype), mean, squares

    @staticmethod
    def backward(ctx, grad: Tensor | None, *_):
        if grad is None:
            return (None,) * 6
        x, weight, bias, mean, scale = ctx.saved_tensors
        plan = ctx.plan
        wide, grad = x.to(scale.dtype), grad.to(scale.dtype)
        if torch.is_grad_enabled():
            mean, scale = _statistics(wide, plan, ctx.eps, mean is not None)
        hat = (wide if mean is None else wide - mean) * scale
        inner = grad if weight is None else grad * weight
        sums = [(inner * hat).sum(plan.dims, keepdim=True)]
        if mean is not None:
            sums.append(inner.sum(plan.dims, keepdim=True))
        means = _over_ranks(torch.stack(sums), plan) / plan.count
        result = inner - hat * means[0]
        result = (result if mean is None else result - means[1]) * scale
        grad_weight = (grad * hat).sum_to_size(weight.shape).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum_to_size(bias.shape).to(bias.dtype) if ctx.needs_input_grad[2] else None
        return result.to(x.dtype), grad_weight, grad_bias, None, None, None


def _over_ranks(total: Tensor, plan: ReductionPlan) -> Tensor:
    return comm.all_reduce(total, plan.group) if plan.axes else total


def _statistics(x: Tensor, plan: ReductionPlan, eps: float, centered: bool) -> tuple[Tensor | None, Tensor]:
    """Mean and reciprocal spread as differentiable functions of `x`, for second derivatives."""
    mean = _over_ranks(x.sum(plan.dims, keepdim=True), plan) / plan.count if centered else None
    apart = x if mean is None else x - mean
    return mean, torch.rsqrt(_over_ranks(apart.square().sum(plan.dims, keepdim=True), plan) / plan.count + eps)

"""A convolution that keeps its own rows and its neighbours' apart for backward.

The fetched input is a new tensor: kept whole it would double what a rank keeps, since the op before has usually kept the
rank's own rows already. Kept are those rows (shared with whoever else keeps them) and the few fetched ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.shard_tensor.halo import Halo, fetch
from shardwise.shard_tensor.spec import ShardTensorSpec

_convolution = torch.ops.aten.convolution.default
_convolution_backward = torch.ops.aten.convolution_backward.default


def lean_convolution(own: Tensor, spec: ShardTensorSpec, halo: Halo, weight: Tensor, bias: Tensor | None, args: tuple) -> Tensor:
    """The convolution of `own` and of the rows around it that `halo` reads in its one sharded dim.

    args: stride, padding, dilation, groups of the local call. Communication: that of `fetch`; a second derivative fetches again.
    """
    fetched = fetch(own, spec, [halo])
    start, stop = halo.owned[halo.block]
    first, last = halo.reads[halo.block]
    before, after = max(0, min(start, last) - first), max(0, last - max(stop, first))
    count = fetched.shape[halo.dim] - before - after
    inside = (max(first, start) - start if count else 0, count)
    return _LeanConvolution.apply(own, fetched, weight, bias, (spec, halo), before, after, inside, args)


class _LeanConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, fetched, weight, bias, where, before: int, after: int, inside: tuple[int, int], args: tuple):
        dim = where[1].dim
        rows = fetched.shape[dim]
        ctx.save_for_backward(
            own, fetched.narrow(dim, 0, before).clone(), fetched.narrow(dim, rows - after, after).clone(), weight, bias
        )
        ctx.where, ctx.inside, ctx.args = where, inside, args
        stride, padding, dilation, groups = args
        return _convolution(fetched, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx, grad: Tensor):
        own, before, after, weight, bias = ctx.saved_tensors
        _, wants_input, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        spec, halo = ctx.where
        stride, padding, dilation, groups = ctx.args
        zeros = [0] * len(stride)
        if torch.is_grad_enabled():  # second order: the same in differentiable steps, from the rank's own rows
            wanted = (wants_input, False, wants_weight, wants_bias)
            again = _convolution(fetch(own, spec, [halo]), weight, bias, stride, padding, dilation, False, zeros, groups)
            inputs = [x for x, wants in zip((own, None, weight, bias), wanted, strict=True) if wants]
            found = iter(torch.autograd.grad(again, inputs, grad, create_graph=True))
            return *(next(found) if wants else None for wants in wanted), *_NOTHING
        fetched = torch.cat([before, own.narrow(halo.dim, *ctx.inside), after], halo.dim)
        sizes = None if bias is None else list(bias.shape)
        grads = _convolution_backward(
            grad, fetched, weight, sizes, stride, padding, dilation, False, zeros, groups, [wants_input, wants_weight, wants_bias]
        )
        return None, *grads, *_NOTHING


_NOTHING = (None,) * 5

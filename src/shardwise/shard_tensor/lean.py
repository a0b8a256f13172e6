"""Convolution of fetched rows that keeps no second copy of the input for backward.

Autograd would keep the local rows together with their halo, beside the local rows that the op before often keeps too (a ReLU keeps its
result). Here the local rows themselves and the halo are kept, and put together again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.shard_tensor.halo import Halo, fetch
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.spec.spans import as_spans, intersect


@dataclass(frozen=True, kw_only=True)
class LeanConvolution:
    """A convolution `func(x, weight, bias, *args)` of rows fetched by `halos`; args are stride, padding, dilation and groups.

    Communication: that of `fetch`; a second derivative fetches again, so either all ranks use this or none.
    rows: (dim, first, count, before) for each halo: which local rows lie in the fetched ones, and after how many others.
    """

    func: Callable
    args: tuple
    spec: ShardTensorSpec
    halos: tuple[Halo, ...]
    rows: tuple[tuple[int, int, int, int], ...]

    def __call__(self, local: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        fetched = fetch(local, self.spec, self.halos)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (local, weight, bias)):
            return _Convolution.apply(fetched, local, weight, bias, self)
        return self.func(fetched, weight, bias, *self.args)

    def frame(self, fetched: Tensor) -> list[Tensor]:
        """Copies of what surrounds the local rows, the last dim first."""
        pieces = []
        for dim, _, count, before in reversed(self.rows):
            after = before + count
            pieces += [fetched.narrow(dim, 0, before).clone(), fetched.narrow(dim, after, fetched.shape[dim] - after).clone()]
            fetched = fetched.narrow(dim, before, count)
        return pieces

    def together(self, local: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """The fetched rows, from the local ones and their frame."""
        for dim, first, count, _ in self.rows:
            local = local.narrow(dim, first, count)
        for index, (dim, *_) in enumerate(self.rows):
            place = 2 * (len(self.rows) - 1 - index)
            local = torch.cat((pieces[place], local, pieces[place + 1]), dim)
        return local


def rows_within(halo: Halo) -> tuple[int, int, int, int]:
    """(dim, first, count, before): the owned rows that are among the rows read, and how many are read before them."""
    owned = halo.owned[halo.block]
    before = 0
    for span in as_spans(halo.reads[halo.block]):
        start, stop = intersect(span, owned)
        if stop > start:
            return halo.dim, start - owned[0], stop - start, before + start - span[0]
        before += span[1] - span[0]
    return halo.dim, 0, 0, 0


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fetched: Tensor, local: Tensor, weight: Tensor, bias: Tensor | None, conv: LeanConvolution) -> Tensor:
        ctx.conv, ctx.has_bias = conv, bias is not None
        ctx.save_for_backward(local, weight, bias, *conv.frame(fetched))
        return conv.func(fetched, weight, bias, *conv.args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        conv = ctx.conv
        local, weight, bias, *pieces = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.has_bias and ctx.needs_input_grad[3]]
        if torch.is_grad_enabled():  # a gradient of the gradient: of the same convolution, recorded
            fetched = fetch(local, conv.spec, conv.halos)
            result = conv.func(fetched, weight, bias, *conv.args)
            inputs = [t for t, want in zip((fetched, weight, bias), wanted, strict=True) if want]
            found = iter(torch.autograd.grad(result, inputs, grad, create_graph=True))
            grads = [next(found) if want else None for want in wanted]
        else:
            stride, padding, dilation, groups = conv.args
            sizes = [weight.shape[0]] if ctx.has_bias else None
            grads = torch.ops.aten.convolution_backward.default(
                grad, conv.together(local, pieces), weight, sizes, stride, padding, dilation, False, [0] * len(stride), groups, wanted
            )
        return grads[0], None, grads[1], grads[2], None

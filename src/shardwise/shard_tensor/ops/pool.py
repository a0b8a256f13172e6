"""Average and maximum pooling with any window, stride, padding, dilation and ceil mode, on any shards.

Each rank makes the output rows whose windows lie around its own input rows, and fetches the rows they read. Lp pooling is made of
average pooling by torch itself. Indices count in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import MissingShardPatch
from shardwise.shard_tensor.empty import connected_empty
from shardwise.shard_tensor.halo import Halo, cut, fetch, grown, make_halo, with_sizes
from shardwise.shard_tensor.ops.conv import each
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.spec.spans import Span, Spans, Window
from shardwise.spec.windows import anchor, has_empty_window, window_reads

AVERAGES = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MAXIMA = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
WITH_INDICES = {1: F.max_pool1d_with_indices, 2: F.max_pool2d_with_indices, 3: F.max_pool3d_with_indices}


@lru_cache(maxsize=4096)
def pooled_shape(func: Callable, shape: tuple[int, ...], args: tuple) -> tuple[int, ...]:
    """The shape that torch gives for these arguments, without data, and torch's errors for bad ones."""
    result = func(torch.empty(shape, device="meta"), *args)
    return tuple((result[0] if isinstance(result, tuple) else result).shape)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the ranks do. padding: of the local call. starts: the global row of the first local row of each spatial dim.
    counts: (dim, rows in each window made here), where they differ from the window size."""

    out: ShardTensorSpec
    halos: tuple[Halo, ...]
    padding: tuple[int, ...]
    starts: tuple[int, ...]
    least: tuple[tuple[int, int], ...]
    counts: tuple[tuple[int, tuple[int, ...]], ...]


def _make_plan(spec: ShardTensorSpec, windows: tuple[Window, ...], shape: tuple[int, ...], include_pad: bool | None) -> _Plan:
    """For averages `include_pad` says how rows count; None for maxima, where rows beyond the tensor repeat one of the window."""
    first = spec.ndim - len(windows)
    halos, least, counts = [], [], []
    padding, starts = [window.pad_before for window in windows], [0] * len(windows)
    for i, window in enumerate(windows):
        dim = first + i
        if spec.sizes[dim] is None:
            continue
        halo = _halo(spec, dim, window, shape[dim], include_pad is None)
        halos.append(halo)
        padding[i], starts[i] = 0, window.input_span(halo.made)[0]
        if halo.made[0] == halo.made[1]:
            least.append((dim, window.reach))
        if include_pad is not None:
            rows = tuple(_rows_counted(window, o, spec.shape[dim], include_pad) for o in range(*halo.made))
            if any(count != window.size for count in rows):
                counts.append((dim, rows))
    return _Plan(
        out=with_sizes(spec, shape, halos),
        halos=tuple(halos),
        padding=tuple(padding),
        starts=tuple(starts),
        least=tuple(least),
        counts=tuple(counts),
    )


def _halo(spec: ShardTensorSpec, dim: int, window: Window, outputs: int, repeat: bool) -> Halo:
    at, size = anchor(window, spec.sizes[dim], outputs), spec.shape[dim]

    def reads(owned: Span, makes: Span) -> Span | Spans:
        return window_reads(window, owned, makes, size, repeat)

    return make_halo(spec, dim, outputs, lambda o: o * window.stride + at, reads)


def _rows_counted(window: Window, output: int, size: int, include_pad: bool) -> int:
    """By how many rows torch divides: windows end with the padding, and padding counts or not."""
    start = output * window.stride - window.pad_before
    stop = min(start + window.size, size + window.pad_after)
    return stop - start if include_pad else min(stop, size) - max(start, 0)


def _windows(kernel: tuple, stride: tuple, padding: tuple, dilation: tuple) -> tuple[Window, ...]:
    return tuple(
        Window(size=k, stride=s, dilation=d, pad_before=p, pad_after=p)
        for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)
    )


def _strides(stride, kernel: tuple[int, ...]) -> tuple[int, ...]:
    return kernel if stride is None or stride == () or stride == [] else each(stride, len(kernel))


# ---------------------------------------------------------------------- average


@shard_function(torch.avg_pool1d)
def avg_pool1d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True):
    """Communication: see `_average`."""
    return _average(1, input, kernel_size, stride, padding, ceil_mode, count_include_pad, None)


@shard_function(torch._C._nn.avg_pool2d)
def avg_pool2d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    """Communication: see `_average`."""
    return _average(2, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@shard_function(torch._C._nn.avg_pool3d)
def avg_pool3d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    """Communication: see `_average`."""
    return _average(3, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def _average(n: int, x: ShardTensor, kernel_size, stride, padding, ceil_mode: bool, include_pad: bool, divisor: int | None) -> ShardTensor:
    """Average pooling over the last `n` dims.

    Communication: for each sharded one of them, one exchange of the rows that a rank reads and does not own, backward the same.
    """
    kernel = each(kernel_size, n)
    strides, paddings = _strides(stride, kernel), each(padding, n)
    rest = (ceil_mode, include_pad) if n == 1 else (ceil_mode, include_pad, divisor)
    x = redistribute(x, x._spec.gradient())
    spec = x._spec

    def make() -> _Plan:
        shape = pooled_shape(AVERAGES[n], spec.shape, (kernel, strides, paddings, *rest))
        return _make_plan(spec, _windows(kernel, strides, paddings, (1,) * n), shape, include_pad)

    plan = spec.cached(("avg_pool", kernel, strides, paddings, rest), make)
    local = _ready(fetch(to_local(x), spec, plan.halos), plan)
    if not local.numel():
        return from_local(connected_empty(plan.out.local_shape, local), plan.out)
    local = cut(AVERAGES[n](local, kernel, strides, plan.padding, *rest), plan.out.local_shape)
    if divisor is None:
        for dim, counts in plan.counts:
            factors = local.new_tensor([kernel[dim - spec.ndim] / count for count in counts])
            local = local * factors.view(-1, *[1] * (spec.ndim - 1 - dim))
    return from_local(local, plan.out)


def _ready(local: Tensor, plan: _Plan) -> Tensor:
    for dim, rows in plan.least:
        local = grown(local, dim, rows)
    return local


# ---------------------------------------------------------------------- maximum


@shard_function(F.max_pool1d, torch.max_pool1d)
def max_pool1d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    """Communication: see `_maximum`."""
    return _maximum(1, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


@shard_function(F.max_pool2d, torch.max_pool2d)
def max_pool2d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    """Communication: see `_maximum`."""
    return _maximum(2, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


@shard_function(F.max_pool3d, torch.max_pool3d)
def max_pool3d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    """Communication: see `_maximum`."""
    return _maximum(3, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


@shard_function(F.max_pool1d_with_indices, torch.max_pool1d_with_indices)
def max_pool1d_with_indices(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=True):
    """Communication: see `_maximum`."""
    return _maximum(1, input, kernel_size, stride, padding, dilation, ceil_mode, True)


@shard_function(F.max_pool2d_with_indices, torch._C._nn.max_pool2d_with_indices)
def max_pool2d_with_indices(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=True):
    """Communication: see `_maximum`."""
    return _maximum(2, input, kernel_size, stride, padding, dilation, ceil_mode, True)


@shard_function(F.max_pool3d_with_indices, torch._C._nn.max_pool3d_with_indices)
def max_pool3d_with_indices(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=True):
    """Communication: see `_maximum`."""
    return _maximum(3, input, kernel_size, stride, padding, dilation, ceil_mode, True)


def _maximum(n: int, x: ShardTensor, kernel_size, stride, padding, dilation, ceil_mode: bool, return_indices: bool):
    """Maximum pooling over the last `n` dims; with `return_indices` also where the maxima lie in the whole of these dims.

    Communication: for each sharded one of them, one exchange of the rows that a rank reads and does not own, backward the same.
    """
    kernel = each(kernel_size, n)
    strides, paddings, dilations = _strides(stride, kernel), each(padding, n), each(dilation, n)
    x = redistribute(x, x._spec.gradient())
    spec = x._spec

    def make() -> _Plan:
        shape = pooled_shape(MAXIMA[n], spec.shape, (kernel, strides, paddings, dilations, ceil_mode))
        windows = _windows(kernel, strides, paddings, dilations)
        for window, size, outputs in zip(windows, spec.shape[-n:], shape[-n:], strict=True):
            if window.dilation > 1 and window.pad_before and has_empty_window(window, size, outputs):
                raise MissingShardPatch(
                    f"max pooling of {size} rows by {window}",
                    "one of its windows contains no row, and where its maximum lies is undefined",
                    "pad less, dilate less, or pool a longer input",
                )
        return _make_plan(spec, windows, shape, None)

    plan = spec.cached(("max_pool", kernel, strides, paddings, dilations, ceil_mode), make)
    local = _ready(fetch(to_local(x), spec, plan.halos), plan)
    if not local.numel():
        empty = from_local(connected_empty(plan.out.local_shape, local), plan.out)
        return (empty, _indices(local.new_empty(plan.out.local_shape, dtype=torch.int64), plan)) if return_indices else empty
    args = (kernel, strides, plan.padding, dilations, ceil_mode)
    if plan.halos:
        values, places = _Maxima.apply(local, n, args)
    elif return_indices:
        values, places = WITH_INDICES[n](local, *args)
    else:
        return from_local(MAXIMA[n](local, *args), plan.out)
    if not return_indices:
        return from_local(cut(values, plan.out.local_shape), plan.out)
    if plan.halos:
        places = global_places(places, local.shape[-n:], plan.starts, spec.shape[-n:], dilations)
    return from_local(cut(values, plan.out.local_shape), plan.out), _indices(cut(places, plan.out.local_shape), plan)


class _Maxima(torch.autograd.Function):
    """Maximum pooling that keeps the places of the maxima, and not the fetched rows, for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int, args: tuple) -> tuple[Tensor, Tensor]:
        values, places = WITH_INDICES[n](x, *args)
        ctx.n, ctx.shape = n, x.shape
        ctx.save_for_backward(places)
        ctx.mark_non_differentiable(places)
        return values, places

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
        (places,) = ctx.saved_tensors
        whole = grad.new_zeros((*ctx.shape[: -ctx.n], prod(ctx.shape[-ctx.n :])))
        return whole.scatter_add(-1, places.flatten(-ctx.n), grad.flatten(-ctx.n)).view(ctx.shape), None, None


def _indices(local: Tensor, plan: _Plan) -> ShardTensor:
    return ShardTensor(local, plan.out.with_dtype(torch.int64))


def global_places(places: Tensor, local: tuple[int, ...], starts: tuple[int, ...], whole: tuple[int, ...], dilations: tuple) -> Tensor:
    """Flat places in dims of sizes `local`, whose first rows are `starts`, as flat places in dims of sizes `whole`.

    A row before or after the whole stands for the first or last row of its window that exists.
    """
    result, step = torch.zeros_like(places), 1
    for size, start, total, dilation in reversed(list(zip(local, starts, whole, dilations, strict=True))):
        row = places % size + start
        places = places // size
        if start < 0:
            row = torch.where(row < 0, row % dilation, row)
        if start + size > total:
            row = torch.where(row >= total, total - 1 - (total - 1 - row) % dilation, row)
        result += row * step
        step *= total
    return result

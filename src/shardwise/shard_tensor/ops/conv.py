"""Convolution with any kernel, stride, padding, dilation and groups, on any shards.

Spatial shards: each rank makes the output rows whose windows lie around its own input rows, and fetches the rows that they
read from its neighbours, however many those are. Batch shards: local. Channel shards: see `channels.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.shard_tensor.channels import Channels, split_channels
from shardwise.shard_tensor.fallback import replicated
from shardwise.shard_tensor.halo import Halo, cut, fetch, grown, make_halo, with_sizes
from shardwise.shard_tensor.lean import LeanConvolution, rows_within
from shardwise.shard_tensor.promote import plain_operand
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.spec.spans import Window
from shardwise.spec.windows import anchor, window_reads

CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


def each(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    """One value for each of `n` dims."""
    if isinstance(value, int):
        return (value,) * n
    return tuple(value) * n if len(value) == 1 else tuple(value)


@lru_cache(maxsize=4096)
def output_shape(func: Callable, shape: tuple[int, ...], weight: tuple[int, ...], bias: int | None, args: tuple) -> tuple[int, ...]:
    """The shape that torch gives for these arguments, without data, and torch's errors for bad ones."""
    n = len(weight) - 2
    transposed = func is TRANSPOSED[n]
    channels = weight[0] if transposed else weight[1] * args[-1]
    if len(shape) > n and shape[-n - 1] != channels:
        raise RuntimeError(
            f"Given {'transposed=1' if transposed else f'groups={args[-1]}'}, weight of size {list(weight)}, expected input{list(shape)} "
            f"to have {channels} channels, but got {shape[-n - 1]} channels instead"
        )
    if min(args[0]) < 1:
        raise RuntimeError("non-positive stride is not supported")
    if transposed and any(out >= max(step, gap) for out, step, gap in zip(args[2], args[0], args[4], strict=True)):
        raise RuntimeError(
            f"output padding must be smaller than either stride or dilation, but got output_padding {args[2]}, stride {args[0]} "
            f"and dilation {args[4]}"
        )
    x, w = (torch.empty(s, device="meta") for s in (shape, weight))
    b = None if bias is None else torch.empty(bias, device="meta")
    return tuple(func(x, w, b, *args).shape)


def sharded_operands(x: Tensor, *weights: Tensor | None) -> ShardTensor:
    """`x` with its pending sums resolved; a plain `x` beside sharded weights counts as replicated."""
    if isinstance(x, ShardTensor):
        return redistribute(x, x._spec.gradient())
    mesh = next(w._spec.mesh for w in weights if isinstance(w, ShardTensor))
    return from_local(x, replicated(x.detach(), mesh)._spec)


def under_autocast(local: Tensor, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands in the precision that autocast, if it is on, gives a convolution: halos travel and are kept in it."""
    device = local.device.type
    if not torch.is_autocast_enabled(device) or local.dtype is torch.float64 or not local.is_floating_point():
        return (local, *weights)
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None else t.to(dtype) for t in (local, *weights))


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the ranks do: `source` is the layout the input must have, `args` are those of the local call; `lean`, on all ranks or none,
    stands for all of it."""

    source: ShardTensorSpec
    out: ShardTensorSpec
    halos: tuple[Halo, ...]
    channels: Channels | None
    borders: tuple[int, ...]
    least: tuple[int, ...]
    args: tuple
    lean: LeanConvolution | None


@shard_function(torch.conv1d)
def conv1d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Communication: see `convolution`."""
    return convolution(1, input, weight, bias, stride, padding, dilation, groups)


@shard_function(torch.conv2d)
def conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Communication: see `convolution`."""
    return convolution(2, input, weight, bias, stride, padding, dilation, groups)


@shard_function(torch.conv3d)
def conv3d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Communication: see `convolution`."""
    return convolution(3, input, weight, bias, stride, padding, dilation, groups)


def convolution(n: int, x: Tensor, weight: Tensor, bias: Tensor | None, stride, padding, dilation, groups: int):
    """A convolution over the last `n` dims.

    Communication: for each sharded spatial dim one exchange of the rows that a rank reads and does not own, backward the same;
    none for batch shards. Input channels sharded: one group gives a pending sum; several are moved to group borders first.
    A sharded weight is gathered; gradients of weight and bias are summed over the ranks that hold different parts of the input.
    """
    x = sharded_operands(x, weight, bias)
    padding = padding if isinstance(padding, str) else each(padding, n)
    key = ("conv", tuple(weight.shape), bias is None, each(stride, n), padding, each(dilation, n), groups)
    plan = x._spec.cached(key, lambda: _plan(x._spec, n, tuple(weight.shape), bias is not None, *key[3:]))
    local = to_local(redistribute(x, plan.source))
    weight, bias = (plain_operand(w, [plan.source]) for w in (weight, bias))
    local, weight, bias = under_autocast(local, weight, bias)
    if plan.lean is not None and not local.is_complex() and not torch.compiler.is_compiling():
        return from_local(plan.lean(local, weight, bias), plan.out)
    local = fetch(local, plan.source, plan.halos)
    if plan.channels is not None:
        local, weight, bias = plan.channels.local(local, weight, bias, plan.source.ndim - n - 1)
    if plan.borders:
        local = pad(local, plan.borders)
    for dim, rows in enumerate(plan.least):
        local = grown(local, dim, rows)
    local = CONVOLUTIONS[n](local, weight, bias, *plan.args)
    return from_local(cut(local, plan.out.local_shape), plan.out)


def _plan(
    spec: ShardTensorSpec, n: int, weight: tuple[int, ...], bias: bool, stride: tuple, padding: tuple | str, dilation: tuple, groups: int
) -> _Plan:
    shape = output_shape(CONVOLUTIONS[n], spec.shape, weight, weight[0] if bias else None, (stride, padding, dilation, groups))
    first = spec.ndim - n
    windows = _windows(weight[2:], stride, padding, dilation)
    halos = []
    borders: list[int] = [0] * (2 * n)
    around = [0] * n
    for i, window in enumerate(windows):
        dim = first + i
        if spec.sizes[dim] is not None:
            halos.append(_halo(spec, dim, window, shape[dim]))
        elif window.pad_before == window.pad_after:
            around[i] = window.pad_before
        else:
            borders[2 * (n - 1 - i) : 2 * (n - i)] = window.pad_before, window.pad_after
    channels = None
    if spec.sizes[first - 1] is not None:
        channels = split_channels(spec, first - 1, groups, weight[0], transposed=False)
        spec, groups = channels.source, channels.groups
    out = with_sizes(spec, shape, halos)
    if channels is not None:
        out = channels.layout(out, first - 1)
    least = [0] * spec.ndim
    for halo in halos:
        if halo.made[0] == halo.made[1]:
            least[halo.dim] = windows[halo.dim - first].reach
    args = (stride, tuple(around), dilation, groups)
    lean = None
    simple = spec.ndim == n + 2 and channels is None and not any(borders) and all(all(halo.make_sizes) for halo in halos)
    if simple and any(halo.reads != halo.owned for halo in halos):
        rows = tuple(rows_within(halo) for halo in halos)
        lean = LeanConvolution(func=CONVOLUTIONS[n], args=args, spec=spec, halos=tuple(halos), rows=rows)
    return _Plan(
        source=spec,
        out=out,
        halos=tuple(halos),
        channels=channels,
        borders=tuple(borders) if any(borders) else (),
        least=tuple(least) if any(least) else (),
        args=args,
        lean=lean,
    )


def _windows(kernel: tuple, stride: tuple, padding: tuple | str, dilation: tuple) -> list[Window]:
    windows = []
    for i, size in enumerate(kernel):
        if padding == "same":
            total = dilation[i] * (size - 1)
            before, after = total // 2, total - total // 2
        else:
            before = after = 0 if padding == "valid" else padding[i]
        windows.append(Window(size=size, stride=stride[i], dilation=dilation[i], pad_before=before, pad_after=after))
    return windows


def _halo(spec: ShardTensorSpec, dim: int, window: Window, outputs: int) -> Halo:
    at, size = anchor(window, spec.sizes[dim], outputs), spec.shape[dim]
    return make_halo(spec, dim, outputs, lambda o: o * window.stride + at, lambda owned, makes: window_reads(window, owned, makes, size))


@shard_function(torch.convolution)
def convolution_any(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """Communication: that of `convolution`, or of the transposed one."""
    n = weight.ndim - 2
    if transposed:
        return TRANSPOSED[n](input, weight, bias, stride, padding, output_padding, groups, dilation)
    return CONVOLUTIONS[n](input, weight, bias, stride, padding, dilation, groups)

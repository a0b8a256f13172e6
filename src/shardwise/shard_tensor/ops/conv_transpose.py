"""Transposed convolution with any kernel, stride, padding, output padding, dilation and groups, on any shards.

Each rank makes the output rows around the places of its own input rows, and fetches the input rows that reach them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.shard_tensor.channels import Channels, split_channels
from shardwise.shard_tensor.halo import Halo, cut, fetch, grown, make_halo, rows_at, with_sizes
from shardwise.shard_tensor.ops.conv import TRANSPOSED, each, output_shape, sharded_operands, under_autocast
from shardwise.shard_tensor.promote import plain_operand
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import from_local, redistribute, to_local
from shardwise.spec.spans import Span
from shardwise.spec.windows import transposed_span


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the ranks do. `pieces`: (dim, first row, rows) of the local result that are this rank's output; rows beyond it are zero."""

    source: ShardTensorSpec
    out: ShardTensorSpec
    halos: tuple[Halo, ...]
    channels: Channels | None
    pieces: tuple[tuple[int, int, int], ...]
    beyond: bool
    args: tuple


@shard_function(torch.conv_transpose1d)
def conv_transpose1d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """Communication: see `transposed_convolution`."""
    return transposed_convolution(1, input, weight, bias, stride, padding, output_padding, groups, dilation)


@shard_function(torch.conv_transpose2d)
def conv_transpose2d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """Communication: see `transposed_convolution`."""
    return transposed_convolution(2, input, weight, bias, stride, padding, output_padding, groups, dilation)


@shard_function(torch.conv_transpose3d)
def conv_transpose3d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """Communication: see `transposed_convolution`."""
    return transposed_convolution(3, input, weight, bias, stride, padding, output_padding, groups, dilation)


def transposed_convolution(n: int, x: Tensor, weight: Tensor, bias: Tensor | None, stride, padding, output_padding, groups: int, dilation):
    """A transposed convolution over the last `n` dims.

    Communication: for each sharded spatial dim one exchange of the input rows that reach a rank's outputs and that it does not own
    (none where the kernel is as long as the stride), backward the same; channels and weights as in `conv.convolution`.
    """
    x = sharded_operands(x, weight, bias)
    args = (each(stride, n), each(padding, n), each(output_padding, n), groups, each(dilation, n))
    key = ("conv_transpose", tuple(weight.shape), bias is None, args)
    plan = x._spec.cached(key, lambda: _plan(x._spec, n, tuple(weight.shape), bias is not None, *args))
    local = to_local(redistribute(x, plan.source))
    weight, bias = (plain_operand(w, [plan.source]) for w in (weight, bias))
    local, weight, bias = under_autocast(local, weight, bias)
    local = fetch(local, plan.source, plan.halos)
    if plan.channels is not None:
        local, weight, bias = plan.channels.local(local, weight, bias, plan.source.ndim - n - 1)
    for dim, _, _ in plan.pieces:
        local = grown(local, dim, 1)
    local = TRANSPOSED[n](local, weight, None if plan.beyond else bias, *plan.args)
    for piece in plan.pieces:
        local = rows_at(local, *piece)
    if plan.beyond and bias is not None:
        local = local + bias.view(-1, *[1] * n)
    return from_local(cut(local, plan.out.local_shape), plan.out)


def _plan(
    spec: ShardTensorSpec,
    n: int,
    weight: tuple[int, ...],
    bias: bool,
    stride: tuple,
    padding: tuple,
    output_padding: tuple,
    groups: int,
    dilation: tuple,
) -> _Plan:
    outputs = weight[1] * groups
    args = (stride, padding, output_padding, groups, dilation)
    shape = output_shape(TRANSPOSED[n], spec.shape, weight, outputs if bias else None, args)
    first = spec.ndim - n
    halos, pieces = [], []
    beyond = False
    padding, output_padding = list(padding), list(output_padding)
    for i, size in enumerate(weight[2:]):
        dim = first + i
        if spec.sizes[dim] is None:
            continue
        halo = _halo(spec, dim, shape[dim], size=size, stride=stride[i], dilation=dilation[i], pad=padding[i])
        halos.append(halo)
        rows = halo.made[1] - halo.made[0]
        low, high = halo.reads[halo.block]
        start = halo.made[0] + padding[i] - low * stride[i] if high > low else 0
        last = (max(high - low, 1) - 1) * stride[i] + dilation[i] * (size - 1) + 1
        pieces.append((dim, start, rows))
        beyond |= rows > 0 and (start < 0 or start + rows > last)
        padding[i] = output_padding[i] = 0
    channels = None
    if spec.sizes[first - 1] is not None:
        channels = split_channels(spec, first - 1, groups, outputs, transposed=True)
        spec, groups = channels.source, channels.groups
    out = with_sizes(spec, shape, halos)
    if channels is not None:
        out = channels.layout(out, first - 1)
    return _Plan(
        source=spec,
        out=out,
        halos=tuple(halos),
        channels=channels,
        pieces=tuple(pieces),
        beyond=beyond,
        args=(stride, tuple(padding), tuple(output_padding), groups, dilation),
    )


def _halo(spec: ShardTensorSpec, dim: int, outputs: int, *, size: int, stride: int, dilation: int, pad: int) -> Halo:
    rows = spec.shape[dim]
    reach = dilation * (size - 1)

    def nearest(output: int) -> int:
        """The input row whose outputs lie nearest to this one."""
        return (2 * (output + pad) - reach + stride - 1) // (2 * stride)

    def reads(owned: Span, makes: Span) -> Span:
        start, stop = transposed_span(makes, size=size, stride=stride, dilation=dilation, pad=pad)
        start, stop = max(start, 0), min(stop, rows)
        return (start, stop) if stop > start else (0, 0)

    return make_halo(spec, dim, outputs, nearest, reads)

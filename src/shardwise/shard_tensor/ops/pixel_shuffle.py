"""Pixel shuffle, pixel unshuffle and channel shuffle."""

from __future__ import annotations

import torch

from shardwise.shard_tensor.empty import connected_empty
from shardwise.shard_tensor.halo import aligned
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, share_memory, to_local


@shard_function(torch.pixel_shuffle)
def pixel_shuffle(input, upscale_factor):
    """Communication: none, but for channel shards that do not lie on multiples of the squared factor: they are moved there."""
    return _rearranged(torch.pixel_shuffle, input, upscale_factor)


@shard_function(torch.pixel_unshuffle)
def pixel_unshuffle(input, downscale_factor):
    """Communication: none, but for spatial shards that do not lie on multiples of the factor: they are moved there."""
    return _rearranged(torch.pixel_unshuffle, input, downscale_factor)


def _rearranged(op, x: ShardTensor, factor: int) -> ShardTensor:
    spec = x._spec
    source, out = spec.cached((op, factor), lambda: _plan(op, spec, factor))
    local = to_local(redistribute(x, source))
    local = op(local, factor) if local.numel() else connected_empty(out.local_shape, local)
    return from_local(local, out)


def _plan(op, spec: ShardTensorSpec, factor: int) -> tuple[ShardTensorSpec, ShardTensorSpec]:
    shape = tuple(op(torch.empty(spec.shape, device="meta"), factor).shape)
    for dim in (spec.ndim - 3, spec.ndim - 2, spec.ndim - 1):
        if shape[dim] < spec.shape[dim]:
            spec = aligned(spec, dim, spec.shape[dim] // shape[dim])
    sizes = tuple(
        blocks and tuple(size * shape[dim] // spec.shape[dim] for size in blocks) if spec.shape[dim] else blocks
        for dim, blocks in enumerate(spec.sizes)
    )
    return spec, ShardTensorSpec(spec.mesh, spec.placements, shape, sizes, spec.dtype)


@shard_function(torch.channel_shuffle)
def channel_shuffle(input, groups):
    """Communication: none, but for sharded channels: the shuffle itself."""
    if groups < 1 or input.ndim < 3 or input.shape[1] % groups:
        raise RuntimeError(
            f"channel_shuffle: {input.ndim} dims of shape {tuple(input.shape)} in {groups} groups: it takes at least 3 dims, and channels "
            "(dim 1) that are a multiple of groups"
        )
    result = input.unflatten(1, (groups, input.shape[1] // groups)).transpose(1, 2).flatten(1, 2)
    return result.clone() if isinstance(result, ShardTensor) and share_memory(result._local_tensor, input._local_tensor) else result

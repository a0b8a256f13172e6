"""Max unpooling and fractional max pooling, whose windows depend on data: a plane is worked on whole, by one rank.

Spatial shards are moved to the channels, each rank works on its planes, and the result moves back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

from shardwise.collectives import functional as comm
from shardwise.shard_tensor.empty import connected_empty
from shardwise.shard_tensor.halo import dim_group
from shardwise.shard_tensor.ops.pool import pooled_shape
from shardwise.shard_tensor.redistribute import redistribute_local
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local

UNPOOL = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}
FRACTIONAL = {2: F.fractional_max_pool2d_with_indices, 3: F.fractional_max_pool3d_with_indices}


def planes(spec: ShardTensorSpec, n: int) -> ShardTensorSpec:
    """The layout in which every rank has whole planes of the last `n` dims: the axes that shard them shard the channels."""
    channel = spec.ndim - n - 1
    spec = spec.gradient()
    return spec.with_placements([Shard(channel) if isinstance(p, Shard) and p.dim > channel else p for p in spec.placements])


def back(result: ShardTensor, placements: tuple) -> ShardTensor:
    """`result` under the placements of the input, in the sizes of `torch.chunk` where a dim is sharded anew."""
    return redistribute(result, result._spec.with_placements(placements))


# ---------------------------------------------------------------------- unpooling


@shard_function(F.max_unpool1d)
def max_unpool1d(input, indices, kernel_size, stride=None, padding=0, output_size=None):
    """Communication: see `_unpool`."""
    return _unpool(1, input, indices, kernel_size, stride, padding, output_size)


@shard_function(F.max_unpool2d)
def max_unpool2d(input, indices, kernel_size, stride=None, padding=0, output_size=None):
    """Communication: see `_unpool`."""
    return _unpool(2, input, indices, kernel_size, stride, padding, output_size)


@shard_function(F.max_unpool3d)
def max_unpool3d(input, indices, kernel_size, stride=None, padding=0, output_size=None):
    """Communication: see `_unpool`."""
    return _unpool(3, input, indices, kernel_size, stride, padding, output_size)


def _unpool(n: int, x: Tensor, indices: Tensor, kernel_size, stride, padding, output_size) -> ShardTensor:
    """Communication: with spatial shards, values and indices move to channel shards and the result moves back, by all-to-all."""
    lead = x if isinstance(x, ShardTensor) else indices
    apart, wanted = planes(lead._spec, n), lead._spec.gradient().placements
    x = redistribute(x, apart.with_dtype(x.dtype))
    places = redistribute(indices, apart.with_dtype(indices.dtype))._local_tensor
    kernel, output_size = _hashable(kernel_size), _hashable(output_size)
    args = (kernel, _hashable(stride), _hashable(padding), output_size)
    shape = apart.cached(("max_unpool", args), lambda: _unpooled_shape(n, apart.shape, args))
    out = apart.cached(("max_unpool spec", shape), lambda: _resized(apart, shape, n, x.dtype))
    local = to_local(x)
    if local.numel():
        result = UNPOOL[n](local, places, kernel_size, stride, padding, shape[-n:])
    else:
        result = connected_empty(out.local_shape, local)
    return back(from_local(result, out), wanted)


def _hashable(value):
    return tuple(value) if isinstance(value, list | tuple) else value


def _unpooled_shape(n: int, shape: tuple[int, ...], args: tuple) -> tuple[int, ...]:
    kernel, stride, padding, output_size = args
    small = torch.zeros((1, 1, *shape[-n:]))
    result = UNPOOL[n](small, torch.zeros_like(small, dtype=torch.int64), kernel, stride, padding, output_size)
    return (*shape[:-n], *result.shape[2:])


def _resized(spec: ShardTensorSpec, shape: tuple[int, ...], n: int, dtype: torch.dtype) -> ShardTensorSpec:
    return spec.with_dims(shape, range(spec.ndim), dtype=dtype)


# ---------------------------------------------------------------------- fractional


@shard_function(F.fractional_max_pool2d)
def fractional_max_pool2d(input, kernel_size, output_size=None, output_ratio=None, return_indices=False, _random_samples=None):
    """Communication: see `_fractional`."""
    values, indices = _fractional(2, input, kernel_size, output_size, output_ratio, _random_samples)
    return (values, indices) if return_indices else values


@shard_function(F.fractional_max_pool3d)
def fractional_max_pool3d(input, kernel_size, output_size=None, output_ratio=None, return_indices=False, _random_samples=None):
    """Communication: see `_fractional`."""
    values, indices = _fractional(3, input, kernel_size, output_size, output_ratio, _random_samples)
    return (values, indices) if return_indices else values


@shard_function(F.fractional_max_pool2d_with_indices)
def fractional_max_pool2d_with_indices(input, kernel_size, output_size=None, output_ratio=None, return_indices=True, _random_samples=None):
    """Communication: see `_fractional`."""
    return _fractional(2, input, kernel_size, output_size, output_ratio, _random_samples)


@shard_function(F.fractional_max_pool3d_with_indices)
def fractional_max_pool3d_with_indices(input, kernel_size, output_size=None, output_ratio=None, return_indices=True, _random_samples=None):
    """Communication: see `_fractional`."""
    return _fractional(3, input, kernel_size, output_size, output_ratio, _random_samples)


def _fractional(n: int, x: ShardTensor, kernel_size, output_size, output_ratio, samples: Tensor | None):
    """Fractional max pooling. The random windows are those that the first rank of the mesh draws.

    Communication: with spatial shards, the input moves to channel shards and the results move back, by all-to-all; samples that
    were not given are broadcast.
    """
    spec = x._spec
    apart, wanted = planes(spec, n), spec.gradient().placements
    batch = spec.shape[0] if spec.ndim == n + 2 else 1
    if samples is None:
        samples = torch.rand(batch, spec.shape[-n - 1], n, dtype=x.dtype, device=x._local_tensor.device)
        samples = comm.broadcast(samples, 0, dim_group(spec, tuple(range(spec.mesh.ndim))))
    elif isinstance(samples, ShardTensor):
        samples = redistribute_local(samples._local_tensor, samples._spec, samples._spec.replicate())
    args = (_hashable(kernel_size), _hashable(output_size), _hashable(output_ratio))
    shape = apart.cached(("fractional", args), lambda: _fractional_shape(n, spec.shape, args))
    out = apart.cached(("fractional spec", shape), lambda: _resized(apart, shape, n, x.dtype))
    x = redistribute(x, apart)
    local = to_local(x)
    rows = apart.box()[: spec.ndim - n]
    samples = samples[tuple(slice(*span) for span in (rows if len(rows) == 2 else ((0, 1), *rows)))]
    if local.numel():
        values, places = FRACTIONAL[n](local, kernel_size, output_size, output_ratio, True, samples)
    else:
        values = connected_empty(out.local_shape, local)
        places = values.new_empty(out.local_shape, dtype=torch.int64)
    indices = ShardTensor(places, out.with_dtype(torch.int64))
    return back(from_local(values, out), wanted), back(indices, wanted)


def _fractional_shape(n: int, shape: tuple[int, ...], args: tuple) -> tuple[int, ...]:
    kernel, size, ratio = args
    samples = torch.full((1, 1, n), 0.5)
    return (*shape[:-n], *pooled_shape(FRACTIONAL[n], (1, 1, *shape[-n:]), (kernel, size, ratio, True, samples))[2:])

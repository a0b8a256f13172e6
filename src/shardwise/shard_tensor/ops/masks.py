"""Ops whose result size depends on data: masks, nonzero, unique, counts.

Each rank selects among its own rows; the ranks tell each other how many they found (one small gather) and the result stays with them,
split unevenly. That keeps the order of the whole tensor if the split dim is the first of the masked ones, so it is made so first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

from shardwise.collectives import functional as comm
from shardwise.shard_tensor.adopt import part_of, sharded, whole_value
from shardwise.shard_tensor.arguments import torch_names
from shardwise.shard_tensor.fallback import fallback_rule
from shardwise.shard_tensor.halo import dim_group
from shardwise.shard_tensor.reduction_plan import extreme_over_ranks, highest, lowest, spec_group
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.shard_tensor.transposed import laid_as

aten = torch.ops.aten


def ordered_spec(spec: ShardTensorSpec, first: int, count: int) -> ShardTensorSpec:
    """`spec` with every axis that splits one of the `count` dims from `first` on splitting the leading one: row-major order then goes from
    rank to rank."""
    return spec.cached(("ordered", first, count), lambda: _ordered_spec(spec, first, count))


def _ordered_spec(spec: ShardTensorSpec, first: int, count: int) -> ShardTensorSpec:
    masked = range(first, first + count)
    spec = spec.gradient()
    placements = [Shard(first) if isinstance(p, Shard) and p.dim in masked else p for p in spec.placements]
    return spec.with_placements(placements)


def _mask_of(mask: Tensor, spec: ShardTensorSpec, first: int) -> tuple[Tensor, ShardTensorSpec]:
    """The rows of `mask` that meet the shard of a tensor laid out as `spec`, whose dims from `first` on it covers; and its layout."""
    dims = range(first, first + mask.ndim)
    axes = {axis for dim in dims for axis in spec.mesh_dims_of(dim)}
    whole = spec.replicate([axis for axis in range(spec.mesh.ndim) if axis not in axes])
    placements = tuple(Shard(p.dim - first) if isinstance(p, Shard) else p for p in whole.placements)
    own = ShardTensorSpec(spec.mesh, placements, tuple(mask.shape), tuple(spec.sizes[d] for d in dims), torch.bool)
    with torch.no_grad():
        return redistribute(mask.bool(), own)._local_tensor, own


def agreed_sizes(count: int, spec: ShardTensorSpec, dim: int, device) -> tuple[int, ...] | None:
    """How many rows each block of `dim` found. Communication: one gather of a number; None, and nothing sent, if `dim` is not sharded."""
    axes = spec.mesh_dims_of(dim)
    if not axes:
        return None
    group = dim_group(spec, axes)
    counts = comm.all_gather(torch.tensor([count], device=device), 0, (1,) * group.size(), group)
    return tuple(counts.tolist())


def _found(spec: ShardTensorSpec, first: int, gone: int, local: Tensor) -> ShardTensorSpec:
    """The layout of a result in which dim `first` stands for `gone` dims of `spec`."""
    sizes = agreed_sizes(local.shape[first], spec, first, local.device)
    total = local.shape[first] if sizes is None else sum(sizes)
    shape = (*spec.shape[:first], total, *spec.shape[first + gone :])
    out = spec.with_dims(shape, (*range(first + 1), *range(first + gone, spec.ndim)), dtype=local.dtype)
    return ShardTensorSpec(out.mesh, out.placements, shape, (*out.sizes[:first], sizes, *out.sizes[first + 1 :]), local.dtype)


def select_masked(x: ShardTensor, mask: Tensor, first: int) -> ShardTensor:
    """`x[..., mask]` with the dims of `mask` beginning at `first` of `x`; differentiable.

    Communication: one gather of a count; an all-to-all before if a later dim than the first masked one is split.
    """
    if tuple(mask.shape) != tuple(x.shape[first : first + mask.ndim]):
        raise IndexError(
            f"the shape of the mask {tuple(mask.shape)} does not match that of the indexed tensor {tuple(x.shape)} at dim {first}"
        )
    spec = ordered_spec(x._spec, first, mask.ndim)
    inside, _ = _mask_of(mask, spec, first)
    local = to_local(redistribute(x, spec))[(slice(None),) * first + (inside,)]
    return from_local(local, _found(spec, first, mask.ndim, local))


@shard_function(torch.masked_select, Tensor.masked_select)
@torch_names
def masked_select(input: Tensor, mask: Tensor):
    """Communication: as `x[mask]`."""
    one = [t for t in (input, mask) if isinstance(t, ShardTensor)]
    shape = torch.broadcast_shapes(tuple(input.shape), tuple(mask.shape))
    if not shape:
        return NotImplemented
    x = sharded(input, one)
    if x._spec.is_replicated and isinstance(mask, ShardTensor) and tuple(mask.shape) == shape == tuple(x.shape):
        x = laid_as(x, mask._spec)
    return select_masked(x.expand(shape), mask.expand(shape), 0)


@shard_function(torch.masked_scatter, Tensor.masked_scatter)
def masked_scatter(input: Tensor, mask: Tensor, source: Tensor):
    """Communication: as `x[mask]`; the source is gathered; the result returns to the layout of the input."""
    if not isinstance(input, ShardTensor) or not input.ndim:
        return NotImplemented
    shape = torch.broadcast_shapes(tuple(input.shape), tuple(mask.shape))
    x = redistribute(input, input._spec.gradient()).expand(shape)
    spec = ordered_spec(x._spec, 0, x.ndim)
    inside, _ = _mask_of(mask.expand(shape), spec, 0)
    count = int(inside.sum())
    sizes = agreed_sizes(count, spec, 0, inside.device) or (count,)
    if sum(sizes) > source.numel():
        raise RuntimeError(
            f"masked_scatter: the mask has {sum(sizes)} true elements, the source {source.numel()} elements: give one for each"
        )
    axes = spec.mesh_dims_of(0)
    block = spec.block_index(0, spec.coordinate) if axes else 0
    values = sharded(source.reshape(-1), [x])
    values = part_of(values, values._spec.replicate(), axes).narrow(0, sum(sizes[:block]), count)
    local = to_local(redistribute(x, spec)).masked_scatter(inside, values)
    return laid_as(from_local(local, spec), x._spec)


@shard_function(Tensor.masked_scatter_)
def masked_scatter_(self: Tensor, mask: Tensor, source: Tensor):
    """Communication: as `masked_scatter`."""
    if not isinstance(self, ShardTensor) or not self.ndim:
        return NotImplemented
    return self.copy_(masked_scatter(self, mask, source))


# ---------------------------------------------------------------------- below autograd: results without gradient


@shard_rule(aten.nonzero.default)
def nonzero(op, args, kwargs):
    """Global indices, in order. Communication: one gather of a count; an all-to-all before if a later dim than the first is split."""
    (x,) = args
    if not x._spec.ndim:
        return fallback_rule(op, args, kwargs)
    with torch.no_grad():
        spec = ordered_spec(x._spec, 0, x._spec.ndim)
        local = op(redistribute(x, spec)._local_tensor)
        local[:, 0] += spec.box()[0][0]
        sizes = agreed_sizes(local.shape[0], spec, 0, local.device)
        total = local.shape[0] if sizes is None else sum(sizes)
    return ShardTensor(local, ShardTensorSpec(spec.mesh, spec.placements, (total, spec.ndim), (sizes, None), local.dtype))


@shard_rule(aten._unique2.default)
def unique(op, args, kwargs):
    """Replicated values. Communication: the ranks' own distinct values are gathered; the counts are a pending sum, which one all-reduce
    resolves; the inverse stays with its elements."""
    x, _, inverse, counts = (*args, *(True, False, False)[len(args) - 1 :])
    inverse, counts = kwargs.get("return_inverse", inverse), kwargs.get("return_counts", counts)
    spec = x._spec.gradient()
    axes = spec.sharded_mesh_dims
    if not axes or spec.dtype.is_complex:
        return fallback_rule(op, args, kwargs)
    local = redistribute(x, spec)._local_tensor
    own, places, own_counts = op(local, True, True, True)
    group = spec_group(spec, axes)
    sizes = tuple(comm.all_gather(torch.tensor([own.shape[0]], device=own.device), 0, (1,) * group.size(), group).tolist())
    values, merged = op(comm.all_gather(own, 0, sizes, group), True, True, False)[:2]
    place = merged.split(sizes)[group.rank()]
    found = [_replicated(values, spec)]
    found.append(ShardTensor(place[places], spec.contiguous()) if inverse else _replicated(places.new_empty(0), spec))
    if not counts:
        return (*found, _replicated(places.new_empty(0), spec))
    totals = torch.zeros_like(values, dtype=torch.int64).index_add_(0, place, own_counts)
    return (*found, _replicated(comm.all_reduce(totals, group), spec))


def _replicated(local: Tensor, spec: ShardTensorSpec) -> ShardTensor:
    whole = spec.replicate()
    return ShardTensor(local, ShardTensorSpec(spec.mesh, whole.placements, tuple(local.shape), (None,) * local.ndim, local.dtype))


@shard_rule(aten.bincount.default)
def bincount(op, args, kwargs):
    """Communication: one all-reduce of the largest value; the counts are a pending sum."""
    x, weights, minlength = (*args, *(None, 0)[len(args) - 1 :])
    weights, minlength = kwargs.get("weights", weights), kwargs.get("minlength", minlength)
    if not isinstance(x, ShardTensor):
        return fallback_rule(op, args, kwargs)
    spec = x._spec.gradient()
    axes = spec.sharded_mesh_dims
    local = redistribute(x, spec)._local_tensor
    if weights is not None:
        weights = redistribute(weights, spec)._local_tensor
    if axes:
        group = spec_group(spec, axes)
        ends = torch.stack((local.max(), -local.min())) if local.numel() else local.new_full((2,), -1)
        top, low = comm.all_reduce(ends.to(torch.int64), group, op="max").tolist()
        if low > 0:
            raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
        minlength = max(minlength, top + 1)
    if minlength and not local.numel():
        result = local.new_zeros(minlength, dtype=torch.int64 if weights is None else _weight_dtype(weights))
    else:
        result = op(local, weights, minlength)
    placements = tuple(Partial() if axis in axes else p for axis, p in enumerate(spec.placements))
    return ShardTensor(result, ShardTensorSpec(spec.mesh, placements, tuple(result.shape), (None,), result.dtype))


def _weight_dtype(weights: Tensor) -> torch.dtype:
    return torch.float32 if weights.dtype is torch.float32 else torch.float64


@shard_rule(aten.histc.default)
def histc(op, args, kwargs):
    """Communication: the range, if it is not given, by two all-reduces of a number; the counts are a pending sum."""
    x, bins, low, high = (*args, *(100, 0, 0)[len(args) - 1 :])
    spec = x._spec.gradient()
    axes = spec.sharded_mesh_dims
    local = redistribute(x, spec)._local_tensor
    if axes and low == high:
        group = spec_group(spec, axes)
        flat = local.reshape(-1)
        smallest = torch.cat([flat, flat.new_full((1,), highest(flat.dtype))]).min()
        largest = torch.cat([flat, flat.new_full((1,), lowest(flat.dtype))]).max()
        low, high = extreme_over_ranks(smallest, group, largest=False).item(), extreme_over_ranks(largest, group, largest=True).item()
        if low == high:
            low, high = low - 1, high + 1
    result = op(local, bins, low, high) if local.numel() or not axes else local.new_zeros(bins)
    placements = tuple(Partial() if axis in axes else p for axis, p in enumerate(spec.placements))
    return ShardTensor(result, ShardTensorSpec(spec.mesh, placements, tuple(result.shape), (None,), result.dtype))


@shard_rule(aten.searchsorted.Tensor, aten.bucketize.Tensor)
def search(op, args, kwargs):
    """Each rank looks its own values up. Communication: a sharded sequence is gathered where it is searched."""
    first, second = args[:2]
    sequence, values = (first, second) if op is aten.searchsorted.Tensor else (second, first)
    if not isinstance(values, ShardTensor) or kwargs.get("sorter") is not None:
        return fallback_rule(op, args, kwargs)
    if sequence.ndim == 1:
        spec, local_sequence = values._spec.gradient(), whole_value(sequence)
    else:
        last = values._spec.ndim - 1
        spec = values._spec.gradient()
        spec = spec.replicate(spec.mesh_dims_of(last))
        own = ShardTensorSpec(spec.mesh, spec.placements, tuple(sequence.shape), spec.sizes, sequence.dtype)
        local_sequence = redistribute(sequence, own)._local_tensor.contiguous()
    local = redistribute(values, spec)._local_tensor
    pair = (local_sequence, local) if op is aten.searchsorted.Tensor else (local, local_sequence)
    result = op(*pair, *args[2:], **kwargs)
    return ShardTensor(result, spec.contiguous())

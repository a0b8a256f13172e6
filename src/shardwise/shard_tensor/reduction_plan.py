"""Reducing dims of a sharded tensor: the layouts of the result, and combining the ranks' values.

Everything here is integers and small tensors; the rules of `ops/reductions.py`, `ops/extremes.py` and others use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial

from shardwise.collectives import functional as comm
from shardwise.mesh.groups import axis_group, flat_group
from shardwise.shard_tensor.redistribute import redistribute_local
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class ReductionPlan:
    """What reducing some dims of a spec means.

    dims: the reduced dims, ascending. axes: the mesh dims that shard any of them.
    count, local_count: elements that make one element of the result, on all ranks and on this one.
    out: the layout of the result once the ranks' values are combined. pending: the same with a sum over `axes` pending.
    """

    dims: tuple[int, ...]
    axes: tuple[int, ...]
    count: int
    local_count: int
    out: ShardTensorSpec
    pending: ShardTensorSpec

    @property
    def group(self):
        return spec_group(self.out, self.axes)


def spec_group(spec: ShardTensorSpec, axes: Sequence[int]):
    """The process group of the ranks that differ from this one along the mesh dims `axes` only."""
    return axis_group(spec.mesh, axes[0]) if len(axes) == 1 else flat_group(spec.mesh, tuple(axes))


def normal_dims(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The dims that a `dim` argument names, ascending; all for `None` and for an empty list."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(ndim))
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    top = max(ndim, 1)
    for d in given:
        if not -top <= d < top:
            raise IndexError(f"Dimension out of range (expected to be in range of [{-top}, {top - 1}], but got {d})")
    dims = sorted(d % top for d in given)
    if len(set(dims)) != len(dims):
        raise RuntimeError(f"dim {list(given)} names a dimension of a tensor of {ndim} dims twice")
    return tuple(dims) if ndim else ()


def reduction_plan(spec: ShardTensorSpec, dim: int | Sequence[int] | None, keepdim: bool = False) -> ReductionPlan:
    """The plan for reducing `dim` (as torch reads it) of a tensor laid out as `spec`."""
    key = ("reduction", dim if dim is None or isinstance(dim, int) else tuple(dim), keepdim)
    return spec.cached(key, lambda: _plan(spec, normal_dims(dim, len(spec.shape)), keepdim))


def _plan(spec: ShardTensorSpec, dims: tuple[int, ...], keepdim: bool) -> ReductionPlan:
    axes = tuple(sorted(axis for dim in dims for axis in spec.mesh_dims_of(dim)))
    whole = spec.replicate(axes) if axes else spec
    if keepdim:
        shape = [1 if dim in dims else size for dim, size in enumerate(spec.shape)]
        out = whole.with_dims(shape, [None if dim in dims else dim for dim in range(spec.ndim)])
    else:
        kept = [dim for dim in range(spec.ndim) if dim not in dims]
        out = whole.with_dims([spec.shape[dim] for dim in kept], kept)
    pending = out
    if axes:
        placements = tuple(Partial() if i in axes else p for i, p in enumerate(out.placements))
        pending = ShardTensorSpec(out.mesh, placements, out.shape, out.sizes, out.dtype)
    return ReductionPlan(
        dims=dims,
        axes=axes,
        count=prod(spec.shape[dim] for dim in dims),
        local_count=prod(spec.local_shape[dim] for dim in dims),
        out=out,
        pending=pending,
    )


def completed(x: ShardTensor) -> tuple[Tensor, ShardTensorSpec]:
    """The shard and spec of `x` with its pending sums resolved; no gradient."""
    spec = x._spec.gradient()
    return redistribute_local(x._local_tensor, x._spec, spec), spec


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half types, else the dtype itself."""
    return torch.float32 if dtype in HALF else dtype


def padded(local: Tensor, plan: ReductionPlan, fill: float | int | bool) -> Tensor:
    """`local`, or one row of `fill` where this rank has no row to reduce: the op then runs and checks its arguments alike on all ranks."""
    if plan.local_count or not plan.count:
        return local
    shape = [1 if dim in plan.dims and not size else size for dim, size in enumerate(local.shape)]
    return local.new_full(shape, fill)


def lowest(dtype: torch.dtype) -> float | int | bool:
    """The identity of the maximum."""
    if dtype.is_floating_point:
        return float("-inf")
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float | int | bool:
    """The identity of the minimum."""
    if dtype.is_floating_point:
        return float("inf")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def moments(local: Tensor, plan: ReductionPlan, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations over all ranks, in the accumulation dtype; no gradient.

    Communication: two all-reduces of the result's size.
    """
    local = padded(local, plan, 0).to(accumulation_dtype(local.dtype))
    if local.numel():
        var, mean = torch.var_mean(local, plan.dims, correction=0, keepdim=keepdim)
    else:  # an empty result: torch would warn
        mean = local.sum(plan.dims, keepdim)
        var = mean.real if mean.is_complex() else mean
    if not plan.axes:
        return mean, var * plan.count
    n = plan.local_count
    total = comm.all_reduce(mean * n, plan.group) / plan.count
    apart = (mean - total).abs() ** 2
    return total, comm.all_reduce((var + apart) * n, plan.group)


def extreme_over_ranks(values: Tensor, group, *, largest: bool) -> Tensor:
    """The elementwise maximum (or minimum) over ranks; NaN where any rank has NaN. No gradient. Communication: one all-reduce."""
    dtype = values.dtype
    if not dtype.is_floating_point:
        wire = values.to(torch.int32) if dtype in (torch.int16, torch.uint16) else values
        return comm.all_reduce(wire, group, op="max" if largest else "min").to(dtype)
    values = values.to(torch.float64 if dtype is torch.float64 else torch.float32)
    key = _sortable(values if largest else -values)
    best = _unsortable(comm.all_reduce(key, group, op="max"), values.dtype)
    return (best if largest else -best).to(dtype)


def _sortable(values: Tensor) -> Tensor:
    """Integers in the order of the floats, NaN above all: backends do not agree on the maximum of NaN and a number."""
    values = torch.where(values.isnan(), torch.nan, values)
    return _flip(values.contiguous().view(torch.int64 if values.dtype is torch.float64 else torch.int32))


def _unsortable(key: Tensor, dtype: torch.dtype) -> Tensor:
    return _flip(key).view(dtype)


def _flip(bits: Tensor) -> Tensor:
    width = bits.element_size() * 8 - 1
    return bits ^ ((bits >> width) & (2**width - 1))

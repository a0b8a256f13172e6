"""Adaptive average and maximum pooling to any size, on any shards.

Output row `o` of `outputs` covers the input rows from `floor(o * n / outputs)` to `ceil((o + 1) * n / outputs)`. Where windows are
many, each rank makes the outputs around its own rows and fetches what they read. Where they are fewer than the ranks (pooling to one
row), or where that moves fewer rows, each rank reduces its own rows of every window and the ranks combine the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardwise.shard_tensor.empty import connected_empty
from shardwise.shard_tensor.halo import Halo, fetch, make_halo, with_sizes
from shardwise.shard_tensor.ops.conv import each
from shardwise.shard_tensor.ops.pool import pooled_shape
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.spec.spans import Span, intersect, spans_of

AVERAGES = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
WITH_INDICES = {1: F.adaptive_max_pool1d_with_indices, 2: F.adaptive_max_pool2d_with_indices, 3: F.adaptive_max_pool3d_with_indices}
MAXIMA = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}


def window_of(output: int, outputs: int, size: int) -> Span:
    """The input rows of one output row."""
    return output * size // outputs, -(-(output + 1) * size // outputs)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the ranks do. halos: sharded dims whose windows are fetched. combined: sharded dims whose windows every rank makes in part.
    windows: for each spatial dim the windows made here, in rows of the local tensor, an empty one where no row is here."""

    shape: tuple[int, ...]
    halos: tuple[Halo, ...]
    combined: tuple[int, ...]
    windows: tuple[tuple[Span, ...], ...]
    out: ShardTensorSpec


def _make_plan(spec: ShardTensorSpec, n: int, shape: tuple[int, ...]) -> _Plan:
    halos, combined, windows = [], [], []
    for dim in range(spec.ndim - n, spec.ndim):
        size, outputs = spec.shape[dim], shape[dim]
        makes, low, high = (0, outputs), 0, size
        if spec.sizes[dim] is not None:
            halo = _halo(spec, dim, outputs)
            fetched = sum(b - a - _rows(intersect((a, b), own)) for (a, b), own in zip(halo.reads, halo.owned, strict=True))
            if outputs >= len(halo.owned) and fetched <= 2 * (len(halo.owned) - 1) * outputs:
                halos.append(halo)
                makes, (low, high) = halo.made, halo.reads[halo.block]
            else:
                combined.append(dim)
                low, high = halo.owned[halo.block]
        spans = (intersect(window_of(o, outputs, size), (low, high)) for o in range(*makes))
        windows.append(tuple((start - low, stop - low) if stop > start else (0, 0) for start, stop in spans))
    out = with_sizes(spec, shape, halos)
    if combined:
        sizes = tuple(None if dim in combined else blocks for dim, blocks in enumerate(out.sizes))
        placements = tuple(Partial() if isinstance(p, Shard) and p.dim in combined else p for p in out.placements)
        out = ShardTensorSpec(out.mesh, placements, out.shape, sizes, out.dtype)
    return _Plan(shape=shape, halos=tuple(halos), combined=tuple(combined), windows=tuple(windows), out=out)


def _rows(span: Span) -> int:
    return span[1] - span[0]


def _halo(spec: ShardTensorSpec, dim: int, outputs: int) -> Halo:
    size = spec.shape[dim]

    def reads(owned: Span, makes: Span) -> Span:
        return window_of(makes[0], outputs, size)[0], window_of(makes[1] - 1, outputs, size)[1]

    return make_halo(spec, dim, outputs, lambda o: (2 * o + 1) * size // (2 * outputs), reads)


# ---------------------------------------------------------------------- average


@shard_function(torch.adaptive_avg_pool1d)
def adaptive_avg_pool1d(input, output_size):
    """Communication: see `_average`."""
    return _average(1, input, output_size)


@shard_function(F.adaptive_avg_pool2d, torch._C._nn.adaptive_avg_pool2d)
def adaptive_avg_pool2d(input, output_size):
    """Communication: see `_average`."""
    return _average(2, input, output_size)


@shard_function(F.adaptive_avg_pool3d, torch._C._nn.adaptive_avg_pool3d)
def adaptive_avg_pool3d(input, output_size):
    """Communication: see `_average`."""
    return _average(3, input, output_size)


def _average(n: int, x: ShardTensor, output_size) -> ShardTensor:
    """Adaptive average pooling over the last `n` dims.

    Communication: for each sharded one of them, one exchange of the rows that windows read across borders; or, with few windows,
    none now: the result is a pending sum.
    """
    x = redistribute(x, x._spec.gradient())
    spec, key = x._spec, each(output_size, n)
    plan = spec.cached(
        ("adaptive_avg_pool", key), lambda: _make_plan(spec, n, pooled_shape(AVERAGES[n], spec.shape, (_sizes(key, spec.shape),)))
    )
    local = fetch(to_local(x), spec, plan.halos)
    if not local.numel() and not plan.out.partial_mesh_dims:
        return from_local(connected_empty(plan.out.local_shape, local), plan.out)
    native: list[int] = []
    for dim, windows in zip(range(spec.ndim - n, spec.ndim), plan.windows, strict=True):
        if dim in plan.combined or (spec.sizes[dim] is not None and not _regular(windows)):
            weights = [1 / _rows(window_of(o, plan.shape[dim], spec.shape[dim])) for o in range(*_made(plan, dim))]
            local = _weighted(local, dim, windows, weights)
        native.append(len(windows))
    if any(local.shape[dim - n] != rows for dim, rows in enumerate(native)):
        local = AVERAGES[n](local, native) if local.numel() and all(native) else connected_empty((*local.shape[:-n], *native), local)
    return from_local(local, plan.out)


def _sizes(output_size: tuple, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[i - len(output_size)] if size is None else size for i, size in enumerate(output_size))


def _made(plan: _Plan, dim: int) -> Span:
    """The outputs of `dim` that this rank makes, or has a part in."""
    return next((halo.made for halo in plan.halos if halo.dim == dim), (0, plan.shape[dim]))


def _regular(windows: tuple[Span, ...]) -> bool:
    """Whether the windows lie one after the other and are equally long, as those that torch cuts of the local rows."""
    length = _rows(windows[0]) if windows else 0
    return all(window == (i * length, (i + 1) * length) for i, window in enumerate(windows))


def _weighted(local: Tensor, dim: int, windows: tuple[Span, ...], weights: list[float]) -> Tensor:
    """For each window the sum of its rows times its weight."""
    dtype = torch.float32 if local.dtype in (torch.float16, torch.bfloat16) else local.dtype
    matrix = torch.zeros(len(windows), local.shape[dim], dtype=dtype)
    for row, (start, stop) in enumerate(windows):
        matrix[row, start:stop] = weights[row]
    result = torch.matmul(local.to(dtype).movedim(dim, -1), matrix.to(local.device).t())
    return result.to(local.dtype).movedim(-1, dim)


# ---------------------------------------------------------------------- maximum


@shard_function(F.adaptive_max_pool1d)
def adaptive_max_pool1d(input, output_size, return_indices=False):
    """Communication: see `_maximum`."""
    return _maximum(1, input, output_size, return_indices)


@shard_function(F.adaptive_max_pool2d)
def adaptive_max_pool2d(input, output_size, return_indices=False):
    """Communication: see `_maximum`."""
    return _maximum(2, input, output_size, return_indices)


@shard_function(F.adaptive_max_pool3d)
def adaptive_max_pool3d(input, output_size, return_indices=False):
    """Communication: see `_maximum`."""
    return _maximum(3, input, output_size, return_indices)


@shard_function(F.adaptive_max_pool1d_with_indices, torch.adaptive_max_pool1d)
def adaptive_max_pool1d_with_indices(input, output_size, return_indices=True):
    """Communication: see `_maximum`."""
    return _maximum(1, input, output_size, True)


@shard_function(F.adaptive_max_pool2d_with_indices, torch._C._nn.adaptive_max_pool2d)
def adaptive_max_pool2d_with_indices(input, output_size, return_indices=True):
    """Communication: see `_maximum`."""
    return _maximum(2, input, output_size, True)


@shard_function(F.adaptive_max_pool3d_with_indices, torch._C._nn.adaptive_max_pool3d)
def adaptive_max_pool3d_with_indices(input, output_size, return_indices=True):
    """Communication: see `_maximum`."""
    return _maximum(3, input, output_size, True)


def _maximum(n: int, x: ShardTensor, output_size, return_indices: bool):
    """Adaptive maximum pooling over the last `n` dims, with the places of the maxima in the whole of them.

    Communication: for each sharded one of them, one exchange of the rows that windows read across borders; or, with few windows,
    a gather of each rank's maximum of every window (and of its place).
    """
    x = redistribute(x, x._spec.gradient())
    spec, key = x._spec, each(output_size, n)
    plan = spec.cached(
        ("adaptive_max_pool", key), lambda: _make_plan(spec, n, pooled_shape(MAXIMA[n], spec.shape, (_sizes(key, spec.shape),)))
    )
    out = plan.out.gradient()
    values, places = fetch(to_local(x), spec, plan.halos), None
    if not (plan.halos or plan.combined) and values.numel():
        values, places = WITH_INDICES[n](values, plan.shape[-n:])
    else:
        for dim in reversed(range(spec.ndim - n, spec.ndim)):  # ties go to the first row, then to the first column
            first = _first_row(spec, plan, dim)
            values, places = _window_maxima(values, places, dim, plan.windows[dim - spec.ndim], first, prod(spec.shape[dim + 1 :]))
            if dim in plan.combined:
                values, places = _combined_maxima(values, places, dim, spec)
    result = from_local(values, out)
    return (result, ShardTensor(places, out.with_dtype(torch.int64))) if return_indices else result


def _first_row(spec: ShardTensorSpec, plan: _Plan, dim: int) -> int:
    """The global row of the first local row of `dim`."""
    return next((halo.reads[halo.block][0] for halo in plan.halos if halo.dim == dim), spec.box()[dim][0])


def _window_maxima(
    values: Tensor, places: Tensor | None, dim: int, windows: tuple[Span, ...], first: int, below: int
) -> tuple[Tensor, Tensor]:
    """The maxima of the windows along `dim`, and their places in this dim and those after it, of which `places` are already known.

    first: the global row of local row 0. below: places in the dims after this one. Windows without rows here have minus infinity.
    """
    rows = values.shape[dim]
    if not rows or any(start == stop for start, stop in windows):
        shape = (*values.shape[:dim], 1, *values.shape[dim + 1 :])
        values = torch.cat([values, values.new_full(shape, float("-inf"))], dim)
        places = None if places is None else torch.cat([places, places.new_zeros(shape)], dim)
    length = max((_rows(window) for window in windows), default=1) or 1
    table = torch.tensor([[min(start + i, stop - 1) if stop > start else rows for i in range(length)] for start, stop in windows])
    table = table.to(values.device, torch.int64).view(len(windows), length)

    def spread(x: Tensor) -> Tensor:
        return x.index_select(dim, table.flatten()).unflatten(dim, table.shape)

    candidates = spread(values)
    maxima, at = candidates.max(dim + 1, keepdim=True)
    row = table.view(*table.shape, *[1] * (values.ndim - 1 - dim)).expand(candidates.shape).gather(dim + 1, at)
    found = (row + first) * below
    if places is not None:
        found = found + spread(places).gather(dim + 1, at)
    return maxima.squeeze(dim + 1), found.squeeze(dim + 1)


def _combined_maxima(values: Tensor, places: Tensor, dim: int, spec: ShardTensorSpec) -> tuple[Tensor, Tensor]:
    """Of the maxima that the ranks along the axes of `dim` have of each window, the first largest one."""
    owned = spans_of(spec.sizes[dim])
    values, places = (_from_all(x, dim, spec) for x in (values, places))
    at = values.argmax(-1, keepdim=True)
    outputs = values.shape[dim]
    first = [next(b for b, own in enumerate(owned) if own[1] > window_of(o, outputs, spec.shape[dim])[0]) for o in range(outputs)]
    present = torch.tensor(first, device=at.device).view(-1, *[1] * (values.ndim - 1 - dim))
    at = torch.maximum(at, present)  # a window of minus infinities only: not where it has no rows
    return values.gather(-1, at).squeeze(-1), places.gather(-1, at).squeeze(-1)


def _from_all(x: Tensor, dim: int, spec: ShardTensorSpec) -> Tensor:
    """`x` of each rank along the axes of `dim`, in a new last dim; each rank then does the same with all of them."""
    axes = spec.mesh_dims_of(dim)
    blocks = len(spec.sizes[dim])
    placements = tuple(Shard(x.ndim) if axis in axes else Replicate() for axis in range(spec.mesh.ndim))
    apart = ShardTensorSpec(spec.mesh, placements, (*x.shape, blocks), (*[None] * x.ndim, (1,) * blocks), x.dtype)
    return to_local(redistribute(from_local(x.unsqueeze(-1), apart), apart.replicate(axes)))

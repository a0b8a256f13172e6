"""Grid sampling: the result is split like the grid. An input split over space is fetched as far as the grid reaches.

Which rows those are depends on the numbers in the grid, so the ranks first tell each other: displacements of a few rows move a halo,
a global transform moves the whole input, and nothing needs to be declared. Formulas: `aten/src/ATen/native/GridSampler.h` of PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardwise.collectives.exchange import exchange
from shardwise.collectives.functional import all_gather
from shardwise.shard_tensor.empty import connected_empty
from shardwise.shard_tensor.fallback import replicated
from shardwise.shard_tensor.halo import dim_group
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.spec.spans import Span, spans_of

BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Layouts of input, grid and result; `x_gradient` and `grid_gradient` are those of what each rank contributes to the gradients."""

    x: ShardTensorSpec
    grid: ShardTensorSpec
    x_gradient: ShardTensorSpec
    grid_gradient: ShardTensorSpec
    out: ShardTensorSpec


@shard_function(torch.grid_sampler)
def grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
    """Communication: for an input split over space, an all-gather of two integers for each split dim and one exchange of the rows in
    reach of the local grid, backward the same; in half precision the input is gathered. Channel shards of the input stay, and the grid
    is then gathered. The gradient of an input that is whole on every rank is a pending sum. The bilinear gradient of the grid has two
    sides where a place lies exactly on a row of a split dim; either one may be returned."""
    mesh = (input if isinstance(input, ShardTensor) else grid)._spec.mesh
    x, grid = (v if isinstance(v, ShardTensor) else from_local(v, replicated(v.detach(), mesh)._spec) for v in (input, grid))
    x, grid = (redistribute(v, v._spec.gradient()) for v in (x, grid))
    args = (interpolation_mode, padding_mode, align_corners)
    plan = x._spec.cached(("grid_sample", grid._spec), lambda: _make_plan(x._spec, grid._spec))
    local = to_local(redistribute(x, plan.x), plan.x_gradient)
    places = to_local(redistribute(grid, plan.grid), plan.grid_gradient)
    split = [dim for dim in range(2, plan.x.ndim) if plan.x.sizes[dim] is not None]
    if split:
        local, places = _in_reach(local, places, plan.x, split, *args)
    if 0 in plan.out.local_shape:
        return from_local(connected_empty(plan.out.local_shape, local, places), plan.out)
    return from_local(torch.grid_sampler(local, places, *args), plan.out)


def _make_plan(x: ShardTensorSpec, grid: ShardTensorSpec) -> _Plan:
    fits = x.ndim in (4, 5) and grid.ndim == x.ndim and grid.shape[-1] == x.ndim - 2 and grid.shape[0] == x.shape[0]
    if not fits or 0 in x.shape[2:]:
        raise RuntimeError(
            f"grid_sampler(): expected an input of shape (N, C, H, W) or (N, C, D, H, W) and a grid of shape (N, ..., {x.ndim - 2}) of "
            f"as many dims, but got input with sizes {list(x.shape)} and grid with sizes {list(grid.shape)}"
        )
    halves = x.dtype in (torch.float16, torch.bfloat16)
    mesh = x.mesh
    x_placements: list[Placement] = []
    grid_placements: list[Placement] = []
    out_placements: list[Placement] = []
    for p, g in zip(x.placements, grid.placements, strict=True):
        spatial = isinstance(p, Shard) and p.dim > 1
        if Shard(0) in (p, g):
            chosen = (Shard(0), Shard(0), Shard(0))
        elif p == Shard(1):
            chosen = (p, Replicate(), p)
        elif spatial or (isinstance(g, Shard) and g.dim < grid.ndim - 1):
            g = g if isinstance(g, Shard) and g.dim < grid.ndim - 1 else Shard(1)
            chosen = (p if spatial and not halves else Replicate(), g, Shard(g.dim + 1))
        else:
            chosen = (Replicate(), Replicate(), Replicate())
        for placements, placement in zip((x_placements, grid_placements, out_placements), chosen, strict=True):
            placements.append(placement)
    x, grid = x.with_placements(x_placements), grid.with_placements(grid_placements)
    if grid.sizes[0] != x.sizes[0]:
        grid = ShardTensorSpec(mesh, grid.placements, grid.shape, (x.sizes[0], *grid.sizes[1:]), grid.dtype, grid.stride)
    return _Plan(
        x=x,
        grid=grid,
        x_gradient=_pending(x, out_placements),
        grid_gradient=_pending(grid, out_placements),
        out=ShardTensorSpec(mesh, tuple(out_placements), (*x.shape[:2], *grid.shape[1:-1]), (*x.sizes[:2], *grid.sizes[1:-1]), x.dtype),
    )


def _pending(spec: ShardTensorSpec, out: list[Placement]) -> ShardTensorSpec:
    """The layout of the gradient: a pending sum over the axes that split the result but not this operand."""
    placements = tuple(Partial() if q != Replicate() and p == Replicate() else p for p, q in zip(spec.placements, out, strict=True))
    return ShardTensorSpec(spec.mesh, placements, spec.shape, spec.sizes, spec.dtype, spec.stride)


# ---------------------------------------------------------------------- the rows in reach


def _in_reach(local: Tensor, grid: Tensor, spec: ShardTensorSpec, split: list[int], mode: int, padding: int, align: bool):
    """The rows of the input that this rank's grid reaches, and the grid in coordinates of these rows."""
    rows = {dim: _row(grid[..., spec.ndim - 1 - dim], spec.shape[dim], mode, padding, align) for dim in split}
    reach = _agree([_reach(rows[dim], spec.shape[dim], mode, padding) for dim in split], spec, split)
    columns = list(grid.unbind(-1))
    for place, dim in enumerate(split):
        axes = spec.mesh_dims_of(dim)
        wanted = [
            _hull([spans[place] for at, spans in reach.items() if spec.block_index(dim, at) == block])
            for block in range(len(spec.sizes[dim]))
        ]
        local = exchange(local, owned=spans_of(spec.sizes[dim]), wanted=wanted, dim=dim, group=dim_group(spec, axes))
        start, stop = wanted[spec.block_index(dim, spec.coordinate)]
        row, count = rows[dim] - start, stop - start
        columns[spec.ndim - 1 - dim] = row * (2 / max(count - 1, 1)) - 1 if align else (2 * row + 1) / max(count, 1) - 1
    return local, torch.stack(columns, -1)


def _row(coordinate: Tensor, size: int, mode: int, padding: int, align: bool) -> Tensor:
    """The (fractional) row that a coordinate in -1..1 means; with border and reflection padding, inside the input."""
    row = (coordinate + 1) / 2 * (size - 1) if align else ((coordinate + 1) * size - 1) / 2
    if padding != ZEROS and mode != BICUBIC:  # cubic windows are padded row by row, by torch
        if padding == REFLECTION:
            row = _reflected(row, size, align)
        inside = (row > 0) & (row < size - 1)
        row = torch.where(inside, row, row.detach().clamp(0, size - 1))
    return row.round() if mode == NEAREST else row


def _reflected(row: Tensor, size: int, align: bool) -> Tensor:
    low, span = (0.0, float(size - 1)) if align else (-0.5, float(size))
    if span <= 0:
        return row * 0
    away = row - low
    away = torch.where(away < 0, -away, away)
    flips, extra = torch.floor(away.detach() / span), torch.fmod(away, span)
    return torch.where(flips % 2 == 0, extra + low, span - extra + low)


def _reach(row: Tensor, size: int, mode: int, padding: int) -> Span:
    """The rows that windows at these places read, with one to spare on either side, at least two of them if there are."""
    if not row.numel():
        return 0, 0
    row = row.detach().nan_to_num(0.0).clamp(-4, size + 4)
    low, high = int(row.min().floor()), int(row.max().floor())
    if mode == BICUBIC and padding == REFLECTION and (low < 0 or high >= size - 1):
        return 0, size
    start = max(0, min(low - 2, size - 2))
    return start, max(min(high + 4, size), min(start + 2, size))


def _agree(mine: list[Span], spec: ShardTensorSpec, split: list[int]) -> dict[tuple[int, ...], list[Span]]:
    """The reach of every rank that differs from this one along the axes of the `split` dims, by coordinate."""
    axes = sorted({axis for dim in split for axis in spec.mesh_dims_of(dim)})
    ranks = [spec.mesh.size(axis) for axis in axes]
    group = dim_group(spec, axes)
    record = torch.tensor([row for span in mine for row in span]).view(1, -1).to(spec.mesh.device_type)
    table = all_gather(record, 0, (1,) * group.size(), group).tolist()
    result = {}
    for values, row in zip(product(*map(range, ranks)), table, strict=True):
        at = list(spec.coordinate)
        for axis, value in zip(axes, values, strict=True):
            at[axis] = value
        result[tuple(at)] = list(zip(row[::2], row[1::2], strict=True))
    return result


def _hull(spans: list[Span]) -> Span:
    """From the first to the last row of any of the spans."""
    spans = [span for span in spans if span[1] > span[0]]
    return (min(span[0] for span in spans), max(span[1] for span in spans)) if spans else (0, 0)


# ---------------------------------------------------------------------- affine grids


@shard_function(torch.affine_grid_generator)
def affine_grid_generator(theta, size, align_corners):
    """Communication: none; the grid is split over the batch as `theta` is."""
    keep = [Shard(0) if p == Shard(0) else Replicate() for p in theta._spec.placements]
    x = redistribute(theta, theta._spec.gradient().with_placements(keep))
    shape = tuple(torch.affine_grid_generator(torch.empty(theta.shape, device="meta"), size, align_corners).shape)
    spec = x._spec
    out = ShardTensorSpec(spec.mesh, spec.placements, shape, (spec.sizes[0], *[None] * (len(shape) - 1)), spec.dtype)
    local = to_local(x)
    if not local.shape[0]:
        return from_local(connected_empty(out.local_shape, local), out)
    return from_local(torch.affine_grid_generator(local, [local.shape[0], *size[1:]], align_corners), out)

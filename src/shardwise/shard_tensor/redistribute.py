"""From one spec to another: which rows travel, and moving them.

A pending sum is resolved first (all-reduce, or reduce-scatter when its axis becomes a shard). Everything else is one
exchange: each rank owns a box of the tensor, wants a box, and receives the part it lacks from one owner of it, over the
smallest group of mesh axes that has all the pieces. Gathering along a single axis is an all-gather.
"""

from __future__ import annotations

from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardwise.collectives import functional as comm
from shardwise.mesh.groups import axis_group, flat_group
from shardwise.shard_tensor.spec import ShardTensorSpec

Box = tuple[tuple[int, int], ...]


def redistribute_local(local: Tensor, source: ShardTensorSpec, target: ShardTensorSpec) -> Tensor:
    """This rank's shard under `target`, given its shard under `source` (same mesh, same global shape). No gradient.

    Communication: none where every rank holds what it wants; else one collective for each pending sum and one exchange.
    """
    if source.placements == target.placements and source.sizes == target.sizes:
        return local
    for mesh_dim in source.partial_mesh_dims:
        if target.placements[mesh_dim] != source.placements[mesh_dim]:
            local, source = _resolve(local, source, mesh_dim, target)
    if source.placements == target.placements and source.sizes == target.sizes:
        return local
    return _exchange(local, source, target)


def _resolve(local: Tensor, source: ShardTensorSpec, mesh_dim: int, target: ShardTensorSpec) -> tuple[Tensor, ShardTensorSpec]:
    """Resolve the pending reduction on one mesh dim: reduce-scatter where the target shards a dim by that axis alone."""
    wanted = target.placements[mesh_dim]
    reduce_op = source.placements[mesh_dim].reduce_op
    group = axis_group(source.mesh, mesh_dim)
    alone = isinstance(wanted, Shard) and source.sizes[wanted.dim] is None and target.mesh_dims_of(wanted.dim) == (mesh_dim,)
    if alone and reduce_op == "sum":
        sizes = target.sizes[wanted.dim]
        placements = _replaced(source.placements, mesh_dim, wanted)
        blocks = _replaced(source.sizes, wanted.dim, sizes)
        spec = ShardTensorSpec(source.mesh, placements, source.shape, blocks, source.dtype, source.stride)
        return comm.reduce_scatter(local, wanted.dim, sizes, group), spec
    placements = _replaced(source.placements, mesh_dim, Replicate())
    spec = ShardTensorSpec(source.mesh, placements, source.shape, source.sizes, source.dtype, source.stride)
    return comm.all_reduce(local, group, op=reduce_op), spec


def _replaced(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def _exchange(local: Tensor, source: ShardTensorSpec, target: ShardTensorSpec) -> Tensor:
    axes = _moving_axes(source, target)
    if len(axes) == 1:
        (axis,) = axes
        before, after = source.placements[axis], target.placements[axis]
        if isinstance(before, Shard) and isinstance(after, Replicate) and source.mesh_dims_of(before.dim) == (axis,):
            return comm.all_gather(local, before.dim, source.sizes[before.dim], axis_group(source.mesh, axis))
    plan = source.cached(("plan", target), lambda: _Plan(source, target, axes))
    return plan.run(local)


def _moving_axes(source: ShardTensorSpec, target: ShardTensorSpec) -> tuple[int, ...]:
    """The mesh dims whose ranks together hold every piece that a rank wants."""
    axes = {i for i, (p, q) in enumerate(zip(source.placements, target.placements, strict=True)) if p != q}
    for dim, (before, after) in enumerate(zip(source.sizes, target.sizes, strict=True)):
        if before != after:
            involved = {*source.mesh_dims_of(dim), *target.mesh_dims_of(dim)}
            if not involved & axes or len(involved) > 1:
                axes |= involved
    return tuple(sorted(axes))


def box_overlap(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or `None` if it has no element."""
    overlap = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return overlap if all(start < stop for start, stop in overlap) else None


def _slices(box: Box, origin: Box) -> tuple[slice, ...]:
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, origin, strict=True))


class _Plan:
    """Which boxes this rank sends and receives. Built from metadata alone, the same on all ranks; kept with the spec."""

    def __init__(self, source: ShardTensorSpec, target: ShardTensorSpec, axes: tuple[int, ...]) -> None:
        mesh = source.mesh
        self.mesh, self.axes = mesh, axes
        at = list(source.coordinate)
        coordinates = []
        for values in product(*(range(mesh.size(axis)) for axis in axes)):
            for axis, value in zip(axes, values, strict=True):
                at[axis] = value
            coordinates.append(tuple(at))
        me = coordinates.index(source.coordinate)
        owned = [source.box(c) for c in coordinates]
        wanted = [target.box(c) for c in coordinates]
        self.owned, self.wanted, self.shape = owned[me], wanted[me], target.local_shape
        holders: dict[Box, list[int]] = {}
        for rank, box in enumerate(owned):
            holders.setdefault(box, []).append(rank)
        self.sends: list[Box | None] = [None] * len(coordinates)
        self.receives: list[Box | None] = [None] * len(coordinates)
        self.kept: Box | None = None
        self.moves = False
        for receiver, want in enumerate(wanted):
            for box, ranks in holders.items():
                overlap = box_overlap(box, want)
                if overlap is None:
                    continue
                sender = receiver if receiver in ranks else ranks[receiver % len(ranks)]
                if sender == receiver:
                    if receiver == me:
                        self.kept = overlap
                    continue
                self.moves = True
                if sender == me:
                    self.sends[receiver] = overlap
                if receiver == me:
                    self.receives[sender] = overlap

    def run(self, local: Tensor) -> Tensor:
        if not self.moves and self.kept == self.wanted:
            return local[_slices(self.wanted, self.owned)].contiguous()
        result = local.new_empty(self.shape)
        if self.kept is not None:
            result[_slices(self.kept, self.wanted)] = local[_slices(self.kept, self.owned)]
        if not self.moves:
            return result
        parts = [local[_slices(box, self.owned)].reshape(-1) for box in self.sends if box is not None]
        packed = torch.cat(parts) if parts else local.new_empty(0)
        send_sizes = tuple(_numel(box) for box in self.sends)
        recv_sizes = tuple(_numel(box) for box in self.receives)
        group = axis_group(self.mesh, self.axes[0]) if len(self.axes) == 1 else flat_group(self.mesh, self.axes)
        received = comm.all_to_all(packed, send_sizes, recv_sizes, 0, group)
        for box, piece in zip((b for b in self.receives if b is not None), received.split([n for n in recv_sizes if n]), strict=True):
            result[_slices(box, self.wanted)] = piece.view([stop - start for start, stop in box])
        return result


def _numel(box: Box | None) -> int:
    return 0 if box is None else prod(stop - start for start, stop in box)


def moved_bytes(source: ShardTensorSpec, target: ShardTensorSpec) -> int:
    """Bytes that the fullest rank receives when `source` becomes `target`: the cost by which operands are compared."""
    size = source.dtype.itemsize
    total = 0
    for mesh_dim in source.partial_mesh_dims:
        if target.placements[mesh_dim] != source.placements[mesh_dim]:
            total += 2 * size * source.numel
    axes = _moving_axes(source, target)
    if not axes:
        return total
    largest = 0
    for coordinate in product(*(range(n) for n in source.mesh.shape)):
        want, own = target.box(coordinate), source.box(coordinate)
        overlap = box_overlap(want, own)
        largest = max(largest, _numel(want) - _numel(overlap))
    return total + size * largest

"""The process groups of a layout: one rank's place on every axis, ranks placed as `shardwise.spec.ranks` places them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from shardwise.mesh.groups import new_group
from shardwise.spec.layout import Layout
from shardwise.spec.ranks import GROUPS, dense_grid, expert_grid, hierarchical_groups


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The ranks that differ from this one along some axes of the grid, in group order. `group` is None when this rank is alone."""

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


class GroupMaker:
    """Makes each set of ranks one process group, once. Members make groups of the same ranks in the same order."""

    def __init__(self, rank: int, timeout: timedelta | None = None) -> None:
        self.rank, self._timeout = rank, timeout
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def axis(self, ranks: Sequence[int], name: str) -> Axis:
        members = tuple(ranks)
        return Axis(ranks=members, rank=members.index(self.rank), group=self.group(members, name) if len(members) > 1 else None)

    def group(self, members: tuple[int, ...], name: str) -> dist.ProcessGroup:
        if members not in self._made:
            everyone = members == tuple(range(dist.get_world_size()))
            self._made[members] = dist.group.WORLD if everyone else self.another(members, name)
        return self._made[members]

    def another(self, members: tuple[int, ...], name: str) -> dist.ProcessGroup:
        """A group of its own, whatever groups these ranks have."""
        return new_group(members, description=f"shardwise_{name}", timeout=self._timeout)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One rank of a layout. Axis names are those of `shardwise.spec.ranks.GROUPS`.

    ends: first and last rank of the pipeline if this rank is one of them (the tied embedding lives there). cp_levels: the groups of
    hierarchical context parallelism, innermost first. maker: makes further groups.
    """

    layout: Layout
    rank: int
    axes: dict[str, Axis]
    ends: Axis
    maker: GroupMaker
    cp_levels: tuple[Axis, ...] = ()

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    @property
    def pp_rank(self) -> int:
        return self.axes["pp"].rank

    @property
    def dp_rank(self) -> int:
        """Index of this rank's model replica: ranks that share it read the same samples."""
        return self.axes["dp"].rank


def connect(layout: Layout, *, timeout: timedelta | None = None) -> Topology:
    """The groups of `layout` on the running world, whose size must be `layout.world`. Communication: every rank calls it together."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != layout.world:
        raise ValueError(f"the layout has {layout.world} ranks, the world {world}: check the layout before starting processes")
    maker = GroupMaker(rank, timeout)
    grids = {"dense": dense_grid(layout), "expert": expert_grid(layout)}
    axes = {name: maker.axis(grids[view].group_of(rank, names), name) for name, (view, names) in GROUPS.items()}
    pipeline = axes["pp"].ranks
    ends = (rank,)
    if rank in (pipeline[0], pipeline[-1]) and len(pipeline) > 1:
        ends = (pipeline[0], pipeline[-1])
    levels: list[Axis] = []
    if layout.cp_sizes and layout.cp > 1:
        for level in hierarchical_groups(axes["cp"].ranks, layout.cp_sizes):
            levels.append(maker.axis(next(group for group in level if rank in group), "hcp"))
    return Topology(layout=layout, rank=rank, axes=axes, ends=maker.axis(ends, "embd"), maker=maker, cp_levels=tuple(levels))

"""Which rank is where: integer arithmetic of the dense and the expert view of one world.

Both views lay the same ranks out with the leftmost axis of the order varying fastest (Megatron Core `RankGenerator`):

    dense :  rank = t + TP  * (c + CP * (d + DP  * p))
    expert:  rank = t + ETP * (e + EP * (d + EDP * p))

A stage is one set of ranks in both, so the two views differ only inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm, prod

from shardwise.spec.layout import Layout

ORDER = ("tp", "cp", "ep", "dp", "pp")

# group name: (view, axes); the names are those of Megatron Core and Megatron Bridge
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tp": ("dense", ("tp",)),
    "cp": ("dense", ("cp",)),
    "dp": ("dense", ("dp",)),
    "pp": ("dense", ("pp",)),
    "dp_cp": ("dense", ("dp", "cp")),
    "mp": ("dense", ("tp", "pp")),
    "tp_cp": ("dense", ("tp", "cp")),
    "tp_dp": ("dense", ("tp", "dp")),
    "tp_dp_cp": ("dense", ("tp", "dp", "cp")),
    "ep": ("expert", ("ep",)),
    "expt_tp": ("expert", ("tp",)),
    "tp_ep": ("expert", ("tp", "ep")),
    "tp_ep_pp": ("expert", ("tp", "ep", "pp")),
    "expt_dp": ("expert", ("dp",)),
}


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """Ranks as a grid: `axes` and `sizes`, the first axis varying fastest."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world(self) -> int:
        return prod(self.sizes)

    def size(self, axis: str) -> int:
        return self.sizes[self.axes.index(axis)]

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along `axis`."""
        return prod(self.sizes[: self.axes.index(axis)])

    def coordinates(self, rank: int) -> dict[str, int]:
        result = {}
        for axis, size in zip(self.axes, self.sizes):
            rank, result[axis] = divmod(rank, size)
        return result

    def rank(self, coordinates: dict[str, int]) -> int:
        return sum(coordinates.get(axis, 0) * self.stride(axis) for axis in self.axes)

    def _offsets(self, axes: Sequence[str]) -> list[int]:
        ordered = [axis for axis in self.axes if axis in axes]
        steps = [range(0, self.size(axis) * self.stride(axis), self.stride(axis)) for axis in reversed(ordered)]
        return [sum(combination) for combination in product(*steps)]

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """One group per combination of the axes not named; members run over the named axes, the leftmost axis of the grid fastest."""
        members = self._offsets(axes)
        rest = [axis for axis in self.axes if axis not in axes]
        return [tuple(start + offset for offset in members) for start in self._offsets(rest)]

    def group_of(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The group of `rank` over `axes`, without listing the others."""
        start = rank - sum(self.coordinates(rank)[axis] * self.stride(axis) for axis in axes)
        return tuple(start + offset for offset in self._offsets(axes))


def dense_grid(layout: Layout, order: Sequence[str] = ORDER) -> RankGrid:
    """The view of everything but the experts."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "ep": 1, "dp": layout.dp, "pp": layout.pp}
    return RankGrid(axes=tuple(order), sizes=tuple(sizes[axis] for axis in order))


def expert_grid(layout: Layout, order: Sequence[str] = ORDER) -> RankGrid:
    """The view of the experts: `tp` is the expert tensor parallel axis, `dp` the expert data parallel one, and cp ranks are data ranks."""
    sizes = {"tp": layout.etp, "cp": 1, "ep": layout.ep, "dp": layout.edp, "pp": layout.pp}
    return RankGrid(axes=tuple(order), sizes=tuple(sizes[axis] for axis in order))


def groups(layout: Layout, name: str) -> list[tuple[int, ...]]:
    """All groups called `name` (a key of `GROUPS`, or `embd`, `pos_embd`: first and last, first rank of each pipeline)."""
    if name in ("embd", "pos_embd"):
        pipelines = dense_grid(layout).groups(("pp",))
        if name == "pos_embd":
            return [pipeline[:1] for pipeline in pipelines]
        return [pipeline if len(pipeline) == 1 else (pipeline[0], pipeline[-1]) for pipeline in pipelines]
    view, axes = GROUPS[name]
    grid = dense_grid(layout) if view == "dense" else expert_grid(layout)
    return grid.groups(axes)


def hierarchical_groups(group: Sequence[int], sizes: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Levels of a group cut hierarchically: level k has groups of `sizes[k]` members at distance prod(sizes[:k]) (Megatron hcp groups)."""
    if prod(sizes) != len(group):
        raise ValueError(f"hierarchical sizes {list(sizes)} multiply to {prod(sizes)}, the group has {len(group)} ranks")

    def level(step: int, size: int) -> Iterator[tuple[int, ...]]:
        for block in range(0, len(group), step * size):
            for start in range(block, block + step):
                yield tuple(group[start : start + step * size : step])

    return [list(level(prod(sizes[:k]), size)) for k, size in enumerate(sizes)]


def experts_of(layout: Layout, rank: int, experts: int) -> range:
    """Indices of the routed experts that `rank` holds."""
    each = experts // layout.ep
    first = expert_grid(layout).coordinates(rank)["ep"] * each
    return range(first, first + each)


def min_world(layout: Layout) -> int:
    """Smallest world of the degrees: a multiple of both PP*TP*CP and PP*EP*ETP, that is PP * lcm(TP*CP, EP*ETP)."""
    return layout.pp * lcm(layout.tp * layout.cp, layout.ep * layout.etp)


def product_world(layout: Layout) -> int:
    """The popular wrong answer, PP*TP*CP*EP*ETP: the two views share ranks, they do not multiply."""
    return layout.pp * layout.tp * layout.cp * layout.ep * layout.etp


def max_world(layout: Layout) -> int:
    """The loose answer, PP * max(TP*CP, EP*ETP): too small when neither product divides the other."""
    return layout.pp * max(layout.tp * layout.cp, layout.ep * layout.etp)

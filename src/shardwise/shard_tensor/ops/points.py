"""Point clouds and surfaces on shards: queries stay where they are, and what they are held against goes round the ring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardwise.collectives import functional as comm
from shardwise.functional import distance_to_triangles, knn, radius_search
from shardwise.functional.points import check_knn, check_points, chosen, lengths, limited, nearest, within
from shardwise.functional.surface import check_triangles, closest, signed
from shardwise.shard_tensor.adopt import part_of, sharded
from shardwise.shard_tensor.halo import dim_group
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.spec.spans import spans_of


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Rows of this rank (`queries`, laid out as `spec`) and those of all ranks that they are held against.

    points: this rank's rows of the latter, split as `sizes` over the ranks of `group`; None: whole on every rank.
    """

    queries: Tensor
    spec: ShardTensorSpec
    points: Tensor
    sizes: tuple[int, ...]
    group: object | None

    @classmethod
    def of(cls, queries: Tensor, points: Tensor) -> Ring:
        """Queries are split wherever they or the points are; points stay split as they are."""
        like = [x for x in (queries, points) if isinstance(x, ShardTensor)]
        queries, points = (sharded(x, like) for x in (queries, points))
        ring = [axis for axis, p in enumerate(points.placements) if p == Shard(0)]
        axes = [axis for axis, p in enumerate(queries.placements) if p == Shard(0) or axis in ring]
        spec = queries._spec.with_placements([Shard(0) if axis in axes else Replicate() for axis in range(queries._spec.mesh.ndim)])
        points_spec = points._spec.with_placements([Shard(0) if axis in ring else Replicate() for axis in range(spec.mesh.ndim)])
        return cls(
            queries=to_local(redistribute(queries, spec)),
            spec=spec,
            points=part_of(points, points_spec, axes),
            sizes=points_spec.sizes[0] or (points.shape[0],),
            group=dim_group(points_spec, ring) if ring else None,
        )

    @property
    def first(self) -> int:
        """The global row of the first query of this rank."""
        return self.spec.box()[0][0]

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """The points of every rank in turn, with the global row of the first; differentiable.

        Communication: all but a rank's own come from their owner, one message each; their gradients go back."""
        me = self.group.rank() if self.group else 0
        starts = [start for start, _ in spans_of(self.sizes)]
        for step in range(len(self.sizes)):
            owner = (me - step) % len(self.sizes)
            shape = (self.sizes[owner], *self.points.shape[1:])
            yield starts[owner], comm.ring_shift(self.points, shape, step, self.group) if step else self.points

    def laid(self, local: Tensor) -> ShardTensor:
        """A result with a row for each query of this rank."""
        shape = (self.spec.shape[0], *local.shape[1:])
        return from_local(local, self.spec.with_dims(shape, (0, *[None] * (local.ndim - 1)), dtype=local.dtype))


@shard_function(knn)
def sharded_knn(points, queries, k):
    """Queries are split wherever they or the points are. Communication: none for whole points; else by ring (n - 1)/n of the points, and
    in backward of their gradients."""
    check_knn(points, queries, k)
    ring = Ring.of(queries, points)
    found = nearest(ring.queries, ring.blocks(), k)
    return ring.laid(found.index), ring.laid(lengths(ring.queries, found.points))


@shard_function(radius_search)
def sharded_radius_search(points, queries, radius, max_points=None, return_dists=False, return_points=False):
    """Communication: as `knn`; with `max_points=None` also one gather of the number of pairs of each rank."""
    check_points("radius_search", points, queries)
    ring = Ring.of(queries, points)
    if max_points is not None:
        found = nearest(ring.queries, ring.blocks(), min(max_points, points.shape[0]))
        return chosen(*map(ring.laid, limited(ring.queries, found, radius, max_points)), return_dists, return_points)
    query, index, near = within(ring.queries, ring.blocks(), radius)
    sizes = _agreed(len(query), ring.spec)
    pairs = from_local(torch.stack([query + ring.first, index]), _pairs_spec(ring.spec, (2,), sizes, torch.int64, 1))
    distances = lengths(ring.queries[query], near)
    near, distances = (from_local(x, _pairs_spec(ring.spec, tuple(x.shape[1:]), sizes, x.dtype, 0)) for x in (near, distances))
    return chosen(pairs, near, distances, return_dists, return_points)


def _agreed(count: int, spec: ShardTensorSpec) -> tuple[int, ...]:
    """The `count` of every block of the queries."""
    axes = spec.mesh_dims_of(0)
    if not axes:
        return (count,)
    group = dim_group(spec, axes)
    counts = torch.tensor([count], device=spec.mesh.device_type)
    return tuple(comm.all_gather(counts, 0, (1,) * group.size(), group).tolist())


def _pairs_spec(spec: ShardTensorSpec, others: tuple[int, ...], sizes: tuple[int, ...], dtype, dim: int) -> ShardTensorSpec:
    """The layout of pairs, which lie in `dim` and where their queries are; `others` are the other dims."""
    placements = tuple(Shard(dim) if isinstance(p, Shard) else p for p in spec.placements)
    shape = (*others[:dim], sum(sizes), *others[dim:])
    blocks = sizes if spec.sizes[0] is not None else None
    return ShardTensorSpec(spec.mesh, placements, shape, tuple(blocks if d == dim else None for d in range(len(shape))), dtype)


@shard_function(distance_to_triangles)
def sharded_distance_to_triangles(triangles, points):
    """Communication: as `knn`, of triangles."""
    check_triangles(triangles, points)
    ring = Ring.of(points, triangles)
    found = closest(ring.queries, ring.blocks())
    return tuple(map(ring.laid, signed(ring.queries, found)))

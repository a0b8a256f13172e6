"""`ShardTensorSpec`: everything every rank knows about a sharded tensor, as plain integers.

A tensor dim may be sharded over one or several mesh axes, evenly or not. Its rows lie in blocks, one for each
combination of coordinates on those axes, in row-major order of the axes::

    mesh 2 x 2, placements (Shard(0), Shard(0)), 10 rows     sizes[0] == (3, 3, 2, 2)
    rank at coordinate (1, 0) holds block 2                  rows 6..8

From the spec each rank derives, without communication, what every other rank holds. All checks and all choices of
an op are made from specs, so that all ranks make the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardwise.spec.spans import chunk_sizes, spans_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Sizes = tuple[int, ...] | None


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The row-major stride of `shape`."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def iterated_stride(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The stride of a new pointwise result, given those of its operands, each broadcast to `shape` (0 where it is): dense, in the memory
    order of the first operand that tells two dims apart."""

    def compared(dim: int, other: int) -> int:
        """Positive if `dim` lies outside `other`, negative if inside, 0 if no operand tells."""
        for stride in strides:
            a, b = stride[dim], stride[other]
            if a and b and (a != b or shape[dim] > shape[other]):
                return 1 if a >= b else -1
        return 0

    order = list(reversed(range(len(shape))))  # from the innermost dim to the outermost
    for place in range(1, len(order)):
        for earlier in reversed(range(place)):
            outside = compared(order[earlier], order[place])
            if outside < 0:
                break
            if outside > 0:
                order[earlier], order[place] = order[place], order[earlier]
                place = earlier
    result, step = [0] * len(shape), 1
    for dim in order:
        result[dim] = step
        step *= max(shape[dim], 1)
    return tuple(result)


def normalize_placements(placements: Sequence[Placement], mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """Check one placement per mesh dim and turn negative `Shard` dims into positive ones."""
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{len(placements)} placements {tuple(placements)} for a mesh of {mesh.ndim} dims {mesh}: give one for each mesh dim"
        )
    result: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard):
            if type(placement) is not Shard:
                raise ValueError(f"placement {placement} is not supported: use Shard(dim), Replicate() or Partial()")
            if not -ndim <= placement.dim < ndim:
                raise ValueError(f"{placement} does not fit a tensor of {ndim} dims: give a dim from {-ndim} to {ndim - 1}")
            result.append(Shard(placement.dim % ndim))
        elif isinstance(placement, Replicate | Partial):
            result.append(placement)
        else:
            raise ValueError(f"placement {placement!r} is not supported: use Shard(dim), Replicate() or Partial()")
    return tuple(result)


class ShardTensorSpec:
    """Mesh, placements, global shape, stride and dtype, and the size of every shard.

    Attributes:
        mesh: the device mesh.
        placements: one placement for each mesh dim.
        shape, stride, dtype: of the whole (global) tensor.
        sizes: one entry for each tensor dim: `None` if it is not sharded, else the number of rows of every block.

    A spec is immutable; equal specs compare equal and hash alike.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: tuple[int, ...],
        sizes: tuple[Sizes, ...],
        dtype: torch.dtype,
        stride: tuple[int, ...] | None = None,
    ) -> None:
        self.mesh = mesh
        self.placements = placements
        self.shape = shape
        self.stride = contiguous_stride(shape) if stride is None else stride
        self.dtype = dtype
        self.sizes = sizes
        self._cache: dict = {}

    @classmethod
    def chunked(
        cls,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: tuple[int, ...] | None = None,
    ) -> ShardTensorSpec:
        """The spec in which every sharded dim is split as `torch.chunk` does, axis after axis."""
        shape = tuple(shape)
        placements = normalize_placements(placements, mesh, len(shape))
        sizes: list[Sizes] = [None] * len(shape)
        for mesh_dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                blocks = sizes[placement.dim] or (shape[placement.dim],)
                sizes[placement.dim] = tuple(size for block in blocks for size in chunk_sizes(block, mesh.size(mesh_dim)))
        return cls(mesh, placements, shape, tuple(sizes), dtype, stride)

    # ------------------------------------------------------------------ identity

    def _key(self) -> tuple:
        return (self.placements, self.shape, self.sizes, self.stride, self.dtype)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ShardTensorSpec):
            return NotImplemented
        return self._key() == other._key() and (self.mesh is other.mesh or self.mesh == other.mesh)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self._key(), self.mesh))

    def __copy__(self) -> ShardTensorSpec:
        return self

    def __deepcopy__(self, memo: dict) -> ShardTensorSpec:
        return self

    def __reduce__(self):
        return ShardTensorSpec, (self.mesh, self.placements, self.shape, self.sizes, self.dtype, self.stride)

    def __repr__(self) -> str:
        return f"ShardTensorSpec({self.describe()})"

    def describe(self) -> str:
        """One line: shape, dtype, placements with their axes, and the shard sizes."""
        names = self.mesh.mesh_dim_names or tuple(range(self.mesh.ndim))
        where = ", ".join(f"{name}: {placement}" for name, placement in zip(names, self.placements, strict=True))
        split = "".join(f", dim {dim} in {list(sizes)}" for dim, sizes in enumerate(self.sizes) if sizes is not None)
        return f"shape {tuple(self.shape)}, {str(self.dtype).removeprefix('torch.')}, {{{where}}}{split}"

    # ------------------------------------------------------------------ facts derived once

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def cached(self, key: object, make):
        """`make()`, computed once for this spec object."""
        cache = self._cache
        if key not in cache:
            cache[key] = make()
        return cache[key]

    @cached_property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's coordinate on the mesh."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"this rank is not part of the mesh {self.mesh}: build the tensor on a mesh that contains it")
        return tuple(coordinate)

    def mesh_dims_of(self, dim: int) -> tuple[int, ...]:
        """The mesh dims over which tensor dim `dim` is sharded, in mesh order."""
        return tuple(i for i, placement in enumerate(self.placements) if isinstance(placement, Shard) and placement.dim == dim)

    def block_index(self, dim: int, coordinate: Sequence[int]) -> int:
        """Which block of dim `dim` the rank at `coordinate` holds."""
        index = 0
        for mesh_dim in self.mesh_dims_of(dim):
            index = index * self.mesh.size(mesh_dim) + coordinate[mesh_dim]
        return index

    def box(self, coordinate: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
        """Rows (start, stop) of each dim held by the rank at `coordinate` (default: this rank)."""
        key = ("box", None if coordinate is None else tuple(coordinate))
        if key not in self._cache:
            at = self.coordinate if coordinate is None else coordinate
            spans = []
            for dim, sizes in enumerate(self.sizes):
                spans.append((0, self.shape[dim]) if sizes is None else spans_of(sizes)[self.block_index(dim, at)])
            self._cache[key] = tuple(spans)
        return self._cache[key]

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard."""
        return tuple(stop - start for start, stop in self.box())

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...] | int:
        """Where this rank's shard starts: for each mesh dim, the first row along the tensor dim it shards (0 if none)."""
        starts = tuple(self.box()[placement.dim][0] if isinstance(placement, Shard) else 0 for placement in self.placements)
        return starts if mesh_dim is None else starts[mesh_dim]

    def sharding_shapes(self, mesh_dim: int | None = None):
        """`{mesh_dim: (shape, ...)}`: the shard shapes of the ranks along each sharded mesh dim that share this rank's
        other coordinates; with `mesh_dim`, that entry alone."""
        if mesh_dim is not None:
            return self._shapes_along(mesh_dim)
        return {i: self._shapes_along(i) for i, placement in enumerate(self.placements) if isinstance(placement, Shard)}

    def _shapes_along(self, mesh_dim: int) -> tuple[tuple[int, ...], ...]:
        at = list(self.coordinate)
        shapes = []
        for index in range(self.mesh.size(mesh_dim)):
            at[mesh_dim] = index
            shapes.append(tuple(stop - start for start, stop in self.box(tuple(at))))
        return tuple(shapes)

    # ------------------------------------------------------------------ placements

    @cached_property
    def sharded_mesh_dims(self) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(self.placements) if isinstance(p, Shard))

    @cached_property
    def partial_mesh_dims(self) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(self.placements) if isinstance(p, Partial))

    @cached_property
    def is_replicated(self) -> bool:
        return all(isinstance(p, Replicate) for p in self.placements)

    @cached_property
    def sharded_dims(self) -> tuple[int, ...]:
        """The sharded tensor dims, ascending."""
        return tuple(d for d, sizes in enumerate(self.sizes) if sizes is not None)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    # ------------------------------------------------------------------ relatives

    def with_dtype(self, dtype: torch.dtype) -> ShardTensorSpec:
        if dtype is self.dtype:
            return self
        return self.cached(
            ("dtype", dtype), lambda: ShardTensorSpec(self.mesh, self.placements, self.shape, self.sizes, dtype, self.stride)
        )

    def contiguous(self) -> ShardTensorSpec:
        """The same tensor in row-major memory order."""
        if self.stride == contiguous_stride(self.shape):
            return self
        return self.cached("contiguous", lambda: ShardTensorSpec(self.mesh, self.placements, self.shape, self.sizes, self.dtype))

    @cached_property
    def computed(self) -> ShardTensorSpec:
        """The spec of a new tensor computed element by element from this one alone: its memory has no gaps."""
        return self.with_stride(iterated_stride(self.shape, [self.stride]))

    def with_stride(self, stride: tuple[int, ...]) -> ShardTensorSpec:
        if stride == self.stride:
            return self
        return ShardTensorSpec(self.mesh, self.placements, self.shape, self.sizes, self.dtype, stride)

    def as_stored(self, local: torch.Tensor) -> ShardTensorSpec:
        """This spec, or the row-major one if it has an expanded dim (stride 0) in which `local`, made of such a tensor, has memory.

        Only unsharded dims may be expanded: their local strides are alike on all ranks, those of shards of one row say nothing.
        """
        for dim, (size, step) in enumerate(zip(self.shape, self.stride, strict=True)):
            if size > 1 and not step and (self.sizes[dim] is not None or local.stride(dim)):
                return self.contiguous()
        return self

    def gradient(self) -> ShardTensorSpec:
        """The layout of a gradient of this tensor: each summand of a pending sum receives the whole gradient."""
        if not self.partial_mesh_dims:
            return self
        return self.cached("gradient", lambda: self.replicate(self.partial_mesh_dims))

    def replicate(self, mesh_dims: Sequence[int] | None = None) -> ShardTensorSpec:
        """This spec with `Replicate` on the given mesh dims (all by default); other axes of the same dim keep their rows."""
        mesh_dims = tuple(range(self.mesh.ndim)) if mesh_dims is None else tuple(mesh_dims)
        return self.cached(("replicate", mesh_dims), lambda: self._replicate(mesh_dims))

    def _replicate(self, mesh_dims: tuple[int, ...]) -> ShardTensorSpec:
        placements = tuple(Replicate() if i in mesh_dims else p for i, p in enumerate(self.placements))
        sizes = tuple(
            None if blocks is None else self._merge(blocks, self.mesh_dims_of(dim), mesh_dims) for dim, blocks in enumerate(self.sizes)
        )
        return ShardTensorSpec(self.mesh, placements, self.shape, sizes, self.dtype, self.stride)

    def _merge(self, blocks: tuple[int, ...], axes: tuple[int, ...], gone: tuple[int, ...]) -> Sizes:
        """Block sizes of a dim once the axes in `gone` no longer split it; chunk sizes if an outer axis goes first."""
        kept = tuple(axis for axis in axes if axis not in gone)
        if kept == axes:
            return blocks
        if not kept:
            return None
        if axes[: len(kept)] == kept:  # inner axes go: neighbouring blocks join
            inner = prod(self.mesh.size(axis) for axis in axes[len(kept) :])
            return tuple(sum(blocks[i : i + inner]) for i in range(0, len(blocks), inner))
        return chunk_sizes(sum(blocks), prod(self.mesh.size(axis) for axis in kept))

    def with_dims(
        self, shape: Sequence[int], source: Sequence[int | None], stride: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> ShardTensorSpec:
        """The spec of a result whose dim `i` is this tensor's dim `source[i]` (`None`: a new, unsharded dim).

        A sharded dim that no result dim names must not exist: remove it first.
        """
        where = {dim: i for i, dim in enumerate(source) if dim is not None}
        placements = tuple(Shard(where[p.dim]) if isinstance(p, Shard) else p for p in self.placements)
        sizes = tuple(None if dim is None else self.sizes[dim] for dim in source)
        return ShardTensorSpec(self.mesh, placements, tuple(shape), sizes, dtype or self.dtype, stride)

    def with_placements(self, placements: Sequence[Placement]) -> ShardTensorSpec:
        """This tensor under other placements. A dim that stays sharded over the same axes keeps its sizes, any other is
        split as `torch.chunk` does."""
        placements = normalize_placements(placements, self.mesh, self.ndim)
        if placements == self.placements:
            return self
        return self.cached(("placements", placements), lambda: self._with_placements(placements))

    def _with_placements(self, placements: tuple[Placement, ...]) -> ShardTensorSpec:
        fresh = ShardTensorSpec.chunked(self.mesh, placements, self.shape, self.dtype, self.stride)
        sizes = tuple(
            self.sizes[dim] if fresh.mesh_dims_of(dim) == self.mesh_dims_of(dim) else fresh.sizes[dim] for dim in range(self.ndim)
        )
        return ShardTensorSpec(self.mesh, placements, self.shape, sizes, self.dtype, self.stride)

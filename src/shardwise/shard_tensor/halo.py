"""Fetching the rows that an op reads from other ranks, dim after dim.

A windowed op on a sharded dim makes some of the output rows on each rank. `Halo` says which ones, and which input rows they read;
`fetch` brings those rows together, one exchange for each sharded dim. Corners come out right because a later dim exchanges rows
that already contain the halos of the earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from shardwise.collectives.exchange import exchange
from shardwise.mesh.groups import axis_group, flat_group
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.spec.spans import Span, Spans, spans_of
from shardwise.spec.windows import aligned_sizes, output_spans, split_border


@dataclass(frozen=True, kw_only=True)
class Halo:
    """One sharded dim: the rows that each block owns, reads and makes, in global rows.

    `reads` is one span for each block, or several; rows beyond the tensor are filled.
    """

    dim: int
    axes: tuple[int, ...]
    block: int
    size: int
    owned: Spans
    reads: tuple[Span | Spans, ...]
    makes: Spans

    @property
    def made(self) -> Span:
        """What this rank makes."""
        return self.makes[self.block]

    @property
    def make_sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.makes)


def make_halo(
    spec: ShardTensorSpec, dim: int, outputs: int, row_of: Callable[[int], int], reads: Callable[[Span, Span], Span | Spans]
) -> Halo:
    """The halo of sharded dim `dim`: output `o` is made where input row `row_of(o)` lies; the owner of rows `owned` that makes
    outputs `span` reads `reads(owned, span)`."""
    sizes = spec.sizes[dim]
    makes = output_spans(sizes, outputs, row_of)
    owned = spans_of(sizes)
    return Halo(
        dim=dim,
        axes=spec.mesh_dims_of(dim),
        block=spec.block_index(dim, spec.coordinate),
        size=spec.shape[dim],
        owned=owned,
        reads=tuple(reads(own, span) if span[1] > span[0] else (0, 0) for own, span in zip(owned, makes, strict=True)),
        makes=makes,
    )


def dim_group(spec: ShardTensorSpec, axes: Sequence[int]):
    """The process group whose ranks hold the blocks of a dim sharded over `axes`, in block order."""
    return axis_group(spec.mesh, axes[0]) if len(axes) == 1 else flat_group(spec.mesh, axes)


def fetch(local: Tensor, spec: ShardTensorSpec, halos: Sequence[Halo], fill: float = 0) -> Tensor:
    """`local` with exactly the rows that this rank reads in each of `halos`; rows outside the tensor are `fill`.

    Communication: one exchange for each halo in which any rank reads a row it does not own; backward the same.
    """
    borders = [0] * (2 * local.ndim)
    for index, halo in enumerate(halos):
        wanted = halo.reads
        if index < len(halos) - 1:  # filled rows at the borders need not travel with the next dim
            at = 2 * (local.ndim - 1 - halo.dim)
            before, _, after = split_border(wanted[halo.block], halo.size)
            borders[at : at + 2] = before, after
            wanted = tuple(split_border(reads, halo.size)[1] for reads in wanted)
        local = exchange(local, owned=halo.owned, wanted=wanted, dim=halo.dim, group=dim_group(spec, halo.axes), fill=fill)
    return pad(local, borders, value=fill) if any(borders) else local


def with_sizes(spec: ShardTensorSpec, shape: Sequence[int], halos: Sequence[Halo], dtype=None) -> ShardTensorSpec:
    """The layout of the result: as `spec`, with the rows that each block makes in the dims of `halos`."""
    sizes = list(spec.sizes)
    for halo in halos:
        sizes[halo.dim] = halo.make_sizes
    return ShardTensorSpec(spec.mesh, spec.placements, tuple(shape), tuple(sizes), dtype or spec.dtype)


def aligned(spec: ShardTensorSpec, dim: int, unit: int) -> ShardTensorSpec:
    """`spec` with the shards of `dim`, if it is sharded, on multiples of `unit` rows."""
    blocks = spec.sizes[dim]
    if blocks is None or all(size % unit == 0 for size in blocks):
        return spec
    sizes = (*spec.sizes[:dim], aligned_sizes(blocks, unit), *spec.sizes[dim + 1 :])
    return ShardTensorSpec(spec.mesh, spec.placements, spec.shape, sizes, spec.dtype, spec.stride)


def rows_at(local: Tensor, dim: int, start: int, rows: int) -> Tensor:
    """Rows `start : start + rows` of `dim` of `local`, zeros where it has none."""
    before, after = max(0, min(-start, rows)), max(0, min(start + rows - local.shape[dim], rows))
    if before + after == rows:
        before, after, inside = 0, rows, (0, 0)
    else:
        inside = (start + before, rows - before - after)
    if inside != (0, local.shape[dim]):
        local = local.narrow(dim, *inside)
    return pad(local, [0, 0] * (local.ndim - 1 - dim) + [before, after]) if before or after else local


def grown(local: Tensor, dim: int, rows: int) -> Tensor:
    """`local` with zero rows appended to `dim` until it has `rows`, so that a rank without rows can still run the op."""
    return rows_at(local, dim, 0, rows) if local.shape[dim] < rows else local


def cut(local: Tensor, shape: Sequence[int]) -> Tensor:
    """The leading part of `local` that has `shape`."""
    for dim, size in enumerate(shape):
        if local.shape[dim] != size:
            local = local.narrow(dim, 0, size)
    return local

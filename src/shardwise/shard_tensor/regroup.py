"""How a view regroups dims, and what that means for the shards. Integers only.

`view` matches runs of old dims with runs of new dims of equal size, in row-major order. A dim sharded in contiguous
blocks stays so if it leads its run and the block borders fall on rows of the new leading dim. Where they do not, the
rows are rebalanced first; where the sharded dim does not lead, the shard moves to the leading dim first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import lcm, prod

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardwise.shard_tensor.spec import ShardTensorSpec, Sizes

Groups = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def complete_shape(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """`shape` with its single -1 worked out."""
    shape = tuple(shape)
    if -1 not in shape:
        return shape
    rest = prod(n for n in shape if n != -1)
    return tuple(numel // rest if n == -1 else n for n in shape) if rest else tuple(0 if n == -1 else n for n in shape)


def view_groups(old: Sequence[int], new: Sequence[int]) -> Groups:
    """Minimal runs of old dims and new dims with equal products, in order: `(2, 3, 4) -> (6, 4)` gives `((0, 1), (0,)), ((2,), (1,))`."""
    if prod(old) != prod(new):
        raise ValueError(f"shapes {tuple(old)} and {tuple(new)} are not compatible: {prod(old)} and {prod(new)} elements")
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        olds, news = [], []
        have = want = 1
        if i < len(old):
            olds, have, i = [i], old[i], i + 1
        if j < len(new):
            news, want, j = [j], new[j], j + 1
        while have != want:
            if (have < want or want == 0) and i < len(old):
                have *= old[i]
                olds.append(i)
                i += 1
            elif j < len(new):
                want *= new[j]
                news.append(j)
                j += 1
            else:
                have *= old[i]
                olds.append(i)
                i += 1
        groups.append((tuple(olds), tuple(news)))
    return tuple(groups)


def view_specs(spec: ShardTensorSpec, shape: tuple[int, ...]) -> tuple[ShardTensorSpec, ShardTensorSpec]:
    """`(before, after)`: the layout the tensor must have before the view, and the layout of the view."""
    if 0 in shape:
        whole = spec.replicate()
        return whole, whole.with_dims(shape, [None] * len(shape))
    placements: list[Placement] = list(spec.placements)
    sizes: list[Sizes] = list(spec.sizes)
    after: list[Sizes] = [None] * len(shape)
    lands: dict[int, int] = {}
    for olds, news in view_groups(spec.shape, shape):
        sharded = [dim for dim in olds if spec.sizes[dim] is not None]
        if not sharded:
            continue
        if len(olds) == len(news) == 1:
            after[news[0]] = spec.sizes[olds[0]]
            lands[olds[0]] = news[0]
            continue
        leader = next((dim for dim in olds if spec.shape[dim] > 1), olds[0])
        target = next((dim for dim in news if shape[dim] > 1), news[0] if news else None)
        if target is None:  # a run of size 1: nothing to shard
            for dim in sharded:
                sizes[dim] = None
                placements = [p if not (isinstance(p, Shard) and p.dim == dim) else Replicate() for p in placements]
            continue
        blocks = spec.sizes[leader]
        if sharded != [leader]:  # every axis of this run shards the leading dim
            placements = [Shard(leader) if isinstance(p, Shard) and p.dim in sharded else p for p in placements]
            fresh = ShardTensorSpec.chunked(spec.mesh, placements, spec.shape, spec.dtype)
            for dim in sharded:
                sizes[dim] = None
            blocks = fresh.sizes[leader]
        inner_old = prod(spec.shape[dim] for dim in olds if dim > leader)
        inner_new = prod(shape[dim] for dim in news if dim > target)
        if any(size * inner_old % inner_new for size in blocks):
            blocks = _on_borders(blocks, lcm(inner_old, inner_new) // inner_old, spec.shape[leader])
        sizes[leader] = blocks
        after[target] = tuple(size * inner_old // inner_new for size in blocks)
        lands[leader] = target
    before = ShardTensorSpec(spec.mesh, tuple(placements), spec.shape, tuple(sizes), spec.dtype, spec.stride)
    if before == spec:
        before = spec
    moved = tuple(Shard(lands[p.dim]) if isinstance(p, Shard) else p for p in placements)
    return before, ShardTensorSpec(spec.mesh, moved, shape, tuple(after), spec.dtype)


def _on_borders(blocks: Sequence[int], unit: int, total: int) -> tuple[int, ...]:
    """Block sizes near `blocks` whose borders are multiples of `unit` (which divides `total`)."""
    borders, row = [0], 0
    for size in blocks:
        row += size
        borders.append(min(total, (row + unit // 2) // unit * unit))
    borders[-1] = total
    return tuple(stop - start for start, stop in pairwise(borders))

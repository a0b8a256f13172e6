"""One block of ring attention: the local queries against the keys of one rank, rectangle by rectangle, and the merge of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.attention.dropout import Dropout
from shardwise.attention.kernels import MATH, Result, Terms, accumulation_dtype, choose_kernel, finite
from shardwise.collectives.functional import all_reduce
from shardwise.spec.sequence import Band, Block, Tile

# Scores or mask elements that one kernel call may hold: what a call needs beyond its operands stays constant as sequences grow.
_ELEMENTS = 1 << 22

Bias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How local queries score keys. Positions are global.

    positions: [R] of the local queries. mask: boolean (True attends) or additive, [1 or B, 1 or Hq, 1 or R, all keys], columns in global
    order. bias: `bias(query_positions, key_positions)`, added to the scores. segments: [B, R] ids of the local queries.
    """

    scale: float
    band: Band
    positions: Tensor
    mask: Tensor | None = None
    bias: Bias | None = None
    segments: Tensor | None = None
    dropout: Dropout | None = None

    def terms(self, tile: Tile, heads: tuple[int, int], keys: KeyBlock) -> Terms:
        """The terms of a rectangle; heads: local batch and query heads (for dropout)."""
        rows, columns = slice(*tile.queries), slice(*tile.keys)
        query_at, key_at = self.positions[rows], keys.positions[columns]
        allowed: list[Tensor] = []
        bias: list[Tensor] = []
        if tile.kind == "masked":
            distance = key_at - query_at[:, None]
            if self.band.left is not None:
                allowed.append((distance >= -self.band.left)[None, None])
            if self.band.right is not None:
                allowed.append((distance <= self.band.right)[None, None])
        if self.mask is not None:
            part = _mask_part(self.mask, rows, key_at)
            (allowed if part.dtype == torch.bool else bias).append(part)
        if self.segments is not None and keys.segments is not None:
            allowed.append((self.segments[:, rows, None] == keys.segments[:, None, columns])[:, None])
        if self.bias is not None:
            bias.append(as_4d(self.bias(query_at, key_at)))
        dtype = accumulation_dtype(keys.k.dtype)
        return Terms(
            scale=self.scale,
            causal=tile.kind == "causal",
            allowed=_combined(allowed, torch.logical_and),
            bias=_combined([part.to(dtype) for part in bias], torch.add),
            keep=None if self.dropout is None else self.dropout.multipliers(heads, query_at, key_at, dtype),
        )

    @property
    def dense(self) -> bool:
        """Whether a full rectangle needs tensors of its size."""
        return any(part is not None for part in (self.mask, self.bias, self.segments, self.dropout))


@dataclass(frozen=True, kw_only=True)
class KeyBlock:
    """Keys and values of one rank, [B, Hkv, C, D] and [B, Hkv, C, Dv], with their positions [C] and segment ids [B, C]."""

    k: Tensor
    v: Tensor
    positions: Tensor
    segments: Tensor | None = None


def _mask_part(mask: Tensor, rows: slice, key_at: Tensor) -> Tensor:
    part = mask if mask.shape[2] == 1 else mask[:, :, rows]
    return part.index_select(3, key_at)


def as_4d(x: Tensor) -> Tensor:
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _combined(parts: list[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    result = None
    for part in parts:
        result = part if result is None else combine(result, part)
    return result


def _rectangles(block: Block, scoring: Scoring, q: Tensor, keys: KeyBlock) -> Iterator[Tile]:
    """The tiles of a block, cut where a call would hold too many elements; a triangle that meets other masks becomes a mask."""
    if q.shape[0] * q.shape[1] == 0:
        return
    by_elements = scoring.dense or choose_kernel(q, keys.k, keys.v, Terms(scale=scoring.scale)) is MATH
    for tile in block.tiles:
        (first, stop), (first_key, stop_key) = tile.queries, tile.keys
        if not by_elements and tile.kind != "masked":
            yield tile
            continue
        height, width = _call_size(stop - first, stop_key - first_key, max(1, _ELEMENTS // (q.shape[0] * q.shape[1])))
        for start in range(first, stop, height):
            end = min(start + height, stop)
            causal = tile.kind == "causal"
            last_key = first_key + end - first if causal else stop_key
            for start_key in range(first_key, last_key, width):
                columns = start_key, min(start_key + width, last_key)
                yield Tile(queries=(start, end), keys=columns, kind="masked" if causal else tile.kind)


def _call_size(rows: int, columns: int, elements: int) -> tuple[int, int]:
    """Rows and columns per call: whole rows while a fair number of them fits, else about a square."""
    if rows * columns <= elements:
        return rows, columns
    height = min(rows, max(elements // columns, math.isqrt(elements)))
    return height, max(1, elements // height)


class Rows:
    """Running output and softmax statistics of the local query rows, merged over the keys seen so far (online softmax)."""

    def __init__(self, q: Tensor, width: int) -> None:
        dtype = accumulation_dtype(q.dtype)
        self._sum = torch.zeros(*q.shape[:3], width, dtype=dtype, device=q.device)
        self.maximum = torch.full(q.shape[:3], -float("inf"), dtype=dtype, device=q.device)
        self.total = torch.zeros(q.shape[:3], dtype=dtype, device=q.device)

    def merge(self, rows: slice, part: Result) -> None:
        maximum = torch.maximum(self.maximum[:, :, rows], part.maximum)
        old = torch.exp(self.maximum[:, :, rows] - finite(maximum))
        new = torch.exp(part.maximum - finite(maximum)) * part.total
        self._sum[:, :, rows] = self._sum[:, :, rows] * old[..., None] + part.out * new[..., None]
        self.total[:, :, rows] = self.total[:, :, rows] * old + new
        self.maximum[:, :, rows] = maximum

    def add(self, q: Tensor, keys: KeyBlock, block: Block, scoring: Scoring) -> None:
        """Attend to the keys of one rank."""
        for tile in _rectangles(block, scoring, q, keys):
            rows, columns = slice(*tile.queries), slice(*tile.keys)
            terms = scoring.terms(tile, (q.shape[0], q.shape[1]), keys)
            operands = q[:, :, rows], keys.k[:, :, columns], keys.v[:, :, columns]
            self.merge(rows, choose_kernel(*operands, terms).forward(*operands, terms))

    def merge_over(self, group: dist.ProcessGroup) -> None:
        """Merge the ranks' rows, each of which has seen other keys. Communication: two all-reduces."""
        maximum = all_reduce(self.maximum, group, "max")
        share = torch.exp(self.maximum - finite(maximum))
        both = all_reduce(torch.cat((self._sum, self.total[..., None]), -1) * share[..., None], group)
        self._sum, self.total, self.maximum = both[..., :-1], both[..., -1], maximum

    def result(self, dtype: torch.dtype) -> Result:
        """The output in `dtype`; rows that see no key are 0. Heads of a row lie together in memory, as the next layer reads them."""
        whole = self._sum / self.total.masked_fill(self.total == 0, 1.0)[..., None]
        out = torch.empty_like(whole.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format).copy_(whole.transpose(1, 2))
        return Result(out=out.transpose(1, 2), maximum=self.maximum, total=self.total)


@dataclass(frozen=True, kw_only=True)
class BlockGradients:
    """Where the gradients of one block are added, all in the accumulation dtype. mask: of the shape of the scoring's mask, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None


def add_gradients(into: BlockGradients, grad: Tensor, q: Tensor, keys: KeyBlock, block: Block, scoring: Scoring, merged: Result) -> None:
    """Recompute the block and add its share of the gradients; merged: output and statistics of the rows over all keys."""
    for tile in _rectangles(block, scoring, q, keys):
        rows, columns = slice(*tile.queries), slice(*tile.keys)
        terms = scoring.terms(tile, (q.shape[0], q.shape[1]), keys)
        operands = q[:, :, rows], keys.k[:, :, columns], keys.v[:, :, columns]
        part = Result(out=merged.out[:, :, rows], maximum=merged.maximum[:, :, rows], total=merged.total[:, :, rows])
        grads = choose_kernel(*operands, terms).backward(grad[:, :, rows], *operands, part, terms)
        into.q[:, :, rows] += grads.q
        into.k[:, :, columns] += grads.k
        into.v[:, :, columns] += grads.v
        if into.mask is not None and grads.bias is not None:
            target = into.mask if into.mask.shape[2] == 1 else into.mask[:, :, rows]
            target.index_add_(3, keys.positions[columns], grads.bias.sum_to_size(*target.shape[:3], grads.bias.shape[3]))

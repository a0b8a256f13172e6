"""Neighbourhood attention: each position attends to the window of positions around it (Hassani et al., "Neighborhood Attention
Transformer", 2023; dilated: Hassani and Shi, 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.functional.overrides import overridable

TILE = 1024  # queries of one dense call, at least


@dataclass(frozen=True, kw_only=True)
class Window:
    """What the positions of one dim attend to: `kernel` positions, `dilation` apart, that lie inside the `size` positions there are.

    The window of a position has it in the middle (even kernels: one position more before than after) and is moved inwards at the
    borders; a causal window ends at the position and is shorter where it would begin before the first.
    """

    size: int
    kernel: int
    dilation: int
    causal: bool

    def bounds(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """First and last position that each of the positions `start : stop` attends to."""
        position = torch.arange(start, stop)
        place, lane = position // self.dilation, position % self.dilation
        if self.causal:
            return (place - self.kernel + 1).clamp(min=0) * self.dilation + lane, position
        lane_size = (self.size - lane + self.dilation - 1) // self.dilation
        first = torch.minimum(place - self.kernel // 2, lane_size - self.kernel).clamp(min=0)
        return first * self.dilation + lane, (first + self.kernel - 1) * self.dilation + lane

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """From the first to the last position that any of the positions `start : stop` attends to, as a span."""
        if stop <= start:
            return 0, 0
        first, last = self.bounds(start, stop)
        return int(first.min()), int(last.max()) + 1


@overridable
def neighborhood_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int | Sequence[int],
    *,
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of each position over its `kernel_size` nearest positions in 1, 2 or 3 dims; equal to natten's `na1d`, `na2d`, `na3d`.

    query, key: [batch, X, heads, D], [batch, X, Y, heads, D] or [batch, X, Y, Z, heads, D]; value: the same but for its last dim.
    Returns [batch, X, ..., heads, value's D]. kernel_size, dilation, is_causal: one value, or one for each of X, Y, Z; a window has
    `kernel_size` positions, odd or even, `dilation` apart, all inside the tensor (see `Window`). scale: by default 1 / sqrt(D).

    Memory: keys and values are not copied for each window; scores exist for a tile of queries at a time, which autograd keeps.
    Errors: ValueError for shapes that differ, and for windows larger than the tensor.
    """
    windows = make_windows(tuple(query.shape), tuple(key.shape), tuple(value.shape), kernel_size, dilation, is_causal)
    sides = [(*window.bounds(0, window.size), window.dilation) for window in windows]
    return attend(query, key, value, sides, scale)


def make_windows(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int],
    is_causal: bool | Sequence[bool],
) -> tuple[Window, ...]:
    """The window of each spatial dim of tensors of these shapes."""
    if len(query) not in (4, 5, 6) or query != key or query[:-1] != value[:-1]:
        raise ValueError(
            f"neighborhood_attention of query {tuple(query)}, key {tuple(key)}, value {tuple(value)}: give all three the shape "
            "[batch, X, heads, D], with one to three spatial dims; only value's last dim may differ"
        )
    sizes = query[1:-2]
    each = [tuple(v) if isinstance(v, Sequence) else (v,) * len(sizes) for v in (kernel_size, dilation, is_causal)]
    if any(len(values) != len(sizes) for values in each):
        raise ValueError(
            f"kernel_size={kernel_size}, dilation={dilation}, is_causal={is_causal} for {len(sizes)} spatial dims: give one value, or "
            "one for each dim"
        )
    windows = tuple(Window(size=n, kernel=k, dilation=d, causal=bool(c)) for n, k, d, c in zip(sizes, *each, strict=True))
    for window in windows:
        if window.kernel < 1 or window.dilation < 1 or window.kernel * window.dilation > window.size:
            raise ValueError(
                f"a window of {window.kernel} positions, {window.dilation} apart, does not fit {window.size} positions: give a "
                f"kernel_size of at least 1 with kernel_size * dilation of at most {window.size}"
            )
    return windows


def attend(query: Tensor, key: Tensor, value: Tensor, sides: Sequence[tuple[Tensor, Tensor, int]], scale: float | None) -> Tensor:
    """Neighbourhood attention where each spatial dim has a side `(first, last, dilation)`: the rows of `key` and `value` that each row
    of `query` attends to."""
    return _attend(query, key, value, sides, [], scale)


def _attend(query: Tensor, key: Tensor, value: Tensor, sides, masks: list[Tensor], scale: float | None) -> Tensor:
    if len(masks) == len(sides):
        return _tile(query, key, value, masks, scale)
    dim = 1 + len(masks)
    first, last, dilation = sides[len(masks)]
    reach = int((last - first).max()) if first.numel() else 0
    step = max(reach, math.ceil(TILE ** (1 / len(sides))))
    parts = []
    for start in range(0, query.shape[dim], step):
        rows = slice(start, start + step)
        low, high = int(first[rows].min()), int(last[rows].max()) + 1
        places = torch.arange(low, high)
        begin = first[rows, None]
        mask = (places >= begin) & (places <= last[rows, None]) & ((places - begin) % dilation == 0)
        cut = (x.narrow(dim, low, high - low) for x in (key, value))
        parts.append(_attend(query.narrow(dim, start, len(begin)), *cut, sides, [*masks, mask], scale))
    return torch.cat(parts, dim)


def _tile(query: Tensor, key: Tensor, value: Tensor, masks: list[Tensor], scale: float | None) -> Tensor:
    """Dense attention, masked: row and column of the mask run over the spatial dims in order."""
    mask = masks[0]
    for other in masks[1:]:
        mask = (mask[:, None, :, None] & other[None, :, None, :]).flatten(2).flatten(0, 1)
    rows = [x.flatten(1, -3).transpose(1, 2) for x in (query, key, value)]
    out = F.scaled_dot_product_attention(*rows, attn_mask=mask.to(query.device), scale=scale)
    return out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])

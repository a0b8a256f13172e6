"""What the attention functions accept, checked before any communication from what every rank knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.errors import InputError
from shardwise.spec.sequence import rows_in
from shardwise.spec.spans import Span, Spans, as_spans

Order = Sequence[Span | Spans]


def checked_order(name: str, order: Order | None, ranks: int, whole: int) -> tuple[Spans, ...]:
    """Spans per rank, each a tuple of spans; without an order one rank holds all `whole` rows."""
    if order is None:
        return (((0, whole),),)
    spans = tuple(as_spans(tuple(entry)) for entry in order)
    if len(spans) != ranks:
        raise InputError(
            given=f"{name} with {len(spans)} entries for a group of {ranks} ranks",
            why="every rank's rows must be known to all ranks",
            try_=f"one span, or a tuple of spans, for each of the {ranks} ranks; (0, 0) for a rank without rows",
        )
    at = 0
    for start, stop in sorted(span for entry in spans for span in entry if span[1] > span[0]):
        if start != at:
            raise InputError(
                given=f"{name} = {spans}",
                why=f"position {min(start, at)} is held {'twice' if start < at else 'by no rank'}",
                try_="spans that hold every position from 0 to the sequence length exactly once",
            )
        at = stop
    return spans


def check_tensors(q: Tensor, k: Tensor, v: Tensor, q_spans: Spans, kv_spans: Spans, enable_gqa: bool) -> None:
    """Shapes of queries, keys and values against each other and against the rows of this rank."""
    problems = []
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise InputError(
            given=f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            why="attention takes 4-D tensors",
            try_="[batch, heads, rows, width]; unsqueeze missing dims",
        )
    if k.shape[:3] != v.shape[:3]:
        problems.append("k and v differ in batch, heads or rows")
    if q.shape[3] != k.shape[3]:
        problems.append(f"q is {q.shape[3]} wide and k {k.shape[3]}")
    if q.shape[0] != k.shape[0]:
        problems.append(f"q has batch {q.shape[0]} and k {k.shape[0]}")
    if q.shape[1] % max(k.shape[1], 1) or (q.shape[1] and not k.shape[1]):
        problems.append(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads")
    elif q.shape[1] != k.shape[1] and not enable_gqa:
        problems.append(f"{q.shape[1]} query heads meet {k.shape[1]} key heads and enable_gqa is False")
    if q.shape[2] != rows_in(q_spans):
        problems.append(f"q has {q.shape[2]} rows and its spans {q_spans} hold {rows_in(q_spans)}")
    if k.shape[2] != rows_in(kv_spans):
        problems.append(f"k has {k.shape[2]} rows and its spans {kv_spans} hold {rows_in(kv_spans)}")
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        problems.append(f"q, k and v must have one floating dtype, not {q.dtype}, {k.dtype}, {v.dtype}")
    if problems:
        raise InputError(
            given=f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            why="; ".join(problems),
            try_="q [B, Hq, R, D], k [B, Hkv, C, D], v [B, Hkv, C, Dv] with the local rows of each rank",
        )


def checked_mask(mask: Tensor | None, q: Tensor, keys: int) -> Tensor | None:
    """The mask as [1 or B, 1 or Hq, 1 or R, all keys]."""
    if mask is None:
        return None
    full = (*q.shape[:3], keys)
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(shape) != 4 or any(have not in (1, want) for have, want in zip(shape, full)):
        raise InputError(
            given=f"mask {tuple(mask.shape)}",
            why=f"it does not broadcast to {full}: local batch, query heads and query rows, and all keys in global order",
            try_="slice the mask's rows like the queries and leave its columns whole",
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(given=f"mask of {mask.dtype}", why="a mask is boolean or is added to the scores", try_="mask.bool()")
    return mask.reshape(shape).expand(*shape[:3], keys)


def check_segments(q_segments: Tensor | None, kv_segments: Tensor | None, q: Tensor, k: Tensor) -> None:
    if q_segments is None and kv_segments is None:
        return
    wanted = ((q.shape[0], q.shape[2]), (k.shape[0], k.shape[2]))
    given = tuple(None if ids is None else tuple(ids.shape) for ids in (q_segments, kv_segments))
    if given != wanted:
        raise InputError(
            given=f"q_segments {given[0]}, kv_segments {given[1]}",
            why="segment ids come for queries and keys, one per local row",
            try_=f"shapes {wanted[0]} and {wanted[1]}",
        )


def check_dropout(p: float, seed: int | Tensor | None) -> None:
    if not 0.0 <= p <= 1.0:
        raise InputError(given=f"dropout_p={p}", why="a probability lies in 0..1", try_="dropout_p=0.1")
    if p > 0.0 and seed is None:
        raise InputError(
            given=f"dropout_p={p} without dropout_seed",
            why="ranks must agree on which weights are dropped",
            try_="dropout_seed: the same number on every rank, another one for every step and layer",
        )

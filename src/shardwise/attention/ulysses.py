"""Ulysses attention: trade a split of the sequence for a split of the heads and back; alone, or with a ring around it.

Jacobs et al., "DeepSpeed Ulysses", 2023. Between the two exchanges a rank holds some heads of all rows of its Ulysses group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.attention.block import Bias, as_4d
from shardwise.attention.inputs import Order, check_segments, check_tensors, checked_mask, checked_order
from shardwise.attention.order import gather_rows, position_order, reordered
from shardwise.attention.ring import ring_attention
from shardwise.collectives.functional import all_reduce, all_to_all
from shardwise.errors import InputError
from shardwise.spec.sequence import even_sizes, rows_in
from shardwise.spec.spans import Span, Spans, spans_of


class Options(TypedDict, total=False):
    """The options of `ring_attention` that mean the same here."""

    causal: bool
    scale: float | None
    window: tuple[int | None, int | None] | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    enable_gqa: bool


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_spans: Order,
    kv_spans: Order | None,
    group: dist.ProcessGroup,
    mask: Tensor | None = None,
    bias: Bias | None = None,
    q_segments: Tensor | None = None,
    kv_segments: Tensor | None = None,
    dropout_offset: tuple[int, int] = (0, 0),
    **options: Unpack[Options],
) -> Tensor:
    """Scaled dot-product attention over a sequence that is split over the group, by exchanging rows for heads.

    Arguments and result as in `ring_attention`; the queries are split. Heads are dealt out in runs whose lengths differ by at most one,
    also when there are fewer heads than ranks (some ranks then attend to nothing). Key heads go where a query head needs them, to
    several ranks where those share one.

    Communication: one all-to-all each of q, k, v and the output, of which (n - 1)/n of the local rows leave the rank, and the same in
    the backward. A mask with rows is gathered, or exchanged like q if it has heads; segment ids are gathered.
    """
    return ring_ulysses_attention(
        q,
        k,
        v,
        q_spans=(q_spans,),
        kv_spans=None if kv_spans is None else (kv_spans,),
        ring_group=None,
        ulysses_group=group,
        mask=mask,
        bias=bias,
        q_segments=q_segments,
        kv_segments=kv_segments,
        dropout_offset=dropout_offset,
        **options,
    )


def ring_ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_spans: Sequence[Order],
    kv_spans: Sequence[Order] | None,
    ring_group: dist.ProcessGroup | None,
    ulysses_group: dist.ProcessGroup,
    mask: Tensor | None = None,
    bias: Bias | None = None,
    q_segments: Tensor | None = None,
    kv_segments: Tensor | None = None,
    dropout_offset: tuple[int, int] = (0, 0),
    **options: Unpack[Options],
) -> Tensor:
    """A ring over `ring_group` whose members are Ulysses groups: the sequence is split over both axes of a 2-D mesh.

    `q_spans[i][j]`, `kv_spans[i][j]`: the positions held by the rank at place i of its ring group and j of its Ulysses group. All else as
    in `ulysses_attention` and `ring_attention`.
    """
    ring, place = (1, 0) if ring_group is None else (ring_group.size(), ring_group.rank())
    ranks, me = ulysses_group.size(), ulysses_group.rank()
    queries = _grid("q_spans", q_spans, ring, ranks, q.shape[2])
    keys = None if kv_spans is None else _grid("kv_spans", kv_spans, ring, ranks, k.shape[2])
    check_tensors(q, k, v, queries[place][me], ((0, k.shape[2]),) if keys is None else keys[place][me], options.get("enable_gqa", True))
    key_rows = k.shape[2] if keys is None else sum(rows_in(spans) for row in keys for spans in row)
    mask = checked_mask(mask, q, key_rows)
    check_segments(q_segments, kv_segments, q, k)

    heads = _Heads(q.shape[1], k.shape[1], ranks)
    q_rows = _Rows(queries[place], ulysses_group)
    mask = None if mask is None else _mask_here(mask, q_rows, heads)
    q = q_rows.collect(q, heads.query_sizes)
    if keys is None:
        k, v = (x[:, slice(*heads.key_spans[me])] for x in (k, v))
    else:
        kv_rows = _Rows(keys[place], ulysses_group)
        needed = torch.tensor([head for span in heads.key_spans for head in range(*span)], device=k.device)
        k, v = (kv_rows.collect(x.index_select(1, needed), heads.key_sizes) for x in (k, v))
        kv_segments = None if kv_segments is None else kv_rows.gather(kv_segments, 1)
    local = heads.key_of_query(me)
    if local is not None:
        k, v = (x.index_select(1, torch.tensor(local, device=x.device)) for x in (k, v))

    first = heads.query_spans[me][0]
    out = ring_attention(
        q,
        k,
        v,
        q_spans=[_ordered(row) for row in queries],
        kv_spans=None if keys is None else [_ordered(row) for row in keys],
        group=ring_group,
        mask=mask,
        bias=None if bias is None else _bias_of(bias, heads.query_spans[me]),
        q_segments=None if q_segments is None else q_rows.gather(q_segments, 1),
        kv_segments=kv_segments,
        dropout_offset=(dropout_offset[0], dropout_offset[1] + first),
        **options,
    )
    return q_rows.hand_back(out, heads.query_sizes)


def _grid(name: str, spans: Sequence[Order], ring: int, ranks: int, whole: int) -> tuple[tuple[Spans, ...], ...]:
    """The spans of every rank by place in the ring and in the Ulysses group."""
    if len(spans) != ring or any(len(row) != ranks for row in spans):
        raise InputError(
            given=f"{name} with {[len(row) for row in spans]} entries per ring place",
            why=f"the ring group has {ring} ranks and the Ulysses group {ranks}",
            try_=f"{name}[i][j] for i in range({ring}) and j in range({ranks})",
        )
    flat = checked_order(name, [entry for row in spans for entry in row], ring * ranks, whole)
    return tuple(flat[ranks * i : ranks * (i + 1)] for i in range(ring))


def _ordered(row: tuple[Spans, ...]) -> Spans:
    """All positions of a Ulysses group, ascending."""
    return tuple(sorted(span for spans in row for span in spans if span[1] > span[0]))


class _Heads:
    """Which query heads each rank of the Ulysses group attends with, and which key heads it needs for them."""

    def __init__(self, query_heads: int, key_heads: int, ranks: int) -> None:
        self.query_sizes = even_sizes(query_heads, ranks)
        self.query_spans = spans_of(self.query_sizes)
        self._per_key = query_heads // key_heads
        self.key_spans: Spans = tuple(self._needed(span) for span in self.query_spans)
        self.key_sizes = tuple(stop - start for start, stop in self.key_spans)

    def _needed(self, span: Span) -> Span:
        if span[0] == span[1]:
            return 0, 0
        return span[0] // self._per_key, (span[1] - 1) // self._per_key + 1

    def key_of_query(self, rank: int) -> list[int] | None:
        """The local key head of each local query head; None where equal runs of query heads share a key head, as attention assumes."""
        queries, keys = self.query_spans[rank], self.key_spans[rank]
        local = [head // self._per_key - keys[0] for head in range(*queries)]
        count = keys[1] - keys[0]
        if not local or (len(local) % count == 0 and local == [i * count // len(local) for i in range(len(local))]):
            return None
        return local


class _Rows:
    """The rows of one Ulysses group: who holds which, and the exchange of rows for heads."""

    def __init__(self, spans: tuple[Spans, ...], group: dist.ProcessGroup) -> None:
        self.group = group
        self.sizes = tuple(rows_in(entry) for entry in spans)
        self._spans = spans
        self._by_position, self._as_held = position_order(spans)

    def collect(self, x: Tensor, head_sizes: Sequence[int]) -> Tensor:
        """[B, all heads, local rows, X] to [B, own heads, all rows by position, X]."""
        return reordered(all_to_all(x, head_sizes, self.sizes, 1, self.group, 2), self._by_position, 2)

    def hand_back(self, x: Tensor, head_sizes: Sequence[int]) -> Tensor:
        """[B, own heads, all rows by position, X] to [B, all heads, local rows, X]."""
        return all_to_all(reordered(x, self._as_held, 2), self.sizes, head_sizes, 2, self.group, 1)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All rows by position, of a tensor without heads to exchange."""
        return gather_rows(x, self._spans, dim, self.group)


def _mask_here(mask: Tensor, rows: _Rows, heads: _Heads) -> Tensor:
    """The mask for the own heads and all rows of the group."""
    own = slice(*heads.query_spans[rows.group.rank()])
    if not _has_rows(mask, rows):
        return mask if mask.shape[1] == 1 else mask[:, own]
    if mask.shape[1] == 1:
        return rows.gather(mask, 2)
    return rows.collect(mask, heads.query_sizes)


def _has_rows(mask: Tensor, rows: _Rows) -> bool:
    """Whether the mask's rows are those of the queries. A rank with one row or none cannot tell; it asks the others."""
    if min(rows.sizes) > 1:
        return mask.shape[2] > 1
    if max(rows.sizes) <= 1:
        return True
    several = torch.tensor(int(mask.shape[2] > 1), device=mask.device)
    return bool(all_reduce(several, rows.group, "max"))


def _bias_of(bias: Bias, heads: Span) -> Bias:
    def own(queries: Tensor, keys: Tensor) -> Tensor:
        full = as_4d(bias(queries, keys))
        return full if full.shape[1] == 1 else full[:, slice(*heads)]

    return own

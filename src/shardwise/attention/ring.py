"""Ring attention: queries, keys and values split over ranks by position, evenly or not, in any order.

At ring step s, rank r works on the keys of rank r - s; the next keys travel meanwhile. Blocks are merged by their softmax statistics
(Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023). The backward recomputes each block with the merged
output and statistics and sends the key gradients back to their owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.attention.block import Bias, BlockGradients, KeyBlock, Rows, Scoring, add_gradients
from shardwise.attention.dropout import Dropout
from shardwise.attention.inputs import Order, check_dropout, check_segments, check_tensors, checked_mask, checked_order
from shardwise.attention.kernels import Result, accumulation_dtype
from shardwise.attention.transport import Shift
from shardwise.errors import MissingShardPatch
from shardwise.spec.sequence import Band, RingStep, ring_steps, rows_in
from shardwise.spec.spans import Span, Spans


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_spans: Order | None,
    kv_spans: Order | None,
    group: dist.ProcessGroup | None,
    causal: bool = False,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Bias | None = None,
    window: tuple[int | None, int | None] | None = None,
    q_segments: Tensor | None = None,
    kv_segments: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    dropout_offset: tuple[int, int] = (0, 0),
    enable_gqa: bool = True,
) -> Tensor:
    """Scaled dot-product attention of local queries over the keys of all ranks; equal to attention over the whole sequence.

    q: [B, Hq, R, D], the local rows of the queries. k: [B, Hkv, C, D] and v: [B, Hkv, C, Dv], the local rows of keys and values; Hq is a
    multiple of Hkv, and equal to it without enable_gqa. Returns [B, Hq, R, Dv] in q's dtype; float16 and bfloat16 are accumulated in
    float32. Rows that see no key are 0.

    q_spans, kv_spans: for every rank of the group the span, or tuple of spans, of global positions its rows hold, in row order; uneven
    and empty is allowed, and queries and keys may be split differently. None: that side is whole on every rank. Gradients of a whole
    side are this rank's share: the caller sums them over the group (and then gives every rank the full gradient of a whole output).
    group None is one rank.

    causal: query i sees key j <= i (global positions, both counted from 0). window: (left, right), query i sees `i - left <= j <= i +
    right`, None is no bound. mask: boolean (True attends) or additive, broadcastable to [B, Hq, R, all keys], its rows split like q,
    its columns whole and in global order; an additive mask gets its gradient, which is this rank's share where the mask has one row or
    the queries are whole. bias: `bias(query_positions, key_positions)` is added to the scores, broadcastable to [B, Hq, rows, columns]
    (see `alibi`); it gets no gradient. q_segments, kv_segments: [B, R] and [B, C] ids; attention stays inside equal ids (packed
    documents, padding).

    dropout_p needs dropout_seed; which weights are dropped depends on the seed and the global indices only, `dropout_offset` being the
    global index of the first local batch row and query head, so any split drops the same ones.

    Communication, with both sides split over n ranks: at most (n - 1)/n of the global K and V to each rank, less what causality or the
    window hides from it; in the backward the same again and as much for their gradients. Whole keys: none. Whole queries: two
    all-reduces of the output in the forward. Memory is linear in the local rows.

    Errors: InputError for arguments that do not fit together; double backward is refused.
    """
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    queries = checked_order("q_spans", q_spans, ranks, q.shape[2])
    keys = checked_order("kv_spans", kv_spans, ranks, k.shape[2])
    q_here, kv_here = queries[rank if len(queries) > 1 else 0], keys[rank if len(keys) > 1 else 0]
    check_tensors(q, k, v, q_here, kv_here, enable_gqa)
    mask = checked_mask(mask, q, sum(map(rows_in, keys)))
    check_segments(q_segments, kv_segments, q, k)
    check_dropout(dropout_p, dropout_seed)
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    band = Band.of(causal=causal, window=window)
    if len(queries) == len(keys):
        steps = _steps(queries, keys, (band.left, band.right), rank)
    else:
        steps = _steps((q_here,), (kv_here,), (band.left, band.right), 0)
    dropout = None
    if dropout_p > 0.0 and dropout_seed is not None:
        dropout = Dropout(p=dropout_p, seed=dropout_seed, batch=dropout_offset[0], head=dropout_offset[1])
    plan = _Plan(
        steps=steps,
        queries=q_here,
        band=band,
        scale=1.0 / math.sqrt(q.shape[3]) if scale is None else scale,
        bias=bias,
        dropout=dropout,
        group=group,
        merge=len(queries) < len(keys),
    )
    return _RingAttention.apply(q, k, v, mask, q_segments, kv_segments, plan)


@torch.compiler.assume_constant_result
def _steps(queries: tuple[Spans, ...], keys: tuple[Spans, ...], band: tuple[int | None, int | None], rank: int) -> tuple[RingStep, ...]:
    return ring_steps(queries, keys, Band(left=band[0], right=band[1]), rank)


def alibi(slopes: Tensor) -> Bias:
    """The bias `-slope * |i - j|` of Press et al., "Train Short, Test Long" (2022); slopes: one per local query head."""

    def bias(queries: Tensor, keys: Tensor) -> Tensor:
        return -slopes.view(-1, 1, 1) * (queries[:, None] - keys).abs()

    return bias


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Everything but tensors. merge: queries are whole, each rank attends to its own keys, and the results are merged over the group."""

    steps: tuple[RingStep, ...]
    queries: Spans
    band: Band
    scale: float
    bias: Bias | None
    dropout: Dropout | None
    group: dist.ProcessGroup | None
    merge: bool

    def scoring(self, q: Tensor, mask: Tensor | None, segments: Tensor | None) -> Scoring:
        return Scoring(
            scale=self.scale,
            band=self.band,
            positions=_positions(self.queries, q.device),
            mask=mask,
            bias=self.bias,
            segments=segments,
            dropout=self.dropout,
        )


def _positions(spans: Spans, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in (*spans, (0, 0))])


class _Ring:
    """The key blocks of a plan, one after the other; the next one travels while this one is used."""

    def __init__(self, plan: _Plan, k: Tensor, v: Tensor, segments: Tensor | None) -> None:
        self._plan, self._k, self._v, self._segments = plan, k, v, segments

    def __iter__(self) -> Iterator[tuple[RingStep, KeyBlock]]:
        steps = self._plan.steps
        coming = self._start(steps[0])
        for step, following in zip(steps, (*steps[1:], None), strict=True):
            here = coming()
            if following is not None:
                coming = self._start(following)
            yield step, here

    def _start(self, step: RingStep) -> Callable[[], KeyBlock]:
        """Start what a step needs; the result waits for it."""
        positions = _positions(step.keys, self._k.device)
        rows, send = slice(*step.rows), slice(*step.send)
        if step.offset == 0:
            segments = None if self._segments is None else self._segments[:, rows]
            return lambda: KeyBlock(k=self._k[:, :, rows], v=self._v[:, :, rows], positions=positions, segments=segments)
        pair = self._k[:, :, send], self._v[:, :, send]
        shift = Shift(pair, [(*x.shape[:2], len(positions), x.shape[3]) for x in pair], step.offset, self._plan.group)
        ids = None
        if self._segments is not None:
            ids = Shift((self._segments[:, send],), [(self._segments.shape[0], len(positions))], step.offset, self._plan.group)

        def arrived() -> KeyBlock:
            k, v = shift.wait()
            return KeyBlock(k=k, v=v, positions=positions, segments=None if ids is None else ids.wait()[0])

        return arrived


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        q_segments: Tensor | None,
        kv_segments: Tensor | None,
        plan: _Plan,
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            scoring = plan.scoring(q, mask, q_segments)
            rows = Rows(q, v.shape[3])
            for step, keys in _Ring(plan, k, v, kv_segments):
                rows.add(q, keys, step.block, scoring)
            if plan.merge:
                rows.merge_over(plan.group)
            result = rows.result(q.dtype)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, mask, q_segments, kv_segments, *result)
        return result.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*_RingAttentionBackward.apply(grad, ctx.plan, ctx.needs_input_grad[3], *ctx.saved_tensors), None, None, None)


class _RingAttentionBackward(torch.autograd.Function):
    """A function of its own so that a second derivative is refused instead of being wrong."""

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        plan: _Plan,
        with_mask: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        q_segments: Tensor | None,
        kv_segments: Tensor | None,
        out: Tensor,
        maximum: Tensor,
        total: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        merged = Result(out=out, maximum=maximum, total=total)
        home = BlockGradients(q=_zeros(q), k=_zeros(k), v=_zeros(v), mask=_zeros(mask) if with_mask else None)
        with torch.autocast(q.device.type, enabled=False):
            scoring = plan.scoring(q, mask, q_segments)
            returning: list[tuple[Span, Shift]] = []
            for step, keys in _Ring(plan, k, v, kv_segments):
                into = replace(home, k=_zeros(keys.k), v=_zeros(keys.v))
                add_gradients(into, grad, q, keys, step.block, scoring, merged)
                if step.offset == 0:
                    _add_rows(home, step.rows, (into.k, into.v))
                    continue
                while returning:
                    rows, shift = returning.pop()
                    _add_rows(home, rows, shift.wait())
                shapes = [(*x.shape[:2], step.send[1] - step.send[0], x.shape[3]) for x in (k, v)]
                shift = Shift((into.k.to(k.dtype), into.v.to(v.dtype)), shapes, -step.offset, plan.group)
                returning.append((step.send, shift))
            for rows, shift in returning:
                _add_rows(home, rows, shift.wait())
        grad_mask = None if home.mask is None else home.mask.to(mask.dtype)
        return home.q.to(q.dtype), home.k.to(k.dtype), home.v.to(v.dtype), grad_mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        raise MissingShardPatch(
            "a second derivative through ring attention",
            "its backward recomputes the blocks without recording them",
            "use attention over the gathered sequence where second derivatives are needed",
        )


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device)


def _add_rows(home: BlockGradients, rows: Span, parts: Sequence[Tensor]) -> None:
    home.k[:, :, slice(*rows)] += parts[0]
    home.v[:, :, slice(*rows)] += parts[1]

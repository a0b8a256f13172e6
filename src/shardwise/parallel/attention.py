"""The attention function that models call through `transformers`' attention interface: local, or over a split sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from shardwise.attention import ring_attention, ring_ulysses_attention, ulysses_attention
from shardwise.collectives.functional import all_gather
from shardwise.parallel.topology import Topology
from shardwise.spec.sequence import order_indices, rows_in, zigzag_order
from shardwise.spec.spans import Spans

NAME = "shardwise"


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """How one micro batch's sequence lies over the context parallel ranks.

    order: global positions of every rank's rows. segments: [B, local rows], ids of documents (attention stays inside equal ids), or None.
    """

    topology: Topology
    order: tuple[Spans, ...]
    segments: Tensor | None = None


def register() -> None:
    AttentionInterface.register(NAME, attention)


def split_order(topology: Topology, length: int) -> tuple[Spans, ...]:
    """Positions of every context parallel rank: balanced for causal attention, any length."""
    return zigzag_order(length, topology.layout.cp)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sequence_split: SequenceSplit | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of [B, heads, local rows, width] over the whole sequence; returns [B, local rows, heads, width]."""
    split = sequence_split
    alone = split is None or (split.topology.layout.cp == 1 and split.segments is None)
    if dropout or attention_mask is not None or not (alone or (softcap is None and s_aux is None)):
        what = "attention dropout, an explicit mask, or soft caps and sinks over a split or packed sequence"
        raise NotImplementedError(f"{what} is not supported: see docs/training.md")
    if softcap is not None or s_aux is not None:
        if s_aux is not None and split is not None and s_aux.numel() != query.shape[1]:
            s_aux = s_aux.chunk(split.topology["tp"].size)[split.topology["tp"].rank]
        return _plain(query, key, value, scaling, sliding_window, softcap, s_aux).transpose(1, 2).contiguous(), None
    gqa = query.shape[1] != key.shape[1]
    if value.untyped_storage().nbytes() > value.numel() * value.element_size():
        value = value.contiguous()  # a view would keep for the backward what it was cut from
    # torch's CPU kernels keep all scores where keys and values have unequal widths
    plain = sliding_window is None and (query.device.type != "cpu" or value.shape[-1] == query.shape[-1])
    if split is None or (split.topology.layout.cp == 1 and split.segments is None and plain):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
        return out.transpose(1, 2).contiguous(), None
    window = None if sliding_window is None else (sliding_window - 1, None)
    options: dict[str, Any] = {"causal": True, "scale": scaling, "window": window, "enable_gqa": True}
    return _over_ranks(query, key, value, split, options).transpose(1, 2).contiguous(), None


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Causal attention with what fused kernels lack: scores capped by `softcap * tanh(score / softcap)`, and one sink per head, a further
    score that takes weight and gives nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
    seen = (distance >= 0) & (distance < (window or k.shape[2]))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.float().softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v


def _over_ranks(q: Tensor, k: Tensor, v: Tensor, split: SequenceSplit, options: dict[str, Any]) -> Tensor:
    layout, cp, order, ids = split.topology.layout, split.topology["cp"], split.order, split.segments
    if cp.group is None:
        return ring_attention(q, k, v, q_spans=order, kv_spans=order, group=None, q_segments=ids, kv_segments=ids, **options)
    if layout.cp_comm == "a2a":
        return ulysses_attention(q, k, v, q_spans=order, kv_spans=order, group=cp.group, q_segments=ids, kv_segments=ids, **options)
    if layout.cp_comm == "a2a+p2p":
        inner, outer = split.topology.cp_levels
        grid = [order[i : i + inner.size] for i in range(0, cp.size, inner.size)]
        assert inner.group is not None
        return ring_ulysses_attention(
            q,
            k,
            v,
            q_spans=grid,
            kv_spans=grid,
            ring_group=outer.group,
            ulysses_group=inner.group,
            q_segments=ids,
            kv_segments=ids,
            **options,
        )
    if layout.cp_comm == "all_gather":
        sizes = [rows_in(spans) for spans in order]
        back = torch.argsort(torch.tensor(order_indices(order), device=k.device))
        k, v = (all_gather(x, 2, sizes, cp.group).index_select(2, back) for x in (k, v))
        keys = None if ids is None else all_gather(ids, 1, sizes, cp.group).index_select(1, back)
        return ring_attention(q, k, v, q_spans=order, kv_spans=None, group=cp.group, q_segments=ids, kv_segments=keys, **options)
    return ring_attention(q, k, v, q_spans=order, kv_spans=order, group=cp.group, q_segments=ids, kv_segments=ids, **options)

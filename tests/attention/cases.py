"""Random attention configurations, and attention over the whole sequence in one process as their oracle."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.attention.block import Bias
from shardwise.attention.dropout import Dropout
from shardwise.attention.ring import alibi
from shardwise.spec.sequence import contiguous_order, even_sizes, order_indices, zigzag_order
from shardwise.spec.spans import Spans

MaskKind = Literal["none", "bool rows", "bool one row", "bool heads", "additive", "additive one row", "lowest"]


@dataclass(frozen=True, kw_only=True)
class Case:
    seed: int
    ranks: int
    q_order: tuple[Spans, ...] | None
    kv_order: tuple[Spans, ...] | None
    batch: int
    kv_heads: int
    group: int
    width: int
    v_width: int
    q_len: int
    kv_len: int
    causal: bool
    window: tuple[int | None, int | None] | None
    scale: float | None
    mask: MaskKind
    bias: Literal["none", "alibi", "callable"]
    segments: bool
    dropout_p: float

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def random_case(seed: int, ranks: int, *, whole: bool = True) -> Case:
    """whole: one side may be unsplit."""
    draw = random.Random(seed * 101 + ranks)
    q_len = draw.randint(ranks, 24)
    kv_len = q_len if draw.random() < 0.7 else draw.randint(1, 24)
    q_order = _order(draw, q_len, ranks)
    kv_order = q_order if kv_len == q_len and draw.random() < 0.7 else _order(draw, kv_len, ranks)
    if whole:
        side = draw.random()
        q_order = None if side < 0.12 else q_order
        kv_order = None if side > 0.88 else kv_order
    width = draw.choice((4, 8, 12, 20))
    reach = (None, 0, 1, 2, 3, 6, 30)
    return Case(
        seed=seed,
        ranks=ranks,
        q_order=q_order,
        kv_order=kv_order,
        batch=draw.choice((1, 1, 2)),
        kv_heads=draw.choice((1, 2, 3)),
        group=draw.choice((1, 1, 2, 3)),
        width=width,
        v_width=width if draw.random() < 0.7 else draw.choice((4, 6, 16, 24)),
        q_len=q_len,
        kv_len=kv_len,
        causal=draw.random() < 0.5,
        window=None if draw.random() < 0.6 else (draw.choice(reach), draw.choice(reach)),
        scale=None if draw.random() < 0.7 else draw.choice((0.3, 1.0)),
        mask=draw.choice(("none", "none", "none", "bool rows", "bool one row", "bool heads", "additive", "additive one row", "lowest")),
        bias=draw.choice(("none", "none", "none", "none", "alibi", "callable")),
        segments=draw.random() < 0.2,
        dropout_p=0.0 if draw.random() < 0.8 else draw.choice((0.2, 0.7)),
    )


def _order(draw: random.Random, length: int, ranks: int) -> tuple[Spans, ...]:
    kind = draw.choice(("even", "uneven", "zigzag", "scattered"))
    if kind == "even":
        return contiguous_order(even_sizes(length, ranks))
    if kind == "zigzag":
        return zigzag_order(length, ranks)
    cuts = sorted(draw.randint(0, length) for _ in range(ranks - 1 if kind == "uneven" else 2 * ranks - 1))
    pieces = list(zip((0, *cuts), (*cuts, length)))
    if kind == "uneven":
        return tuple((piece,) for piece in pieces)
    draw.shuffle(pieces)
    return tuple((pieces[2 * rank], pieces[2 * rank + 1]) for rank in range(ranks))


@dataclass
class Whole:
    """The tensors of a case over the whole sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    mask: Tensor | None
    q_segments: Tensor | None
    kv_segments: Tensor | None

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype = torch.float64) -> Whole:
        generator = torch.Generator().manual_seed(case.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        def ids(length: int) -> Tensor:
            return torch.randint(0, 3, (case.batch, length), generator=generator).sort(1).values

        q = normal(case.batch, case.heads, case.q_len, case.width)
        k = normal(case.batch, case.kv_heads, case.kv_len, case.width)
        v = normal(case.batch, case.kv_heads, case.kv_len, case.v_width)
        grad = normal(case.batch, case.heads, case.q_len, case.v_width)
        return cls(
            q=q,
            k=k,
            v=v,
            grad=grad,
            mask=_mask(case, generator, dtype),
            q_segments=ids(case.q_len) if case.segments else None,
            kv_segments=ids(case.kv_len) if case.segments else None,
        )


def _mask(case: Case, generator: torch.Generator, dtype: torch.dtype) -> Tensor | None:
    shapes = {
        "bool rows": (case.q_len, case.kv_len),
        "bool one row": (case.batch, 1, 1, case.kv_len),
        "bool heads": (1, case.heads, case.q_len, case.kv_len),
        "additive": (case.batch, case.heads, case.q_len, case.kv_len),
        "additive one row": (case.heads, 1, case.kv_len),
        "lowest": (case.batch, 1, case.q_len, case.kv_len),
    }
    if case.mask == "none":
        return None
    shape = shapes[case.mask]
    if case.mask.startswith("additive"):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    hidden = torch.rand(*shape, generator=generator) < 0.3
    if case.mask == "bool rows":
        hidden[:: max(1, case.q_len // 2)] = True
    if case.mask == "lowest":
        hidden[:, :, :2] = True
        return torch.zeros(shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    return ~hidden


def bias_of(case: Case) -> Bias | None:
    if case.bias == "alibi":
        return alibi(torch.linspace(0.1, 0.7, case.heads, dtype=torch.float64))
    if case.bias == "callable":
        return lambda queries, keys: torch.sin(queries[:, None] * 0.3 - keys * 0.7)
    return None


def options_of(case: Case) -> dict[str, Any]:
    return {
        "causal": case.causal,
        "scale": case.scale,
        "window": case.window,
        "bias": bias_of(case),
        "dropout_p": case.dropout_p,
        "dropout_seed": case.seed if case.dropout_p else None,
    }


def unsplit_attention(case: Case, whole: Whole) -> Tensor:
    """Attention as it is defined, over the whole score matrix."""
    q, k, v = whole.q, whole.k.repeat_interleave(case.group, 1), whole.v.repeat_interleave(case.group, 1)
    at_q, at_k = torch.arange(case.q_len), torch.arange(case.kv_len)
    scores = q @ k.transpose(-2, -1) * (case.scale or 1 / math.sqrt(case.width))
    bias = bias_of(case)
    if bias is not None:
        scores = scores + bias(at_q, at_k)
    seen = torch.ones(case.q_len, case.kv_len, dtype=torch.bool)
    left, right = case.window or (None, None)
    if case.causal:
        seen &= at_k <= at_q[:, None]
    if left is not None:
        seen &= at_k >= at_q[:, None] - left
    if right is not None:
        seen &= at_k <= at_q[:, None] + right
    if whole.mask is not None and whole.mask.dtype == torch.bool:
        seen = seen & whole.mask
    elif whole.mask is not None:
        scores = scores + whole.mask
    if whole.q_segments is not None and whole.kv_segments is not None:
        seen = seen & (whole.q_segments[:, None, :, None] == whole.kv_segments[:, None, None, :])
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
    weights = weights.masked_fill(~seen, 0.0)
    if case.dropout_p:
        dropout = Dropout(p=case.dropout_p, seed=case.seed)
        weights = weights * dropout.multipliers((case.batch, case.heads), at_q, at_k, weights.dtype)
    return weights @ v


def rows_of(order: tuple[Spans, ...] | None, rank: int, length: int) -> Tensor:
    """The positions that a rank holds; all of them on a side that is whole."""
    spans = ((0, length),) if order is None else order[rank]
    return torch.tensor(order_indices([spans]), dtype=torch.long)

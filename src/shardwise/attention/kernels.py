"""Attention of a rectangle of queries and keys on one device, behind one interface: output and softmax statistics.

Shapes: q [B, Hq, R, D], k [B, Hkv, C, D], v [B, Hkv, C, Dv]; `Hq` is a multiple of `Hkv`; R and C are at least 1. Statistics are the
row maximum and the row sum of `exp(score - maximum)`, both [B, Hq, R]; kernels that return the log-sum-exp give it as maximum with
sum 1. Two numbers and not one, because a row of scores near the lowest finite number (a padded row under an additive mask) loses its
sum in the log-sum-exp.

The backward of a rectangle takes the output and statistics of the whole rows, merged over all their keys, and gives that rectangle's
exact share of the gradients (Dao et al., "FlashAttention", 2022, algorithm 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_INF = float("inf")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What acts on the scores of one rectangle, each broadcastable to [B, Hq, R, C] or absent.

    scale: multiplies the scores. causal: the rectangle is a square, query i sees key j <= i. allowed: boolean, True attends.
    bias: added to the scores. keep: dropout multipliers of the weights.
    """

    scale: float
    causal: bool = False
    allowed: Tensor | None = None
    bias: Tensor | None = None
    keep: Tensor | None = None


class Result(NamedTuple):
    out: Tensor
    maximum: Tensor
    total: Tensor


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """bias is the gradient of the scores, [B, Hq, R, C], from the math kernel."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """name; `forward(q, k, v, terms)`; `backward(grad, q, k, v, rows, terms)` with the merged `rows` of the whole softmax rows.

    masked: takes `allowed`. Only the math kernel takes `bias` and `keep`.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, Terms], Result]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Result, Terms], Gradients]
    masked: bool = True


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite(maximum: Tensor) -> Tensor:
    """The maximum with 0 in rows that see no key, where it is -inf and every weight is to become 0."""
    return maximum.masked_fill(maximum == -_INF, 0.0)


# --- math: every term, any device, computed in float32 or float64 -----------------------------------------------------


def _group_heads(x: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, R, X] as [B, Hkv, Hq/Hkv * R, X]: the query heads of one key head, one below the other."""
    batch, heads, rows, width = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * rows, width)


def _scores(q: Tensor, k: Tensor, terms: Terms) -> Tensor:
    batch, heads, rows, _ = q.shape
    scores = (_group_heads(q, k.shape[1]) @ k.transpose(-2, -1)).view(batch, heads, rows, k.shape[2]) * terms.scale
    if terms.bias is not None:
        scores = scores + terms.bias
    if terms.causal:
        scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1), -_INF)
    if terms.allowed is not None:
        scores = scores.masked_fill(~terms.allowed, -_INF)
    return scores


def _math_forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Result:
    dtype = accumulation_dtype(q.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scores = _scores(q, k, terms)
    maximum = scores.amax(-1)
    weights = torch.exp(scores - finite(maximum)[..., None])
    total = weights.sum(-1)
    if terms.keep is not None:
        weights = weights * terms.keep
    out = (_group_heads(weights, k.shape[1]) @ v).view(*q.shape[:3], v.shape[3])
    return Result(out=out / total.masked_fill(total == 0, 1.0)[..., None], maximum=maximum, total=total)


def _math_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Result, terms: Terms) -> Gradients:
    dtype = accumulation_dtype(q.dtype)
    q, k, v, grad = q.to(dtype), k.to(dtype), v.to(dtype), grad.to(dtype)
    kv_heads = k.shape[1]
    total = rows.total.masked_fill(rows.total == 0, 1.0)
    weights = torch.exp(_scores(q, k, terms) - finite(rows.maximum)[..., None]) / total[..., None]
    grouped = _group_heads(grad, kv_heads)
    grad_weights = (grouped @ v.transpose(-2, -1)).view_as(weights)
    kept = weights
    if terms.keep is not None:
        kept, grad_weights = weights * terms.keep, grad_weights * terms.keep
    grad_scores = weights * (grad_weights - (grad * rows.out.to(dtype)).sum(-1, keepdim=True))
    below = _group_heads(grad_scores, kv_heads)
    return Gradients(
        q=(below @ k).view_as(q) * terms.scale,
        k=below.transpose(-2, -1) @ _group_heads(q, kv_heads) * terms.scale,
        v=_group_heads(kept, kv_heads).transpose(-2, -1) @ grouped,
        bias=grad_scores,
    )


MATH = Kernel(name="math", forward=_math_forward, backward=_math_backward)


# --- the fused kernels of torch ---------------------------------------------------------------------------------------


def additive_mask(terms: Terms, q: Tensor, k: Tensor) -> Tensor | None:
    """`allowed` as an additive mask of the query dtype, [1 or B, 1 or Hq, R, C]."""
    if terms.allowed is None:
        return None
    mask = torch.zeros(terms.allowed.shape, dtype=q.dtype, device=q.device).masked_fill(~terms.allowed, -_INF)
    return mask.expand(*mask.shape[:2], q.shape[2], k.shape[2])


def pad_width(x: Tensor, width: int) -> Tensor:
    """`x` with features appended to `width`, its features next to each other in memory, as every kernel reads them."""
    if x.shape[-1] != width:
        x = F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def log_sum_of(rows: Result) -> Tensor:
    """Log-sum-exp of merged rows; 0 in rows without a key, whose scores are all -inf."""
    return finite(rows.maximum) + torch.log(rows.total.masked_fill(rows.total == 0, 1.0))


def from_log_sum(out: Tensor, log_sum: Tensor, mask: Tensor | None) -> Result:
    """The kernels report 0 as the log-sum-exp of a row without a key: it is -inf."""
    if mask is not None:
        log_sum = log_sum.masked_fill((mask == -_INF).all(-1), -_INF)
    return Result(out=out, maximum=log_sum, total=(log_sum != -_INF).to(log_sum.dtype))


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Result:
    width = max(q.shape[-1], v.shape[-1])
    mask = additive_mask(terms, q, k)
    out, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(
        pad_width(q, width), pad_width(k, width), pad_width(v, width), 0.0, terms.causal, attn_mask=mask, scale=terms.scale
    )
    return from_log_sum(out[..., : v.shape[-1]], log_sum, mask)


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Result, terms: Terms) -> Gradients:
    width = max(q.shape[-1], v.shape[-1])
    grad_q, grad_k, grad_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        pad_width(grad, width),
        pad_width(q, width),
        pad_width(k, width),
        pad_width(v, width),
        pad_width(rows.out, width),
        log_sum_of(rows),
        0.0,
        terms.causal,
        attn_mask=additive_mask(terms, q, k),
        scale=terms.scale,
    )
    return Gradients(q=grad_q[..., : q.shape[-1]], k=grad_k[..., : k.shape[-1]], v=grad_v[..., : v.shape[-1]])


CPU_FLASH = Kernel(name="flash", forward=_cpu_forward, backward=_cpu_backward)


@torch.compiler.assume_constant_result
def _flash_allowed() -> bool:
    return torch.backends.cuda.flash_sdp_enabled()


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Kernel:
    """The fastest kernel that is exact for this rectangle; `torch.nn.attention.sdpa_kernel` narrows the choice."""
    if terms.bias is not None or terms.keep is not None:
        return MATH
    if q.device.type == "cpu":
        return CPU_FLASH if _flash_allowed() else MATH
    if q.device.type == "cuda":
        from shardwise.attention.cuda_kernels import choose_cuda_kernel

        return choose_cuda_kernel(q, k, v, terms) or MATH
    return MATH

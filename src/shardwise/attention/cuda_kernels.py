"""The CUDA kernels of torch behind the kernel interface: flash, cudnn, efficient.

Not verified on hardware: written from the operator schemas of torch 2.13 and the checks in `torch.backends.cuda`. Key and value heads
are repeated for grouped queries, and causal rectangles are always squares, so alignment of unequal lengths never matters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.attention.kernels import Gradients, Kernel, Result, Terms, additive_mask, from_log_sum, log_sum_of, pad_width

_aten = torch.ops.aten


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


def _prepared(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads repeated, widths equal and a multiple of 8."""
    width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    heads = q.shape[1]
    return pad_width(q, width), pad_width(_repeat_heads(k, heads), width), pad_width(_repeat_heads(v, heads), width)


def _unprepared(grads: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    grad_q, grad_k, grad_v = grads
    return Gradients(
        q=grad_q[..., : q.shape[-1]],
        k=_sum_heads(grad_k, k.shape[1])[..., : k.shape[-1]],
        v=_sum_heads(grad_v, v.shape[1])[..., : v.shape[-1]],
    )


def _no_random(q: Tensor) -> Tensor:
    """A generator state for kernels that ask for one; without dropout nothing reads it."""
    return torch.zeros((), dtype=torch.int64, device=q.device)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Result:
    out, log_sum, *_ = _aten._scaled_dot_product_flash_attention(*_prepared(q, k, v), 0.0, terms.causal, False, scale=terms.scale)
    return from_log_sum(out[..., : v.shape[-1]], log_sum[..., : q.shape[2]], None)


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Result, terms: Terms) -> Gradients:
    query, key, value = _prepared(q, k, v)
    width = query.shape[-1]
    grads = _aten._scaled_dot_product_flash_attention_backward(
        pad_width(grad, width),
        query,
        key,
        value,
        pad_width(rows.out, width),
        log_sum_of(rows).contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        terms.causal,
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        torch.empty(0, dtype=torch.uint64, device=q.device),
        scale=terms.scale,
    )
    return _unprepared(grads, q, k, v)


def _aligned_mask(terms: Terms, q: Tensor, k: Tensor) -> Tensor | None:
    """The additive mask for all batch rows and heads, in memory whose rows begin at multiples of 16 elements."""
    mask = additive_mask(terms, q, k)
    if mask is None:
        return None
    columns = k.shape[2]
    padded = F.pad(mask, (0, -columns % 16))
    return padded[..., :columns].expand(q.shape[0], q.shape[1], -1, -1)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Result:
    mask = _aligned_mask(terms, q, k)
    out, log_sum, *_ = _aten._scaled_dot_product_efficient_attention(*_prepared(q, k, v), mask, True, 0.0, terms.causal, scale=terms.scale)
    return from_log_sum(out[..., : v.shape[-1]], log_sum[..., : q.shape[2]], mask)


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Result, terms: Terms) -> Gradients:
    query, key, value = _prepared(q, k, v)
    width = query.shape[-1]
    grad_q, grad_k, grad_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
        pad_width(grad, width),
        query,
        key,
        value,
        _aligned_mask(terms, q, k),
        pad_width(rows.out, width),
        F.pad(log_sum_of(rows), (0, -q.shape[2] % 32), value=float("inf")),
        _no_random(q),
        _no_random(q),
        0.0,
        [True, True, True, False],
        terms.causal,
        scale=terms.scale,
    )
    return _unprepared((grad_q, grad_k, grad_v), q, k, v)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Result:
    mask = _aligned_mask(terms, q, k)
    out, log_sum, *_ = _aten._scaled_dot_product_cudnn_attention(
        *_prepared(q, k, v), mask, True, 0.0, terms.causal, False, scale=terms.scale
    )
    return from_log_sum(out[..., : v.shape[-1]], log_sum.reshape(q.shape[:3]), mask)


def _cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Result, terms: Terms) -> Gradients:
    query, key, value = _prepared(q, k, v)
    width = query.shape[-1]
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        pad_width(grad, width),
        query,
        key,
        value,
        pad_width(rows.out, width),
        log_sum_of(rows)[..., None].contiguous(),
        _no_random(q),
        _no_random(q),
        _aligned_mask(terms, q, k),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        terms.causal,
        scale=terms.scale,
    )
    return _unprepared(grads, q, k, v)


FLASH = Kernel(name="flash", forward=_flash_forward, backward=_flash_backward, masked=False)
CUDNN = Kernel(name="cudnn", forward=_cudnn_forward, backward=_cudnn_backward)
EFFICIENT = Kernel(name="efficient", forward=_efficient_forward, backward=_efficient_backward)
CUDA_KERNELS = (FLASH, CUDNN, EFFICIENT)  # in order of preference


def choose_cuda_kernel(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Kernel | None:
    """The first kernel that torch allows for this rectangle, or None."""
    mask = _aligned_mask(terms, q, k)
    parameters = torch.backends.cuda.SDPAParams(*_prepared(q, k, v), mask, 0.0, terms.causal, False)
    usable = {
        "flash": torch.backends.cuda.can_use_flash_attention,
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
    }
    for kernel in CUDA_KERNELS:
        if (mask is None or kernel.masked) and usable[kernel.name](parameters):
            return kernel
    return None

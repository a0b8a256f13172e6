"""One rank's part of a case against the same rows of attention over the whole sequence: output and every gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from tests.attention.cases import Case, Whole, options_of, rows_of, unsplit_attention
from torch import Tensor


def check_case(case: Case, rank: int, attend: Callable[..., Tensor], group: dist.ProcessGroup) -> None:
    """attend: called like `ring_attention`, without the group. group: all ranks of the case, to sum the gradients of whole sides."""
    whole = Whole.of(case)
    leaves = [leaf.requires_grad_() for leaf in (whole.q, whole.k, whole.v)]
    trained_mask = whole.mask is not None and case.mask.startswith("additive")
    if trained_mask:
        leaves.append(whole.mask.requires_grad_())
    expected = unsplit_attention(case, whole)
    expected.backward(whole.grad)

    at_q, at_k = rows_of(case.q_order, rank, case.q_len), rows_of(case.kv_order, rank, case.kv_len)
    local = [x.detach()[:, :, at].clone().requires_grad_() for x, at in ((whole.q, at_q), (whole.k, at_k), (whole.v, at_k))]
    mask = whole.mask
    has_rows = mask is not None and mask.shape[-2] > 1
    if mask is not None:
        mask = mask.detach()[..., at_q, :].clone() if has_rows else mask.detach().clone()
        mask.requires_grad_(trained_mask)
    out = attend(
        *local,
        q_spans=case.q_order,
        kv_spans=case.kv_order,
        mask=mask,
        q_segments=None if whole.q_segments is None else whole.q_segments[:, at_q],
        kv_segments=None if whole.kv_segments is None else whole.kv_segments[:, at_k],
        **options_of(case),
    )
    out.backward(whole.grad[:, :, at_q])

    pairs = {"out": (out, expected[:, :, at_q])}
    for name, mine, leaf, at, order in zip("qkv", local, leaves, (at_q, at_k, at_k), (case.q_order, case.kv_order, case.kv_order)):
        assert mine.grad is not None and leaf.grad is not None
        if order is None:
            dist.all_reduce(mine.grad, group=group)
        pairs[f"gradient of {name}"] = (mine.grad, leaf.grad[:, :, at])
    if trained_mask:
        assert mask is not None and mask.grad is not None
        assert whole.mask is not None and whole.mask.grad is not None
        if case.q_order is None or not has_rows:
            dist.all_reduce(mask.grad, group=group)
        pairs["gradient of mask"] = (mask.grad, whole.mask.grad[..., at_q, :] if has_rows else whole.mask.grad)
    for name, (have, want) in pairs.items():
        torch.testing.assert_close(have, want, rtol=0.0, atol=1e-10, msg=lambda text, name=name: f"{name} of {case}\n{text}")

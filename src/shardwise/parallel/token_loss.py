"""Next-token loss over logits that are split by vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.collectives.functional import Op, all_reduce
from shardwise.spec.sequence import even_sizes

IGNORED = -100
PARTS = 16


def token_loss(logits: Tensor, labels: Tensor, vocab: int, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over tokens of the cross entropy, in float32.

    logits: [B, S, this rank's run of the vocabulary]. labels: [B, S], `IGNORED` where no loss is taken. Every rank of the group gets
    the same sum. Communication: three all-reduces of [B, S].
    """
    logits = logits.flatten(0, -2)
    labels = labels.flatten()
    alone = group is None or group.size() == 1
    if alone and logits.dtype == torch.float32:
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    start = 0 if alone else sum(even_sizes(vocab, group.size())[: group.rank()])
    return _SplitCrossEntropy.apply(logits, labels, start, None if alone else group)


class _SplitCrossEntropy(torch.autograd.Function):
    """Keeps the probabilities, in float32. The gradient of logits of fewer bits is made in parts: 6 bytes per bf16 logit at the most."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, group: dist.ProcessGroup | None) -> Tensor:
        top = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)
        top = _reduce(top.float(), group, "max")
        shifted = logits - top.unsqueeze(-1)
        here = (labels >= start) & (labels < start + logits.shape[-1])
        column = torch.where(here, labels - start, 0)
        target = shifted.new_zeros(labels.shape)
        if logits.shape[-1]:
            target = torch.where(here, shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1), 0.0)
        exponents = shifted.exp_()
        total, target = _reduce(torch.stack((exponents.sum(-1), target)), group)
        counted = labels != IGNORED
        ctx.dtype = logits.dtype
        ctx.save_for_backward(exponents.div_(total.unsqueeze(-1)), column, here, counted)
        return torch.where(counted, total.log() - target, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, column, here, counted = ctx.saved_tensors
        weight, target = counted * grad, (here & counted) * -grad

        def part(rows: slice) -> Tensor:
            result = probabilities[rows] * weight[rows].unsqueeze(-1)
            return result.scatter_add_(-1, column[rows].unsqueeze(-1), target[rows].unsqueeze(-1)) if result.shape[-1] else result

        if ctx.dtype == torch.float32:
            return part(slice(None)), None, None, None
        whole = probabilities.new_empty(probabilities.shape, dtype=ctx.dtype)
        step = max(1, -(-len(whole) // PARTS))
        for first in range(0, len(whole), step):
            whole[first : first + step] = part(slice(first, first + step))
        return whole, None, None, None


def _reduce(x: Tensor, group: dist.ProcessGroup | None, op: Op = "sum") -> Tensor:
    return x if group is None else all_reduce(x, group, op)

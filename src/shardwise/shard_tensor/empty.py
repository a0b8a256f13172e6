"""Results of ranks that have nothing to compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def connected_empty(shape: Sequence[int], *inputs: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """A result without elements that still depends on `inputs`, so that their gradients (zeros) and the collectives behind
    them happen on this rank as on every other."""
    inputs = tuple(x for x in inputs if x is not None)
    result = inputs[0].new_zeros(tuple(shape), dtype=dtype)
    if result.numel():
        raise AssertionError(f"connected_empty is for shapes without elements, got {tuple(shape)}")
    for x in inputs:
        if x.requires_grad and torch.is_grad_enabled():
            # keeps x alive until backward, as an op that computes with it would: whether a weight's alias is used again must not differ
            kept = x.abs() if x.is_complex() else x.clamp(0, 0)
            result = result + kept.sum().to(result.dtype)
    return result

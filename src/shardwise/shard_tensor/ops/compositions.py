"""Functions that torch computes in one kernel and that are short compositions of ops with a sharded form."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.shard_tensor.registry import shard_function


@shard_function(F.glu)
def glu(input: Tensor, dim: int = -1) -> Tensor:
    """Half of `dim` gated by the other half. Communication: none, or rows of one half where `dim` is sharded."""
    if input.shape[dim] % 2:
        raise RuntimeError(f"Halving dimension must be even, but dimension {dim % input.ndim} is size {input.shape[dim]}")
    value, gate = input.chunk(2, dim)
    return value * torch.sigmoid(gate)


@shard_function(F.bilinear)
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Communication: none where neither feature dim is sharded; else that of the products."""
    out = torch.einsum("...i,kij,...j->...k", input1, weight, input2)
    return out if bias is None else out + bias


@shard_function(torch.dist, Tensor.dist)
def dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """Communication: that of the norm of the difference."""
    return torch.linalg.vector_norm(input - other, p)

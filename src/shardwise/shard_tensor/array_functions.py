"""For libraries that choose functions by the package of a tensor's class: opt_einsum looks for these three in `shardwise`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def einsum(equation: str, *operands: Tensor, **_: object) -> Tensor:
    """`torch.einsum`, with any letters."""
    names = dict.fromkeys(c for c in equation if c not in " ,->.")
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    if any(name not in letters for name in names):
        table = str.maketrans({name: letters[i] for i, name in enumerate(sorted(names))})
        equation = equation.translate(table)
    return torch.einsum(equation, *operands)


def tensordot(a: Tensor, b: Tensor, axes: int | Sequence = 2) -> Tensor:
    """`torch.tensordot`."""
    return torch.tensordot(a, b, dims=axes)


def transpose(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The dims of `x` in the order `axes`."""
    return x.permute(*axes)

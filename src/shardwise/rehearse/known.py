"""Numbers that a step reads out of tensors, where tensors hold none.

A fake tensor has a shape and no values. Few ops need values: counts of tokens with a loss, counts of tokens per expert. They are followed
through tensors whose elements are all one known number. Routing is taken to be balanced: every expert gets equally many tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardwise.errors import InputError

UNREAD = 0.5  # what stands for a floating number: the gradient norm (below the clipping bound), step counts
_aten = torch.ops.aten
_FILL: dict[Any, Callable[..., Any]] = {
    _aten.zeros_like.default: lambda *_: 0,
    _aten.ones_like.default: lambda *_: 1,
    _aten.zeros.default: lambda *_: 0,
    _aten.full.default: lambda size, value: value,
}
_COMPARE = {_aten.ne.Scalar: operator.ne, _aten.eq.Scalar: operator.eq}
_MOVE = {
    _aten.stack.default,
    _aten.cat.default,
    _aten.clone.default,
    _aten._to_copy.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
}
_FOLLOWED = {*_COMPARE, *_MOVE, _aten.sum.default, torch.ops.c10d.allreduce_.default}
Value = bool | int | float | None


def unknown(what: str) -> InputError:
    return InputError(
        given=what,
        why="the step reads numbers that depend on the data, and a rehearsal has none",
        try_="a layout or model without it, or shardwise verify, which runs a small copy with data",
    )


def tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def spread(index: Tensor, bins: int) -> int:
    """Entries in each bin when `index` is spread evenly."""
    if not bins or index.numel() % bins:
        raise unknown(f"{index.numel()} routed rows over {bins} bins, which do not divide evenly")
    return index.numel() // bins


def outcome(func: Any, args: Any, kwargs: Any, out: Any, known: Callable[[Tensor], Value]) -> Value:
    """The number that all elements of the result of an op have, or None."""
    if func in _FILL:
        return _FILL[func](*args)
    if func is _aten.lift_fresh.default:
        constant = getattr(out, "constant", None)
        if constant is None or constant.numel() != 1:
            return None
        with _disable_current_modes():
            return constant.item()
    if func not in _FOLLOWED:
        return None
    inputs = list(tensors((args, kwargs)))
    values = {known(each) for each in inputs}
    value = values.pop() if len(values) == 1 else None
    if value is None:
        return None
    if func in _COMPARE:
        return _COMPARE[func](value, args[1])
    if func is _aten.sum.default:
        return value * inputs[0].numel()
    if func is torch.ops.c10d.allreduce_.default:
        return value * dist.ProcessGroup.unbox(args[1]).size()
    return value if func in _MOVE else None


def grouped_product(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Rows of a by the matrix of their group, or, for two matrices, one product per group over their shared dim."""
    if b.ndim == 3:
        return a.new_empty(a.shape[0], b.shape[2])
    return a.new_empty(offsets.shape[0], a.shape[0], b.shape[1])

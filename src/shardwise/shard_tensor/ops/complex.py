"""Complex numbers made of and taken apart into real ones.

Conjugation is carried out at once: torch's lazy conjugate is a flag of the tensor, which the wrapper of a shard cannot have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.shard_tensor.aliases import copied
from shardwise.shard_tensor.ops.pointwise import pointwise_rule
from shardwise.shard_tensor.registry import shard_rule
from shardwise.shard_tensor.tensor import ShardTensor

aten = torch.ops.aten


@shard_rule(aten._conj.default, aten._neg_view.default)
def conj(op, args, kwargs):
    """A copy that carries writes on to what it views; a pending sum stays one. Communication: none."""
    (x,) = args

    def gather(source: ShardTensor) -> Tensor:
        return op(source._local_tensor).resolve_conj().resolve_neg()

    return copied(ShardTensor(gather(x), x._spec), x, gather, lambda source, written: source._local_tensor.copy_(op(written)))


@shard_rule(aten.complex.default, aten.polar.default)
def join(op, args, kwargs):
    """Communication: as any pointwise op."""
    return pointwise_rule(op, args, kwargs)

"""`flex_attention`: its scores are the caller's function of positions in the whole tensor, so it runs on complete tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.errors import MissingShardPatch
from shardwise.shard_tensor import registry
from shardwise.shard_tensor.fallback import leaf_full, replicated, tell_once
from shardwise.shard_tensor.redistribute import moved_bytes
from shardwise.shard_tensor.tensor import ShardTensor


def _gathered(op):
    def rule(*args, **kwargs):
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardTensor)]
        if registry.settings.fallback == "error":
            raise MissingShardPatch(
                f"flex_attention on {'; '.join(x._spec.describe() for x in inputs)}",
                "it has no sharded form and fallback mode 'error' forbids gathering its arguments",
                "use scaled_dot_product_attention or shardwise.attention.ring_attention (masks, windows and biases by position), or allow "
                "gathering: shardwise.fallback('gather')",
            )
        mesh = inputs[0]._spec.mesh
        cost = sum(moved_bytes(x._spec, x._spec.replicate()) for x in inputs)
        if cost and not any(mesh.get_coordinate()) and not torch.compiler.is_compiling():
            tell_once("flex_attention", cost)
        args, kwargs = tree_map_only(ShardTensor, leaf_full, (args, kwargs))
        return tree_map_only(Tensor, lambda x: replicated(x, mesh), op(*args, **kwargs))

    op.py_impl(ShardTensor)(rule)


for _op in (flex_attention, flex_attention_backward):
    _gathered(_op)

"""The sharded tensor: its spec, its ops, and how it is made and moved."""

from shardwise.shard_tensor.tensor import ShardTensor, TensorPromotionMode  # isort: skip
from shardwise.shard_tensor import ops as ops
from shardwise.shard_tensor.create import scatter_tensor
from shardwise.shard_tensor.registry import fallback
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.sync import sync_module_over_mesh

__all__ = ["ShardTensor", "ShardTensorSpec", "TensorPromotionMode", "fallback", "scatter_tensor", "sync_module_over_mesh"]

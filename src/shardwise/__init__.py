"""shardwise: plan, run and prove the split of a PyTorch model over devices.

Public names are loaded on first use, so that importing the package (and planning with it) needs no torch.
"""

from importlib import import_module

_HOMES = {
    "Checkpoints": "shardwise.parallel.checkpoint",
    "DistributedManager": "shardwise.mesh.process",
    "MissingShardPatch": "shardwise.errors",
    "ShardTensor": "shardwise.shard_tensor",
    "ShardTensorSpec": "shardwise.shard_tensor",
    "TensorPromotionMode": "shardwise.shard_tensor",
    "UndeterminedShardingError": "shardwise.errors",
    "clip_grad_norm_": "shardwise.parallel.optim",
    "explain": "shardwise.debug",
    "fallback": "shardwise.shard_tensor",
    "param_groups": "shardwise.parallel.optim",
    "parallelize": "shardwise.parallel.wrap",
    "scatter_tensor": "shardwise.shard_tensor",
    "supported_ops": "shardwise.debug",
    "sync_module_over_mesh": "shardwise.shard_tensor",
}

__all__ = sorted(_HOMES)
_ARRAY_FUNCTIONS = ("einsum", "tensordot", "transpose")  # opt_einsum looks for them in the package of a tensor's class
_MODULES = ("data", "debug", "functional", "random", "testing")
__version__ = "0.1.0"


def __getattr__(name: str):
    if name in _MODULES:
        return import_module(f"shardwise.{name}")
    home = "shardwise.shard_tensor.array_functions" if name in _ARRAY_FUNCTIONS else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

"""The safe way for an op without a sharded form: gather, compute, keep the result replicated, and say once what it cost."""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardwise.errors import MissingShardPatch
from shardwise.shard_tensor import registry
from shardwise.shard_tensor.aliases import after_write, check_writable, copied, replace_shard, same_memory
from shardwise.shard_tensor.redistribute import moved_bytes, redistribute_local
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor

_told: set[str] = set()
_BY_MEMORY = {torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default, torch.ops.aten.as_strided_scatter.default}


def fallback_rule(op, args: tuple, kwargs: dict):
    """Run `op` on complete tensors on every rank. Writes (in-place ops, `out=`) go back into the shards.

    Communication: each sharded argument is gathered. Raises MissingShardPatch in fallback mode `"error"`.
    """
    leaves, structure = tree_flatten((args, kwargs))
    cost = sum(moved_bytes(leaf._spec, leaf._spec.replicate()) for leaf in leaves if isinstance(leaf, ShardTensor))
    if registry.settings.fallback == "error":
        layouts = "; ".join(leaf._spec.describe() for leaf in leaves if isinstance(leaf, ShardTensor))
        raise MissingShardPatch(
            f"{op} on {layouts}",
            "it has no sharded form and fallback mode 'error' forbids gathering its arguments",
            f"register one with ShardTensor.register_dispatch_handler({op}, handler), or allow gathering: shardwise.fallback('gather')",
        )
    if torch.Tag.inplace_view in op.tags:
        layouts = "; ".join(leaf._spec.describe() for leaf in leaves if isinstance(leaf, ShardTensor))
        raise MissingShardPatch(
            f"{op} on {layouts}",
            "it changes the dims of a tensor in place, and a ShardTensor keeps those it was made with",
            "use the form of the op that returns a view, without the underscore",
        )
    mesh = next(leaf._spec.mesh for leaf in leaves if isinstance(leaf, ShardTensor))
    if cost and not any(mesh.get_coordinate()):
        tell_once(str(op), cost)
    full = [_complete(op, leaf) if isinstance(leaf, ShardTensor) else leaf for leaf in leaves]
    if op in _BY_MEMORY:
        _refuse_gaps(op, args)
    full_args, full_kwargs = tree_unflatten(full, structure)
    result = op(*full_args, **full_kwargs)
    if any(isinstance(r, Tensor) and r.layout is not torch.strided for r in tree_flatten(result)[0]):
        raise MissingShardPatch(
            f"{op}, whose result is a sparse tensor",
            "a ShardTensor holds dense rows",
            "use the dense form of the op, or message passing by index (index_add, scatter), which stays sharded",
        )
    schema = op._schema
    if schema.is_mutable:
        for leaf, whole in zip(leaves, full, strict=True):
            if isinstance(leaf, ShardTensor):
                write_back(leaf, whole)
        originals = {id(whole): leaf for leaf, whole in zip(leaves, full, strict=True) if isinstance(leaf, ShardTensor)}
        return tree_map_only(Tensor, lambda t: originals[id(t)] if id(t) in originals else replicated(t, mesh), result)
    results = tree_map_only(Tensor, lambda t: replicated(t, mesh), result)
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return _as_views(results, op, leaves, full, structure) if views else results


def _as_views(results, op, leaves: list, full: list, structure):
    """The results of a view op, which views the first tensor among its arguments: copies that follow what is written there."""
    place = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, ShardTensor))
    parts, form = tree_flatten(results)

    def gather(number: int):
        def again(source: ShardTensor) -> Tensor:
            args, kwargs = tree_unflatten([*leaves[:place], _complete(op, source), *leaves[place + 1 :]], structure)
            return tree_flatten(op(*args, **kwargs))[0][number]

        return again

    source = leaves[place]
    shared = full[place] is source._local_tensor
    return tree_unflatten([same_memory(x, source) if shared else copied(x, source, gather(i)) for i, x in enumerate(parts)], form)


def _complete(op, x: ShardTensor) -> Tensor:
    return _as_stored(x) if op in _BY_MEMORY else leaf_full(x)


def leaf_full(x: ShardTensor) -> Tensor:
    """The complete local tensor of `x`; no gradient."""
    return redistribute_local(x._local_tensor, x._spec, x._spec.replicate())


def _as_stored(x: ShardTensor) -> Tensor:
    """The complete local tensor of `x`, in memory as `x` says it lies; no gradient."""
    whole, stride = leaf_full(x), x._spec.stride
    if whole.stride() == stride:
        return whole
    repeated = [d for d, step in enumerate(stride) if step == 0 and whole.shape[d] > 1]
    for dim in repeated:
        whole = whole.narrow(dim, 0, 1)
    return torch.empty_strided(whole.shape, stride, dtype=whole.dtype, device=whole.device).copy_(whole).expand(x._spec.shape)


def _refuse_gaps(op, args: tuple) -> None:
    """Raise MissingShardPatch, on all ranks alike, if `op` reads memory where its `ShardTensor` has no elements."""
    x, size, stride, *offset = args if op is not torch.ops.aten.as_strided_scatter.default else (args[0], *args[2:])
    if not isinstance(x, ShardTensor) or not x._spec.numel or (x._spec.is_replicated and x._local_tensor.stride() == x._spec.stride):
        return
    ends = [sum((n - 1) * step for n, step in zip(*each, strict=True)) for each in ((x._spec.shape, x._spec.stride), (size, stride))]
    held = torch.zeros(1 + max(ends[0], ends[1] + sum(each or 0 for each in offset)), dtype=torch.bool)
    held.as_strided(x._spec.shape, x._spec.stride).fill_(True)
    if not held.as_strided(size, stride, *offset).all():
        raise MissingShardPatch(
            f"{op} with sizes {tuple(size)} and strides {tuple(stride)} on {x._spec.describe()}",
            "it reads memory that lies between or beyond the elements of the tensor, and only these are gathered",
            "call contiguous() before it, or say what is wanted with unfold, view or a slice",
        )


def replicated(local: Tensor, mesh) -> ShardTensor:
    """`local`, equal on all ranks, as a `ShardTensor`."""
    spec = ShardTensorSpec(mesh, (Replicate(),) * mesh.ndim, tuple(local.shape), (None,) * local.ndim, local.dtype, tuple(local.stride()))
    return ShardTensor(local, spec)


def write_back(x: ShardTensor, whole: Tensor) -> None:
    """Store the complete value `whole` in the shard of `x`, keeping its layout."""
    check_writable(x)
    if tuple(whole.shape) != tuple(x._spec.shape):
        raise MissingShardPatch(
            f"an in-place op that changes the shape of a sharded tensor from {tuple(x._spec.shape)} to {tuple(whole.shape)}",
            "the shards of a ShardTensor keep their sizes",
            "use the form of the op that returns a new tensor",
        )
    if x._spec.partial_mesh_dims:
        spec = x._spec.gradient()
        replace_shard(x, whole if spec.is_replicated else redistribute_local(whole, spec.replicate(), spec), spec)
    else:
        local = redistribute_local(whole, x._spec.replicate(), x._spec)
        if local is not x._local_tensor:
            x._local_tensor.copy_(local)
    after_write(x)


def tell_once(name: str, cost: int) -> None:
    """Warn, once for each op and on the first rank, that its arguments were gathered, with the bytes each rank received."""
    if name in _told:
        return
    _told.add(name)
    warnings.warn(
        f"{name} has no sharded form: its arguments were gathered ({cost:,} bytes received per rank) and the result is replicated. "
        "It is right but saves neither time nor memory; shardwise.fallback('error') refuses instead.",
        UserWarning,
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """How many frames up the first one outside this package and torch is, for a warning that points at the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("shardwise", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def forget_told() -> None:
    """Let every op warn again (for tests)."""
    _told.clear()

"""The safe way for an op without a sharded form: gather, compute, keep the result replicated, and say once what it cost."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardwise.errors import MissingShardPatch
from shardwise.shard_tensor import registry
from shardwise.shard_tensor.redistribute import moved_bytes, redistribute_local
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor

_told: set[str] = set()


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
    mesh = next(leaf._spec.mesh for leaf in leaves if isinstance(leaf, ShardTensor))
    if cost and not any(mesh.get_coordinate()):
        tell_once(str(op), cost)
    full = [leaf_full(leaf) if isinstance(leaf, ShardTensor) else leaf for leaf in leaves]
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
    if views and not all(leaf._spec.is_replicated for leaf in leaves if isinstance(leaf, ShardTensor)):
        tree_map_only(ShardTensor, mark_copied, results)
    return results


def leaf_full(x: ShardTensor) -> Tensor:
    """The complete local tensor of `x`; no gradient."""
    return redistribute_local(x._local_tensor, x._spec, x._spec.replicate())


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
        x._spec = x._spec.gradient()
        x._local_tensor = whole if x._spec.is_replicated else redistribute_local(whole, x._spec.replicate(), x._spec)
    else:
        local = redistribute_local(whole, x._spec.replicate(), x._spec)
        if local is not x._local_tensor:
            x._local_tensor.copy_(local)
    after_write(x)


def complete_in_place(x: ShardTensor) -> None:
    """Resolve the pending sums of `x` before it is written into. Communication: an all-reduce for each.

    Raises MissingShardPatch if a view of `x` is alive: it would go on showing the summands.
    """
    target = x._spec.gradient()
    if target is not x._spec:
        if any(view() is not None for view in x.__dict__.get("_views", ())):
            raise MissingShardPatch(
                f"an in-place write into a pending sum ({x._spec.describe()}) of which a view exists",
                "the write completes the sum, and the view would go on showing its summands",
                "take the view after the write, or complete the sum first: x = x.redistribute(placements=...)",
            )
        x._local_tensor = redistribute_local(x._local_tensor, x._spec, target)
        x._spec = target


def note_view(view: ShardTensor, x: ShardTensor) -> None:
    """Remember that `view` shows the summands of `x`, or of what `x` views."""
    views = x.__dict__.setdefault("_views", [])
    views[:] = [each for each in views if each() is not None]
    views.append(weakref.ref(view))
    view._views = views


def mark_copied(x: ShardTensor, push: Callable[[Tensor], None] | None = None) -> ShardTensor:
    """Remember that `x` stands for a view but has memory of its own. `push(shard)` carries a write into the tensor it views."""
    x._copied_view = push or False
    return x


def check_writable(x: ShardTensor) -> None:
    """Raise before an in-place write into a copied view that cannot reach the tensor it views."""
    if getattr(x, "_copied_view", None) is False:
        raise MissingShardPatch(
            f"an in-place write into a view ({x._spec.describe()})",
            "the view had to be copied to be sharded, so the write would not reach the tensor it views",
            "write with an op that returns a new tensor, or into the tensor itself",
        )


def after_write(x: ShardTensor) -> None:
    """Carry a write into a copied view on to the tensor it views, and count it: a backward that saved the shard refuses."""
    local = x._local_tensor
    if not local.is_inference() and not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(local)
    push = getattr(x, "_copied_view", None)
    if push:
        push(x._local_tensor)


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

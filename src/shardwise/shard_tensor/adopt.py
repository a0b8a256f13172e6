"""Plain tensors beside sharded ones in ops that pick and place: given a layout, made whole, or turned into a `ShardTensor`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.errors import MissingShardPatch
from shardwise.shard_tensor.promote import promote
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, redistribute, to_local


def replicated_spec(x: Tensor, mesh) -> ShardTensorSpec:
    """The layout of `x`, whole on every rank."""
    if isinstance(x, ShardTensor):
        return x._spec.replicate()
    return ShardTensorSpec(mesh, (Replicate(),) * mesh.ndim, tuple(x.shape), (None,) * x.ndim, x.dtype)


def sharded(x: Tensor, like: Sequence[ShardTensor]) -> ShardTensor:
    """`x` itself, or a plain tensor as a replicated one beside `like`, its gradient summed over the ranks."""
    if isinstance(x, ShardTensor):
        return redistribute(x, x._spec.gradient())
    x = promote(x, [other._spec for other in like])
    return x if isinstance(x, ShardTensor) else ShardTensor(x, replicated_spec(x, like[0]._spec.mesh))


def part_of(x: ShardTensor, spec: ShardTensorSpec, axes: Sequence[int]) -> Tensor:
    """The shard of `x` under `spec`, of which the ranks along `axes`, where `spec` replicates it, use different parts: its gradient is
    summed over them. Differentiable."""
    x = redistribute(x, spec)
    axes = [axis for axis in axes if isinstance(spec.placements[axis], Replicate)]
    if not axes:
        return to_local(x)
    placements = tuple(Partial() if axis in axes else p for axis, p in enumerate(spec.placements))
    return to_local(x, ShardTensorSpec(spec.mesh, placements, spec.shape, spec.sizes, spec.dtype))


def whole_value(x: Tensor) -> Tensor:
    """All of `x` on this rank, without gradient: an index or a mask. Communication: gathers a sharded one."""
    if isinstance(x, ShardTensor):
        with torch.no_grad():
            return redistribute(x, x._spec.replicate())._local_tensor
    return x.detach()


def plain_values(values):
    """`values`, in any nesting, with plain tensors for its `ShardTensor`s if all of these are whole on every rank or pending sums, else
    None."""
    leaves, structure = tree_flatten(values)
    if not all(leaf._spec.gradient().is_replicated for leaf in leaves if isinstance(leaf, ShardTensor)):
        return None
    return tree_unflatten([to_local(redistribute(x, x._spec.gradient())) if isinstance(x, ShardTensor) else x for x in leaves], structure)


def become_sharded(x: Tensor, spec: ShardTensorSpec) -> None:
    """Turn the plain tensor object `x`, equal on all ranks, into the `ShardTensor` of the same values laid out as `spec`.

    For a buffer that a model makes with `torch.zeros` and fills with slices of sharded tensors. Raises MissingShardPatch where somebody
    else shares the memory of `x` and would no longer see what is written.
    """
    reason = None
    if x.requires_grad:
        reason = "it requires a gradient"
    elif x._is_view() or torch._C._storage_Use_Count(x.untyped_storage()._cdata) > 2:
        reason = "other tensors share its memory and would not see the write"
    if reason is None:
        try:
            torch.utils.swap_tensors(x, redistribute(x.detach().clone(), spec))
            return
        except RuntimeError:
            reason = "other objects refer to it"
    raise MissingShardPatch(
        f"a write of a ShardTensor into a plain tensor of shape {tuple(x.shape)}",
        f"the plain tensor cannot become sharded: {reason}",
        "write full_tensor() of the value, or make the destination with new_zeros of a ShardTensor",
    )

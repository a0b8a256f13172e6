"""Means over what counts in the whole batch: over data-parallel replicas, accumulated batches and the domain.

A data-parallel reducer averages gradients over the replicas. The mean of the replicas' means is the mean of all only where each has
equally many valid elements; with masks, ignored targets or weights it is not. So divide sums by the global count::

    count = global_sum((target != ignore).sum(), mesh)                                # once, of all accumulated batches
    loss = global_mean(F.cross_entropy(logits, target, reduction="sum"), count, mesh)   # of each batch
    loss.backward()

The losses of the accumulated batches add up to the mean, on every rank, and after the reducer's average so do the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.collectives import functional as comm
from shardwise.mesh.groups import axis_group
from shardwise.shard_tensor import ShardTensor

DATA_AXES = ("ddp", "dp")


def global_sum(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of a value of every replica, plain and equal on every rank; no gradient.

    value: of this replica; a `ShardTensor` (a pending sum, say) is completed over the domain first, a plain tensor must be equal
        on the ranks of a domain group.
    mesh: its axis `ddp` (or `dp`) is the one of the replicas; without one, or of size 1, there is one replica.
    Communication: one all-reduce over the replicas; one over the domain for a pending sum.
    """
    with torch.no_grad():
        total = _complete(value).detach()
        for group in _replicas(mesh):
            total = comm.all_reduce(total, group)
    return total


def global_mean(total: Tensor, count: Tensor | float, mesh: DeviceMesh) -> Tensor:
    """The sum of `total` over all replicas, divided by `count`; its gradient is right once averaged over the replicas.

    total: summed loss of this replica, as in `global_sum`. count: elements, or sum of weights, of all replicas and accumulated batches.
    Communication: as `global_sum`; backward none.
    """
    whole = _complete(total) / count
    value = whole.detach()
    replicas = 1
    for group in _replicas(mesh):
        value = comm.all_reduce(value, group)
        replicas *= group.size()
    scaled = whole * replicas
    return scaled + (value - scaled.detach())


def _complete(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, ShardTensor) else value


def _replicas(mesh: DeviceMesh) -> list:
    names = mesh.mesh_dim_names or ()
    return [axis_group(mesh, i) for i, name in enumerate(names) if name in DATA_AXES and mesh.size(i) > 1]

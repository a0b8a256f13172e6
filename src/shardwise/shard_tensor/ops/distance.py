"""Distances between all pairs of two sets of points: each rank has its points against the whole of the other, smaller set."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.shard_tensor.contract import local_operands, plan
from shardwise.shard_tensor.empty import connected_empty
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute
from shardwise.shard_tensor.transposed import whole_spec


@shard_function(torch.cdist)
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = "use_mm_for_euclid_dist_if_necessary"):
    """Split points or a split batch stay split, in the rows or columns of the result. Communication: none if one side is whole, else the
    smaller side is gathered; split coordinates move first."""
    if min(x1.ndim, x2.ndim) < 2 or x1.shape[-1] != x2.shape[-1]:
        return NotImplemented
    batch = torch.broadcast_shapes(tuple(x1.shape[:-2]), tuple(x2.shape[:-2]))
    points = []
    for x in (x1, x2):
        x = x if tuple(x.shape[:-2]) == tuple(batch) else x.expand(*batch, *x.shape[-2:])
        if isinstance(x, ShardTensor):
            x = redistribute(x, whole_spec(x._spec, [x.ndim - 1]))
        points.append(x)
    names = tuple(f"b{i}" for i in range(len(batch)))
    contraction = plan(points, [(*names, "p", "m"), (*names, "r", "m")])
    local = local_operands(contraction, points)
    if min(local[0].numel(), local[1].numel()) == 0 and x1.shape[-1]:
        distances = connected_empty((*local[0].shape[:-1], local[1].shape[-2]), *local)
    else:
        distances = torch.cdist(*local, p=p, compute_mode=compute_mode)
    shape = (*batch, x1.shape[-2], x2.shape[-2])
    return from_local(distances, contraction.result((*names, "p", "r"), shape, distances.dtype))

"""Equal weights on every rank of a domain: one broadcast at start-up."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.collectives import functional as comm
from shardwise.collectives.buckets import buckets
from shardwise.mesh.groups import axis_group
from shardwise.shard_tensor.tensor import ShardTensor

BUCKET_BYTES = 250 * 2**20


def sync_module_over_mesh(module: nn.Module, mesh: DeviceMesh, src_mesh_rank: int = 0, verify: bool = False) -> None:
    """Give every rank of a 1-D mesh the plain parameters and buffers of one of them.

    Distributed tensors (`DTensor`, `ShardTensor`) are left alone: they are not copies of one another.

    Args:
        src_mesh_rank: the rank, counted within the mesh, whose values win.
        verify: compare names, shapes and dtypes before, and a checksum of the values after.

    Communication: one coalesced broadcast for each 250 MB; with `verify`, one gather of metadata and one all-gather of sums.
    Raises: ValueError for a mesh that is not 1-D or a rank outside it; RuntimeError for FSDP modules, meta tensors, tensors on
        another device type, a module with distributed state only, and what `verify` finds.
    """
    if mesh.ndim != 1:
        raise ValueError(f"sync_module_over_mesh needs a 1-D mesh, got one of {mesh.ndim} dims: pass one axis, like mesh['domain']")
    if not 0 <= src_mesh_rank < mesh.size():
        raise ValueError(f"src_mesh_rank {src_mesh_rank} is outside the mesh of {mesh.size()} ranks: give one from 0 to {mesh.size() - 1}")
    if any(type(m).__name__.startswith("FSDP") or hasattr(m, "_get_fsdp_state") for m in module.modules()):
        raise RuntimeError("sync_module_over_mesh got a module that FSDP manages: call it before fully_shard")
    named = [*module.named_parameters(), *module.named_buffers()]
    plain = {name: t.detach() for name, t in named if not isinstance(t, DTensor | ShardTensor)}
    if named and not plain:
        raise RuntimeError("sync_module_over_mesh: the module has distributed state only, none of it is plain")
    for name, t in plain.items():
        if t.is_meta or t.device.type != mesh.device_type:
            raise RuntimeError(f"{name} is on device {t.device}, the mesh is on {mesh.device_type}: move the module there first")
    group = axis_group(mesh, 0)
    if verify:
        _verify_metadata(plain, group)
    with torch.no_grad():
        full = [t for t in plain.values() if t.numel()]
        for bucket in buckets(full, key=lambda t: t.dtype, size=lambda t: t.nbytes, limit=BUCKET_BYTES):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            dist.broadcast(flat, src=dist.get_global_rank(group, src_mesh_rank), group=group)
            for t, value in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                t.copy_(value.view(t.shape))
    if verify:
        _verify_values(plain, group)


def _verify_metadata(plain: dict[str, Tensor], group) -> None:
    mine = [(name, tuple(t.shape), str(t.dtype)) for name, t in plain.items()]
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            different = sorted({row[0] for row in set(map(tuple, theirs)) ^ set(map(tuple, everyone[0]))})
            raise RuntimeError(f"metadata differs between rank 0 and rank {rank} of the mesh: {different[:5]}")


def _verify_values(plain: dict[str, Tensor], group) -> None:
    sums = torch.stack([t.double().sum() if not t.is_complex() else t.abs().double().sum() for t in plain.values()])
    rows = comm.all_gather(sums, 0, [len(sums)] * group.size(), group).view(-1, len(sums))
    different = (rows != rows[0]).any(0) & ~(rows.isnan().all(0))
    if different.any():
        names = [name for name, bad in zip(plain, different.tolist(), strict=True) if bad]
        raise RuntimeError(f"values still differ between ranks after the broadcast: {names[:5]}")

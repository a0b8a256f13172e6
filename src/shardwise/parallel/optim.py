"""What an optimizer needs when tensors of several kinds meet: groups of one kind, and one global gradient norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Shard

from shardwise.mesh.groups import axis_group
from shardwise.shard_tensor import ShardTensor


def _kind(parameter: Tensor):
    """Equal for parameters that one fused or foreach update can take together."""
    if isinstance(parameter, DTensor | ShardTensor):
        mesh = parameter.device_mesh
        return type(parameter).__name__, tuple(mesh.mesh.flatten().tolist()), tuple(mesh.shape), mesh.mesh_dim_names
    return None


def param_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Trainable parameters, one group for plain tensors and one for each mesh: foreach and fused optimizers cannot mix them.

    torch.optim.AdamW(shardwise.param_groups(model), lr=1e-3)
    """
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault(_kind(parameter), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def clip_grad_norm_(model: nn.Module | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their one global norm is at most `max_norm`; return the norm before.

    Plain gradients count once, each shard of a distributed one once, whatever the meshes; a pending sum is completed first.

    Communication: one small all-reduce for each mesh axis over which gradients are sharded; one for each pending sum.
    """
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    owners = [p for p in parameters if p.grad is not None]
    for p in owners:
        _complete(p)
    grads = [p.grad for p in owners]
    power = float(norm_type)
    partial: dict[tuple, tuple[list, Tensor]] = {}
    device = grads[0].device if grads else torch.device("cpu")
    for grad in grads:
        local, axes = _local(grad)
        value = local.abs().max().double() if power == float("inf") and local.numel() else local.double().norm(power) ** power
        if power == float("inf") and not local.numel():
            value = torch.zeros((), dtype=torch.float64, device=device)
        key = tuple(id(group) for group in axes)
        have = partial.get(key)
        combined = value if have is None else torch.maximum(have[1], value) if power == float("inf") else have[1] + value
        partial[key] = (axes, combined)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for axes, value in partial.values():
        for group in axes:
            dist.all_reduce(value, dist.ReduceOp.MAX if power == float("inf") else dist.ReduceOp.SUM, group=group)
        total = torch.maximum(total, value) if power == float("inf") else total + value
    norm = total if power == float("inf") else total ** (1 / power)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local, _ = _local(grad)
        local.mul_(factor.to(local.dtype))
    return norm


def _complete(parameter: Tensor) -> None:
    grad = parameter.grad
    if (isinstance(grad, DTensor) and any(isinstance(p, Partial) for p in grad.placements)) or (
        isinstance(grad, ShardTensor) and grad._spec.partial_mesh_dims
    ):
        parameter.grad = grad.redistribute(placements=parameter.placements)


def _local(grad: Tensor) -> tuple[Tensor, list]:
    """The memory of a gradient on this rank, and the groups over which its shards lie."""
    if isinstance(grad, DTensor | ShardTensor):
        mesh = grad.device_mesh
        groups = [axis_group(mesh, i) for i, p in enumerate(grad.placements) if isinstance(p, Shard) or p.is_shard()]
        return (grad._local_tensor, [g for g in groups if dist.get_world_size(g) > 1])
    return grad, []

"""What an optimizer needs when tensors of several kinds meet: groups of one kind, and one global gradient norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

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


def clip_grad_norm_(
    model: nn.Module | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, *, experts: Mapping[Tensor, DeviceMesh] | None = None
) -> Tensor:
    """Scale all gradients so that their one global norm is at most `max_norm`; return the norm before.

    Plain gradients count once, each shard of a distributed one once, whatever the meshes; a pending sum is completed first.

    experts: plain parameters of which each rank of a mesh holds its own, `{p: mesh["ep"] for p in model.experts.parameters()}`.
        All ranks of that mesh name the same number of them. Experts that are DTensors need not be named.

    Communication: one small all-reduce for each mesh axis over which gradients are sharded; one for each pending sum.
    """
    parameters = [p for p in (model.parameters() if isinstance(model, nn.Module) else model) if p.requires_grad or p.grad is not None]
    largest = float(norm_type) == float("inf")
    device = parameters[0].device if parameters else torch.device("cpu")
    parts: dict[tuple, tuple[list, list[Tensor]]] = {}
    grads = []
    for p in parameters:  # also those that got no gradient here, but may have on other ranks: all must take part in the same sums
        groups = _groups(p, (experts or {}).get(p))
        _, values = parts.setdefault(tuple(id(group) for group in groups), (groups, []))
        if p.grad is not None:
            grads.append(_local(_like_parameter(p)))
            values.append(_magnitude(grads[-1], norm_type))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, values in parts.values():
        own = torch.stack([total.new_zeros(()), *values])
        own = own.amax() if largest else own.sum()
        for group in groups:
            dist.all_reduce(own, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        total = torch.maximum(total, own) if largest else total + own
    norm = total if largest else total ** (1 / float(norm_type))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.dtype))
    return norm


def _magnitude(grad: Tensor, norm_type: float) -> Tensor:
    """What adds up to the norm over several gradients: the largest element, or the sum of powers."""
    if not grad.numel():
        return torch.zeros((), dtype=torch.float64, device=grad.device)
    return grad.abs().max().double() if float(norm_type) == float("inf") else grad.double().norm(norm_type) ** norm_type


def _like_parameter(parameter: Tensor) -> Tensor:
    """The gradient in the layout of its parameter: pending sums completed."""
    grad = parameter.grad
    if isinstance(grad, DTensor | ShardTensor) and grad.placements != parameter.placements:
        parameter.grad = grad = grad.redistribute(placements=parameter.placements)
    return grad


def _local(grad: Tensor) -> Tensor:
    return grad._local_tensor if isinstance(grad, DTensor | ShardTensor) else grad


def _groups(parameter: Tensor, experts: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """The groups over which the shards of a parameter, or the experts, lie."""
    if isinstance(parameter, DTensor | ShardTensor):
        mesh, axes = parameter.device_mesh, [i for i, p in enumerate(parameter.placements) if not isinstance(p, Replicate)]
    elif experts is not None:
        mesh, axes = experts, list(range(experts.ndim))
    else:
        return []
    return [axis_group(mesh, i) for i in axes if mesh.size(i) > 1]

"""Layer, RMS, group, instance, batch and local response norm.

Where the normalised elements of a group lie on one rank the norm is local and sends nothing. Where they lie on several,
the statistics are those of the whole tensor (`normalize.Normalize`). Weights are plain and complete on every rank; their
gradients are summed as those of all plain operands. Running statistics end up equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.collectives import functional as comm
from shardwise.errors import MissingShardPatch
from shardwise.shard_tensor.normalize import Normalize
from shardwise.shard_tensor.promote import again_operand, contributed, one_node, plain_operand, separate_nodes, weight_operand
from shardwise.shard_tensor.reduction_plan import accumulation_dtype, reduction_plan, spec_group
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local

aten = torch.ops.aten
_NoTorchFunction = torch._C.DisableTorchFunctionSubclass


# ---------------------------------------------------------------------- layer and RMS norm


@shard_function(F.layer_norm, torch.layer_norm)
def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    """Communication: none if the normalised dims are unsharded; else two all-reduces of the statistics, one backward."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    x = _complete(input)
    spec = x._spec
    if _tail_sharded(spec, normalized_shape):
        return _normalized_tail(x, normalized_shape, plain_operand(weight, (spec,)), plain_operand(bias, (spec,)), eps, centered=True)
    if separate_nodes(x._local_tensor):
        weight, bias = plain_operand(weight, (spec,)), plain_operand(bias, (spec,))
        return from_local(F.layer_norm(to_local(x), normalized_shape, weight, bias, eps), spec)
    weight, weight_use = weight_operand(weight, spec)
    bias, bias_use = weight_operand(bias, spec)
    if torch.is_grad_enabled():
        with _NoTorchFunction():
            if x.requires_grad or _records(weight) or _records(bias):
                return _layer_norm(x, weight, bias, tuple(normalized_shape), eps, (weight_use, bias_use))
    return ShardTensor(torch.layer_norm(x._local_tensor, normalized_shape, weight, bias, eps), spec)


class _LayerNorm(torch.autograd.Function):
    """Layer norm of each rank's own rows, in one node."""

    @staticmethod
    def forward(ctx, x: ShardTensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...], eps: float, uses):
        result, mean, rstd = torch.native_layer_norm(x._local_tensor, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.shape, ctx.uses = shape, uses
        return ShardTensor(result, x._spec)

    @staticmethod
    def backward(ctx, grad: ShardTensor):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        spec = x._spec
        if grad._spec is not spec:
            grad = redistribute(grad, spec)
        if torch.is_grad_enabled():
            own, local = to_local(x), to_local(grad)
            weight = again_operand(ctx.uses[0], weight)
        else:
            own, local = x._local_tensor, grad._local_tensor
        grad_x, grad_weight, grad_bias = _layer_norm_backward(local, own, ctx.shape, mean, rstd, weight, bias, ctx.needs_input_grad[:3])
        weight_use, bias_use = ctx.uses
        if grad_x is not None:
            grad_x = from_local(grad_x, spec)
        return grad_x, contributed(weight_use, grad_weight), contributed(bias_use, grad_bias), None, None, None


_layer_norm = one_node(_LayerNorm)
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


@shard_function(F.rms_norm, torch.rms_norm)
def rms_norm(input, normalized_shape, weight=None, eps=None):
    """Communication: none if the normalised dims are unsharded; else one all-reduce of the statistics, one backward."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    x = _complete(input)
    spec = x._spec
    weight = plain_operand(weight, (spec,))
    if _tail_sharded(spec, normalized_shape):
        eps = torch.finfo(accumulation_dtype(x.dtype)).eps if eps is None else eps
        return _normalized_tail(x, normalized_shape, weight, None, eps, centered=False)
    return from_local(F.rms_norm(to_local(x), normalized_shape, weight, eps), spec)


def _complete(x: ShardTensor) -> ShardTensor:
    return redistribute(x, x._spec.gradient()) if x._spec.partial_mesh_dims else x


def _records(value: Tensor | None) -> bool:
    return value is not None and value.requires_grad


def _tail_sharded(spec: ShardTensorSpec, normalized_shape: Sequence[int]) -> bool:
    sharded = spec.sharded_dims
    return bool(sharded) and sharded[-1] >= len(spec.shape) - len(normalized_shape)


def _normalized_tail(x: ShardTensor, shape: Sequence[int], weight, bias, eps: float, *, centered: bool) -> ShardTensor:
    spec, shape = x._spec, tuple(shape)
    first = spec.ndim - len(shape)
    if first < 0 or spec.shape[first:] != shape:
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape [*, {str(list(shape))[1:-1]}], but got {list(spec.shape)}"
        )
    rows = tuple(slice(start, stop) for start, stop in spec.box()[first:])
    weight, bias = (None if t is None else t[rows] for t in (weight, bias))
    plan = reduction_plan(spec, range(first, spec.ndim), keepdim=True)
    return from_local(Normalize.apply(_autocast(to_local(x)), weight, bias, plan, eps, centered)[0], spec)


def _autocast(local: Tensor) -> Tensor:
    """In float32 where autocast runs norms so (on CUDA)."""
    return local.float() if local.is_cuda and torch.is_autocast_enabled("cuda") else local


# ---------------------------------------------------------------------- group and instance norm


@shard_function(F.group_norm, torch.group_norm)
def group_norm(input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    """Communication: none if neither channels nor positions are sharded; else two all-reduces of the statistics, one
    backward. Sharded channels: their rows are first moved to the borders of groups, and back."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    x = _complete(input)
    spec = x._spec
    if spec.ndim < 2 or num_groups < 1 or spec.shape[1] % num_groups:
        raise RuntimeError(
            f"Expected number of channels in input to be divisible by num_groups, "
            f"but got input of shape {list(spec.shape)} and num_groups={num_groups}"
        )
    weight, bias = plain_operand(weight, (spec,)), plain_operand(bias, (spec,))
    if not spec.sharded_dims or spec.sharded_dims[-1] == 0:
        local = to_local(x)
        if not local.numel():
            return from_local(_affine(local, _by_channel(weight, spec), _by_channel(bias, spec)), spec)
        return from_local(F.group_norm(local, num_groups, weight, bias, eps), spec)
    inner = spec.shape[1] // num_groups
    shape = (spec.shape[0], num_groups, inner, *spec.shape[2:])
    if spec.sizes[1] is None:
        grouped = spec.cached(("groups", num_groups), lambda: spec.with_dims(shape, (0, None, None, *range(2, spec.ndim))))
        local = to_local(x).reshape(grouped.local_shape)
    else:
        x = x.reshape(shape)
        grouped, local = x._spec, to_local(x)
    plan = reduction_plan(grouped, range(2, grouped.ndim), keepdim=True)
    rows = slice(*grouped.box()[1])
    weight, bias = (
        None if t is None else t.view(num_groups, inner)[rows].reshape(-1, inner, *(1,) * (spec.ndim - 2)) for t in (weight, bias)
    )
    result = Normalize.apply(_autocast(local), weight, bias, plan, eps, True)[0]
    if spec.sizes[1] is None:
        return from_local(result.reshape(spec.local_shape), spec)
    return redistribute(from_local(result, grouped).reshape(spec.shape), spec)


@shard_function(F.instance_norm)
def instance_norm(input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5):
    """Communication: none if no position is sharded; else two all-reduces of the statistics, one backward. Running
    statistics of a sharded batch: one all-reduce each."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if prod(input._spec.shape[2:]) == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {torch.Size(input._spec.shape)}")
    return _by_instance(input, running_mean, running_var, weight, bias, momentum, eps)


def _by_instance(input: ShardTensor, running_mean, running_var, weight, bias, momentum: float, eps: float) -> ShardTensor:
    x = _complete(input)
    spec = x._spec
    weight, bias = (_by_channel(plain_operand(t, (spec,)), spec) for t in (weight, bias))
    plan = reduction_plan(spec, range(2, spec.ndim), keepdim=True)
    result, mean, squares = Normalize.apply(_autocast(to_local(x)), weight, bias, plan, eps, True)
    if running_mean is not None:
        batch = reduction_plan(plan.out, 0)
        for running, value in ((running_mean, mean), (running_var, squares / (plan.count - 1))):
            total = value.sum(0)
            total = comm.all_reduce(total, batch.group) if batch.axes else total
            _update(running, total / spec.shape[0], momentum, spec)
    return from_local(result, spec)


@shard_function(torch.instance_norm)
def torch_instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled=True):
    """As `F.instance_norm`."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    return _by_instance(input, running_mean, running_var, weight, bias, momentum, eps)


# ---------------------------------------------------------------------- batch norm


@shard_function(F.batch_norm)
def batch_norm(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """Training statistics are those of the whole tensor. Communication: none in evaluation; in training two all-reduces of
    the statistics over the axes that shard batch or positions, one backward; sharded channels: one gather of each running buffer."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    x = _complete(input)
    spec = x._spec
    weight, bias = (_by_channel(plain_operand(t, (spec,)), spec) for t in (weight, bias))
    local = to_local(x)
    if not training:
        if not local.numel():
            return from_local(_affine(local, weight, bias), spec)
        own = slice(*spec.box()[1])
        flat = [None if t is None else t.reshape(-1) for t in (weight, bias)]
        running = [None if t is None else t[own] for t in (running_mean, running_var)]
        result = F.batch_norm(local, *running, *flat, False, momentum, eps)
        if result.requires_grad and local.shape[0] == 1 and local.device.type == "cpu" and not torch.compiler.is_compiling():
            result.register_hook(torch.Tensor.contiguous)  # torch 2.13 and 2.14 misread a transposed gradient of one sample here
        return from_local(result, spec)
    dims = (0, *range(2, spec.ndim))
    plan = reduction_plan(spec, dims, keepdim=True)
    if plan.count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {torch.Size(spec.shape)}")
    result, mean, squares = Normalize.apply(local, weight, bias, plan, eps, True)
    if running_mean is not None:
        _update(running_mean, mean, momentum, spec)
        _update(running_var, squares / (plan.count - 1), momentum, spec)
    return from_local(result, spec)


@shard_function(torch.batch_norm)
def torch_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True):
    """As `F.batch_norm`."""
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


@shard_rule(aten.batch_norm_stats.default)
def sync_batch_norm(op, args, kwargs):
    """Refused: `nn.SyncBatchNorm` gathers whole tensors' statistics over a group of its own."""
    raise MissingShardPatch(
        f"nn.SyncBatchNorm on {args[0]._spec.describe()}",
        "it combines the statistics of whole tensors over its own process group",
        "use nn.BatchNorm: on a ShardTensor its statistics are those of the whole tensor, over all ranks of the mesh",
    )


def _by_channel(value: Tensor | None, spec: ShardTensorSpec) -> Tensor | None:
    """This rank's channels of a weight, shaped to broadcast against its shard."""
    if value is None:
        return None
    if spec.sizes[1] is not None:
        value = value[slice(*spec.box()[1])]
    return value.view(-1, *(1,) * (spec.ndim - 2))


def _affine(local: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm of a shard without elements: it has only its part in the graph, with zero gradients."""
    result = local if weight is None else local * weight
    return (result if bias is None else result + bias).to(local.dtype)


def _update(running: Tensor, value: Tensor, momentum: float, spec: ShardTensorSpec) -> None:
    """Move a running buffer towards this rank's channels of a statistic."""
    value = value.reshape(-1)
    if spec.sizes[1] is not None:
        value = comm.all_gather(value, 0, spec.sizes[1], spec_group(spec, spec.mesh_dims_of(1)))
    with torch.no_grad():
        running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


# ---------------------------------------------------------------------- local response norm


@shard_function(F.local_response_norm)
def local_response_norm(input, size, alpha=1e-4, beta=0.75, k=1.0):
    """Communication: none if channels are unsharded; else they are gathered, and the result is split again."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    spec = input._spec.gradient()
    axes = spec.mesh_dims_of(1) if spec.ndim > 1 else ()
    x = redistribute(input, spec.replicate(axes) if axes else spec)
    local = to_local(x)
    result = F.local_response_norm(local, size, alpha, beta, k) if local.numel() else local * 1
    return redistribute(from_local(result, x._spec), spec)

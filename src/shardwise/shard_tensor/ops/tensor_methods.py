"""Methods that concern the tensor object itself: its gradient flag, its value as Python numbers, its memory."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.shard_tensor.fallback import leaf_full
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.tensor import ShardTensor, align_gradient, redistribute

aten = torch.ops.aten
_NoTorchFunction = torch._C.DisableTorchFunctionSubclass


@shard_function(Tensor.requires_grad_)
def requires_grad_(x: ShardTensor, requires_grad: bool = True) -> ShardTensor:
    with _NoTorchFunction():
        new = requires_grad and not x.requires_grad
        Tensor.requires_grad_(x, requires_grad)
    return align_gradient(x) if new and x.is_leaf else x


@shard_function(Tensor.requires_grad.__set__)
def set_requires_grad(x: ShardTensor, value: bool) -> None:
    requires_grad_(x, value)


def _laid_like(output, gradient):
    """A plain gradient of a `ShardTensor` output, taken as the whole gradient on every rank."""
    if isinstance(output, ShardTensor) and isinstance(gradient, Tensor) and not isinstance(gradient, ShardTensor):
        return redistribute(gradient, output._spec.gradient())
    return gradient


def _all_laid_like(outputs, gradients):
    if gradients is None or isinstance(gradients, Tensor):
        return _laid_like(outputs[0] if isinstance(outputs, list | tuple) else outputs, gradients)
    outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
    return type(gradients)(_laid_like(o, g) for o, g in zip(outputs, gradients, strict=True))


@shard_function(Tensor.backward)
def backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None):
    with _NoTorchFunction():
        return Tensor.backward(self, _laid_like(self, gradient), retain_graph, create_graph, inputs)


@shard_function(torch.autograd.backward)
def autograd_backward(tensors, grad_tensors=None, *args, **kwargs):
    with _NoTorchFunction():
        return torch.autograd.backward(tensors, _all_laid_like(tensors, grad_tensors), *args, **kwargs)


@shard_function(torch.autograd.grad)
def autograd_grad(outputs, inputs, grad_outputs=None, *args, **kwargs):
    with _NoTorchFunction():
        return torch.autograd.grad(outputs, inputs, _all_laid_like(outputs, grad_outputs), *args, **kwargs)


@shard_rule(aten._local_scalar_dense.default)
def item(op, args, kwargs):
    """The global value. Communication: none if replicated, else what completing it takes; call it on all ranks."""
    return op(leaf_full(args[0]))


@shard_function(Tensor.tolist)
def tolist(x: ShardTensor):
    """The global values. Communication: as `full_tensor`."""
    return leaf_full(x).tolist()


@shard_function(Tensor.numpy, Tensor.__array__)
def numpy(x: ShardTensor, *args, **kwargs):
    raise TypeError(
        f"a ShardTensor of shape {tuple(x._spec.shape)} has no NumPy array of its own, its memory lies on several ranks: "
        "use x.full_tensor().numpy() for the whole (on all ranks) or x.to_local().numpy() for this rank's shard"
    )


@shard_rule(aten.equal.default)
def equal(op, args, kwargs):
    """Whether both hold the same values, decided on all ranks together."""
    a, b = (leaf_full(x) if isinstance(x, ShardTensor) else x for x in args)
    return op(a, b)


@shard_rule(aten.is_same_size.default)
def is_same_size(op, args, kwargs):
    return tuple(args[0].shape) == tuple(args[1].shape)


@shard_rule(aten.is_pinned.default)
def is_pinned(op, args, kwargs):
    return op(args[0]._local_tensor)

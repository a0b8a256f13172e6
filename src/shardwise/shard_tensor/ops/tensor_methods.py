"""Methods that concern the tensor object itself: its gradient flag, its value as Python numbers, its memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

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


# Backward passes run on gradient edges: given tensors, torch would run them with tensor subclasses switched off, and the
# handlers would be missing where an activation checkpoint computes its forward pass again.


def _edge(value):
    """The place of a `ShardTensor` in the graph; any other value, and a tensor outside of any graph, as it is."""
    if not isinstance(value, ShardTensor):
        return value
    with _NoTorchFunction():
        return get_gradient_edge(value) if value.requires_grad else value


def _edges(values):
    if values is None or isinstance(values, Tensor):
        return _edge(values)
    return tuple(_edge(value) for value in values)


def _laid_like(output, gradient):
    """The gradient of a `ShardTensor` output: a plain one is the whole gradient on every rank, none is 1 for a scalar."""
    if not isinstance(output, ShardTensor):
        return gradient
    if gradient is None and output.numel() == 1:
        return torch.ones_like(output)
    if isinstance(gradient, Tensor) and not isinstance(gradient, ShardTensor):
        return redistribute(gradient, output._spec.gradient())
    return gradient


def _all_laid_like(outputs, gradients):
    outputs = outputs if isinstance(outputs, list | tuple) else (outputs,)
    gradients = gradients if isinstance(gradients, list | tuple) else (gradients,) * (len(outputs) if gradients is None else 1)
    return tuple(_laid_like(o, g) for o, g in zip(outputs, gradients, strict=True))


@shard_function(torch.autograd.backward)
def autograd_backward(tensors, grad_tensors=None, retain_graph=None, create_graph=False, grad_variables=None, inputs=None):
    gradients = _all_laid_like(tensors, grad_tensors)
    tensors, inputs = _edges(tensors), _edges(inputs)
    if _has_shard_tensor(tensors, inputs):  # without a graph: torch says so
        with _NoTorchFunction():
            return torch.autograd.backward(tensors, gradients, retain_graph, create_graph, grad_variables, inputs)
    return torch.autograd.backward(tensors, gradients, retain_graph, create_graph, grad_variables, inputs)


@shard_function(Tensor.backward)
def backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None):
    return autograd_backward(self, gradient, retain_graph, create_graph, inputs=inputs)


@shard_function(torch.autograd.grad)
def autograd_grad(outputs, inputs, grad_outputs=None, create_graph=False, allow_unused=False, materialize_grads=False, **kwargs):
    gradients = _all_laid_like(outputs, grad_outputs)
    edges = _edges(outputs), _edges(inputs)
    options = {"create_graph": create_graph, "allow_unused": allow_unused or materialize_grads, **kwargs}
    if _has_shard_tensor(*edges):
        with _NoTorchFunction():
            return torch.autograd.grad(outputs, inputs, gradients, **options)
    result = torch.autograd.grad(*edges, gradients, **options)
    if materialize_grads:
        return tuple(torch.zeros_like(x, requires_grad=create_graph) if g is None else g for g, x in zip(result, inputs, strict=True))
    return result


def _has_shard_tensor(*groups) -> bool:
    return any(isinstance(value, ShardTensor) for group in groups for value in (group if isinstance(group, tuple) else (group,)))


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

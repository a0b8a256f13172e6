"""Methods that concern the tensor object itself: its gradient flag, its value as Python numbers, its memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from shardwise.errors import MissingShardPatch
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


# torch's own entries to autograd would run the whole backward pass with tensor subclasses switched off, and the handlers
# would be missing where an activation checkpoint computes its forward pass again. So the engine is called from here.


def _as_tuple(values) -> tuple:
    return () if values is None else tuple(values) if isinstance(values, list | tuple) else (values,)


def _gradients(outputs: tuple, gradients) -> tuple:
    """One gradient for each output: a plain one of a `ShardTensor` is the whole gradient on every rank, none is 1 for a scalar."""
    given = _as_tuple(gradients) or (None,) * len(outputs)
    if len(given) != len(outputs):
        raise RuntimeError(f"got {len(outputs)} tensors and {len(given)} gradients")
    return tuple(_gradient(output, gradient) for output, gradient in zip(outputs, given, strict=True))


def _gradient(output: Tensor, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        if output.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return torch.ones_like(output)
    if gradient.shape != output.shape:
        raise RuntimeError(f"Mismatch in shape: the gradient has shape {tuple(gradient.shape)}, the output {tuple(output.shape)}")
    if isinstance(output, ShardTensor) and not isinstance(gradient, ShardTensor):
        return redistribute(gradient, output._spec.gradient())
    return gradient


@shard_function(torch.autograd.backward)
def autograd_backward(tensors, grad_tensors=None, retain_graph=None, create_graph=False, grad_variables=None, inputs=None):
    outputs = _as_tuple(tensors)
    gradients = _gradients(outputs, grad_tensors if grad_variables is None else grad_variables)
    retain_graph = create_graph if retain_graph is None else retain_graph
    _engine_run_backward(outputs, gradients, retain_graph, create_graph, _as_tuple(inputs), allow_unreachable=True, accumulate_grad=True)


@shard_function(Tensor.backward)
def backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None):
    autograd_backward(self, gradient, retain_graph, create_graph, inputs=inputs)


@shard_function(torch.autograd.grad)
def autograd_grad(
    outputs,
    inputs,
    grad_outputs=None,
    retain_graph=None,
    create_graph=False,
    only_inputs=True,
    allow_unused=None,
    is_grads_batched=False,
    materialize_grads=False,
):
    if is_grads_batched:
        raise MissingShardPatch(
            "torch.autograd.grad with is_grads_batched=True", "a ShardTensor has no batched gradients", "call it in a loop"
        )
    outputs, inputs = _as_tuple(outputs), _as_tuple(inputs)
    gradients = _gradients(outputs, grad_outputs)
    retain_graph = create_graph if retain_graph is None else retain_graph
    unused = materialize_grads if allow_unused is None else allow_unused
    result = _engine_run_backward(outputs, gradients, retain_graph, create_graph, inputs, unused, accumulate_grad=False)
    if materialize_grads:
        return tuple(torch.zeros_like(x, requires_grad=create_graph) if g is None else g for g, x in zip(result, inputs, strict=True))
    return result


@shard_function(Tensor.data.__set__)
def set_data(x: ShardTensor, value: Tensor) -> None:
    """Take over the shard and layout of `value`, of the same shape and dtype."""
    if not isinstance(value, ShardTensor) or tuple(value._spec.shape) != tuple(x._spec.shape) or value._spec.dtype is not x._spec.dtype:
        raise TypeError(
            f"x.data of a ShardTensor ({x._spec.describe()}) can be set to a ShardTensor of that shape and dtype only, not to "
            f"{type(value).__name__} of shape {tuple(value.shape)}: use x.copy_(value)"
        )
    x._local_tensor, x._spec = value._local_tensor, value._spec


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

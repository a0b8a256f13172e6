"""Matrix products: linear, matmul, einsum and their kin. The layouts come from `contract.py`.

Communication: none while the operands agree; a pending sum where a split dim is summed; the smaller operand is gathered
where two operands split different dims over one axis. Backward: the gradients of replicated weights are summed.
"""

from __future__ import annotations

import string

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.shard_tensor.contract import Letters, local_operands, local_values, plan
from shardwise.shard_tensor.promote import again_operand, contributed, one_node, plain_operand, separate_nodes, weight_operand
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, needs_grad, redistribute, to_local

aten = torch.ops.aten
_NoTorchFunction = torch._C.DisableTorchFunctionSubclass


# ---------------------------------------------------------------------- linear


@shard_function(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(input, ShardTensor) and type(weight) is not ShardTensor:
        spec = input._spec
        if not spec.partial_mesh_dims and spec.sizes[-1] is None and type(bias) is not ShardTensor:
            return _linear_whole_features(input, weight, bias)
    out = matmul(input, weight.transpose(0, 1) if weight.ndim == 2 else weight)
    return out if bias is None else out + bias


def _linear_whole_features(x: ShardTensor, weight: Tensor, bias: Tensor | None) -> ShardTensor:
    """Rows are split, features are whole: every rank multiplies its own rows. Communication: none forward."""
    spec = x._spec
    features = weight.shape[0] if weight.ndim == 2 else None
    out = spec.cached(("linear", features), lambda: _features(spec, features))
    if torch.is_grad_enabled():
        if separate_nodes(x._local_tensor):
            weight, bias = plain_operand(weight, (spec,)), plain_operand(bias, (spec,))
            return from_local(F.linear(to_local(x), weight, bias), out)
        weight, weight_use = weight_operand(weight, spec)
        bias, bias_use = weight_operand(bias, spec)
        if weight.requires_grad or needs_grad(x) or (bias is not None and bias.requires_grad):
            with _NoTorchFunction():
                return _linear(x, weight, bias, out, weight_use, bias_use)
    else:
        weight, bias = plain_operand(weight, (spec,)), plain_operand(bias, (spec,))
    return ShardTensor(F.linear(x._local_tensor, weight, bias), out)


def _features(spec: ShardTensorSpec, features: int | None) -> ShardTensorSpec:
    if features is None:
        return spec.with_dims(spec.shape[:-1], range(spec.ndim - 1))
    return spec.with_dims((*spec.shape[:-1], features), range(spec.ndim))


class _Linear(torch.autograd.Function):
    """One node for the whole op: what `to_local`, `F.linear` and `from_local` would record as three."""

    @staticmethod
    def forward(ctx, x: ShardTensor, weight: Tensor, bias: Tensor | None, out: ShardTensorSpec, weight_use, bias_use) -> ShardTensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.out, ctx.uses = out, (weight_use, bias_use)
        return ShardTensor(F.linear(x._local_tensor, weight, bias), out)

    @staticmethod
    def backward(ctx, grad: ShardTensor):
        x, weight, bias = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        weight_use, bias_use = ctx.uses
        grad = redistribute(grad, ctx.out)
        grad_x = grad_weight = grad_bias = None
        if torch.is_grad_enabled():  # second order: the same in differentiable steps
            weight, bias = again_operand(weight_use, weight), again_operand(bias_use, bias)
            inputs = [t for t, wanted in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if wanted]
            again = from_local(F.linear(to_local(x), weight, bias), ctx.out)
            found = iter(torch.autograd.grad(again, inputs, grad, create_graph=True))
            grad_x, grad_weight, grad_bias = (next(found) if wanted else None for wanted in (wants_x, wants_weight, wants_bias))
        else:
            local = grad._local_tensor
            rows = local if local.ndim == 2 and weight.ndim == 2 else local.reshape(-1, weight.shape[0] if weight.ndim == 2 else 1)
            if wants_x:
                grad_x = ShardTensor(local @ weight if weight.ndim == 2 else local.unsqueeze(-1) * weight, x._spec)
            if wants_weight:
                inputs = x._local_tensor
                grad_weight = rows.t() @ (inputs if inputs.ndim == 2 else inputs.reshape(-1, inputs.shape[-1]))
                if weight.ndim == 1:
                    grad_weight = grad_weight.view(weight.shape)
            if wants_bias:
                grad_bias = rows.sum(0) if bias.ndim == 1 else rows.sum()
        return grad_x, contributed(weight_use, grad_weight), contributed(bias_use, grad_bias), None, None, None


_linear = one_node(_Linear)


# ---------------------------------------------------------------------- matmul and einsum


def _matmul_letters(a: Tensor, b: Tensor) -> tuple[Letters, Letters, Letters]:
    """Letters of `a`, `b` and `a @ b` as torch.matmul pairs their dims; a size-1 dim that broadcasts has none."""
    batch = max(a.ndim, b.ndim, 2) - 2
    names = [chr(ord("A") + i) for i in range(batch)]

    def batch_letters(x: Tensor, other: Tensor) -> list[str | None]:
        own = []
        for i in range(x.ndim - 2):
            at = batch - (x.ndim - 2) + i
            j = other.ndim - 2 - (x.ndim - 2) + i
            broadcast = x.shape[i] == 1 and j >= 0 and other.ndim > 2 and other.shape[j] != 1
            own.append(None if broadcast else names[at])
        return own

    left = ["k"] if a.ndim == 1 else [*batch_letters(a, b), "n", "k"]
    right = ["k"] if b.ndim == 1 else [*batch_letters(b, a), "k", "m"]
    out = [*names[:batch], *(["n"] if a.ndim > 1 else []), *(["m"] if b.ndim > 1 else [])]
    return tuple(left), tuple(right), tuple(out)


def _check_inner(a: Tensor, b: Tensor) -> None:
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise RuntimeError(f"matmul: shapes {tuple(a.shape)} and {tuple(b.shape)} do not fit, {a.shape[-1]} against {inner}")


@shard_function(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.mv, Tensor.mv)
def matmul(input: Tensor, other: Tensor | None = None, *, mat2: Tensor | None = None, vec: Tensor | None = None) -> Tensor:
    """`mat2` and `vec` are what `mm`, `bmm` and `mv` call `other`; torch has checked that one of the three is given."""
    return _product(input, next(t for t in (other, mat2, vec) if t is not None), torch.matmul)


@shard_function(Tensor.__rmatmul__)
def rmatmul(self: Tensor, other: Tensor) -> Tensor:
    return _product(other, self, torch.matmul)


def _product(a: Tensor, b: Tensor, local_op) -> ShardTensor:
    if not a.ndim or not b.ndim:
        return NotImplemented
    _check_inner(a, b)
    left, right, names = _matmul_letters(a, b)
    contraction = plan((a, b), (left, right))
    local = local_op(*local_operands(contraction, (a, b)))
    shape = (
        torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + (a.shape[-2:-1] if a.ndim > 1 else ()) + (b.shape[-1:] if b.ndim > 1 else ())
    )
    return from_local(local, contraction.result(names, shape, local.dtype))


@shard_function(torch.einsum)
def einsum(equation, *operands):
    if not isinstance(equation, str):
        return NotImplemented
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    inputs, output = _einsum_letters(equation, operands)
    operands = tuple(_whole_diagonals(x, names) for x, names in zip(operands, inputs, strict=True))
    contraction = plan(operands, inputs)
    local = torch.einsum(equation, *local_operands(contraction, operands))
    size = {name: n for x, names in zip(operands, inputs, strict=True) for name, n in zip(names, x.shape, strict=True) if name}
    spread = iter(torch.broadcast_shapes(*(tuple(x.shape[i] for i, n in enumerate(names) if n is None or n.startswith("."))
                                           for x, names in zip(operands, inputs, strict=True))))  # fmt: skip
    shape = [next(spread) if name.startswith(".") else size[name] for name in output]
    return from_local(local, contraction.result(output, shape, local.dtype))


def _einsum_letters(equation: str, operands) -> tuple[list[Letters], Letters]:
    """Letters of every operand and of the result. Dims under `...` are named `.0`, `.1`, ... from the right; one of size 1
    that broadcasts has none."""
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise ValueError(f"einsum {equation!r} names {len(terms)} operands, got {len(operands)}")
    dots = [x.ndim - (len(term) - 3) if "..." in term else 0 for term, x in zip(terms, operands, strict=True)]
    width = max(dots)
    spread = [1] * width
    for term, x, count in zip(terms, operands, dots, strict=True):
        at = term.find("...")
        for i in range(count):
            spread[width - count + i] = max(spread[width - count + i], x.shape[at + i])
    inputs: list[Letters] = []
    for term, x, count in zip(terms, operands, dots, strict=True):
        before, _, after = term.partition("...")
        names: list[str | None] = [*before]
        for i in range(count):
            at = width - count + i
            names.append(None if x.shape[len(before) + i] == 1 and spread[at] != 1 else f".{width - at}")
        names += after
        if len(names) != x.ndim:
            raise ValueError(f"einsum {equation!r}: operand of shape {tuple(x.shape)} does not match {term!r}")
        inputs.append(tuple(names))
    dotted = [f".{width - at}" for at in range(width)]
    if arrow:
        before, _, after = right.partition("...")
        return inputs, (*before, *(dotted if "..." in right else ()), *after)
    counts = {c: left.count(c) for c in string.ascii_letters if c in left}
    return inputs, (*dotted, *sorted(c for c, n in counts.items() if n == 1))


def _whole_diagonals(x: Tensor, names: Letters) -> Tensor:
    """A dim whose letter repeats within one operand (a diagonal) is made whole."""
    if not isinstance(x, ShardTensor):
        return x
    axes = [a for dim, n in enumerate(names) if names.count(n) > 1 and n is not None for a in x._spec.mesh_dims_of(dim)]
    return redistribute(x, x._spec.replicate(sorted(set(axes)))) if axes else x


_FACTORS = ("mat1", "mat", "batch1", "mat2", "vec", "batch2")  # what torch calls them, in order


@shard_function(torch.addmm, Tensor.addmm, torch.addmv, Tensor.addmv, torch.baddbmm, Tensor.baddbmm)
def add_product(input: Tensor, *factors: Tensor, beta=1, alpha=1, **named: Tensor) -> Tensor:
    a, b = (*factors, *(named[name] for name in _FACTORS if name in named))
    product = torch.matmul(a, b)
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (input if beta == 1 else input * beta)


# ---------------------------------------------------------------------- below autograd


def _contract_values(op, operands, letters, names) -> ShardTensor:
    contraction = plan(operands, letters)
    local = op(*local_values(contraction, operands))
    size = {n: s for x, own in zip(operands, letters, strict=True) for n, s in zip(own, x.shape, strict=True)}
    return ShardTensor(local, contraction.result(names, [size[n] for n in names], local.dtype))


_LETTERS = {
    aten.mm.default: (("n", "k"), ("k", "m"), ("n", "m")),
    aten.bmm.default: (("A", "n", "k"), ("A", "k", "m"), ("A", "n", "m")),
    aten.mv.default: (("n", "k"), ("k",), ("n",)),
    aten.dot.default: (("k",), ("k",), ()),
    aten.vdot.default: (("k",), ("k",), ()),
}


@shard_rule(*_LETTERS)
def product_rule(op, args, kwargs):
    left, right, names = _LETTERS[op]
    return _contract_values(op, args, (left, right), names)


_ADDED = {aten.addmm.default: aten.mm.default, aten.addmv.default: aten.mv.default, aten.baddbmm.default: aten.bmm.default}


@shard_rule(*_ADDED)
def added_product_rule(op, args, kwargs):
    bias, a, b = args
    product = _ADDED[op](a, b)
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    product = product if alpha == 1 else aten.mul.Scalar(product, alpha)
    return product if beta == 0 else aten.add.Tensor(product, bias if beta == 1 else aten.mul.Scalar(bias, beta))


@shard_rule(aten.linear.default)
def linear_rule(op, args, kwargs):
    """Reached when a compiled graph or a library calls the operator itself. Communication: as `F.linear`."""
    return linear(*args, **kwargs)

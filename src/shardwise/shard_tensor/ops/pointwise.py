"""Pointwise ops: every element from the elements at its own place.

Operands in one layout need no communication. Different layouts are brought together by moving the cheaper operands;
plain tensors count as replicated, so each rank uses its own rows of them. A pending sum stays pending through ops that
are linear in it (`LINEAR`), and is resolved before any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardwise.errors import MissingShardPatch
from shardwise.shard_tensor import registry
from shardwise.shard_tensor.aliases import after_write, check_writable, complete_in_place, replace_shard
from shardwise.shard_tensor.redistribute import moved_bytes, redistribute_local
from shardwise.shard_tensor.registry import call_function
from shardwise.shard_tensor.spec import ShardTensorSpec, contiguous_stride, iterated_stride
from shardwise.shard_tensor.tensor import ShardTensor

aten = torch.ops.aten
_pointwise_tag = torch.Tag.pointwise
_NoTorchFunction = torch._C.DisableTorchFunctionSubclass
_NO_SCALARS = (Tensor, list, tuple)

# Pointwise operators that do not carry torch's own tag.
UNTAGGED = {
    aten._to_copy.default,
    aten.clone.default,
    aten.copy.default,
    aten.copy_.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.floor_divide_.Tensor,
    aten.floor_divide_.Scalar,
    aten.gelu_backward.default,
    aten.native_dropout_backward.default,
    aten.isneginf.default,
    aten.isposinf.default,
    aten.nan_to_num.default,
    aten.where.self,
    aten.view_as_real_copy.default,
    aten._conj.default,
    aten._neg_view.default,
    aten._conj_physical.default,
    aten.conj_physical.default,
    aten.angle.default,
    aten.prelu.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.mish_backward.default,
    aten.softplus_backward.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
    aten.hardtanh_backward.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.logit_backward.default,
    aten.threshold_backward.default,
    aten.silu_backward.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default,
    aten.hardswish.default,
    aten.rsub.Tensor,
    aten.frexp.Tensor,
    aten.softshrink_backward.default,
    aten.hardshrink_backward.default,
}

# Linear in every argument together: all operands pending (or zero elsewhere) give a pending result.
ADDITIVE = {aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor, aten.rsub.Tensor}
# Linear in each single argument: one pending operand gives a pending result.
LINEAR = {aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar}
# Linear in the first argument.
LINEAR_FIRST = {
    aten.div.Tensor,
    aten.div.Scalar,
    aten.div_.Tensor,
    aten.div_.Scalar,
    aten.neg.default,
    aten.neg_.default,
    aten.clone.default,
    aten._to_copy.default,
    aten._conj.default,
    aten.conj_physical.default,
}


_IN_PLACE: set = set()


def is_pointwise(op) -> bool:
    if op._schema.is_mutable:
        _IN_PLACE.add(op)
    form = _new_tensor_form(op)
    if op in UNTAGGED or form in UNTAGGED:
        return True
    tagged = _pointwise_tag in op.tags or _pointwise_tag in form.tags
    return tagged and torch.Tag.nondeterministic_seeded not in op.tags and not op._schema.name.endswith("dropout")


def _new_tensor_form(op):
    """The form of an in-place operator that returns a new tensor; torch tags many as pointwise in that form alone."""
    name = op._schema.name.partition("::")[2]
    if not op._schema.is_mutable or name.startswith("_") or not name.endswith("_"):
        return op
    packet = getattr(aten, name[:-1], None)
    return getattr(packet, op._overloadname, op) if packet is not None else op


def pointwise_rule(op, args: tuple, kwargs: dict):
    """Communication: none for operands in one layout; else the cheaper operands are redistributed."""
    alike = None if kwargs else _alike(args)
    if alike is None or alike[0].partial_mesh_dims:
        return _general(op, args, kwargs)
    spec, local = alike
    if op in _IN_PLACE:
        check_writable(args[0])
        op(*local)
        after_write(args[0])
        return args[0]
    return _wrap(op._op(*local), spec)


def _result_stride(operands: Sequence[Tensor], shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    for x in operands:
        spec = (x.shape, x._spec.stride if isinstance(x, ShardTensor) else x.stride())
        own = [0 if n == 1 and m != 1 else step for n, step, m in zip(*spec, shape[len(shape) - x.ndim :], strict=True)]
        strides.append((*[0] * (len(shape) - x.ndim), *own))
    return iterated_stride(shape, strides)


def _alike(args: Sequence) -> tuple[ShardTensorSpec, list] | None:
    """The spec of a new tensor made of operands that lie alike, though perhaps in other memory orders, and their shards.

    None if they do not lie alike or if anything but scalars is among them.
    """
    spec, local, reordered = None, [], False
    for a in args:
        if isinstance(a, ShardTensor):
            own = a._spec
            if spec is None:
                spec = own
            elif spec is not own:
                if spec.sizes != own.sizes or spec.placements != own.placements or spec.shape != own.shape:
                    return None
                reordered = reordered or spec.stride != own.stride
            local.append(a._local_tensor)
        elif isinstance(a, _NO_SCALARS):
            return None
        else:
            local.append(a)
    if spec is None:
        return None
    if reordered:
        return spec.with_stride(iterated_stride(spec.shape, [a._spec.stride for a in args if isinstance(a, ShardTensor)])), local
    return spec.computed, local


def _wrap(local, spec: ShardTensorSpec):
    if isinstance(local, Tensor):
        return ShardTensor(local, spec)
    return type(local)(ShardTensor(part, spec) for part in local)


def _general(op, args: tuple, kwargs: dict):
    written = _written(op, args, kwargs)
    values = [*args, *kwargs.values()]
    operands = [v for v in values if isinstance(v, Tensor)]
    shape = torch.broadcast_shapes(*(tuple(o.shape) for o in operands)) if len(operands) > 1 else tuple(operands[0].shape)
    if written is not None:
        if not isinstance(written, ShardTensor):
            raise MissingShardPatch(
                f"{op} writes into a plain tensor of shape {tuple(written.shape)} from a ShardTensor",
                "each rank would keep only its own part",
                "write full_tensor() of the result, or make the destination a ShardTensor",
            )
        check_writable(written)
        if "out" in kwargs or op._schema.name.endswith(".out"):
            return _into_out(op, args, kwargs, written, shape)
        if written._spec.partial_mesh_dims and op is not aten.zero_.default:
            complete_in_place(written)
        target = written._spec
    else:
        target = choose_layout(op, operands, shape).with_stride(
            contiguous_stride(shape)
            if kwargs.get("memory_format", torch.preserve_format) is torch.contiguous_format
            else _result_stride(operands, shape)
        )
    convert = _converter(target, len(shape))
    local_args = [convert(a) if isinstance(a, Tensor) else a for a in args]
    local_kwargs = {k: convert(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    if op is aten._to_copy.default:
        local_kwargs.pop("memory_format", None)
    result = op(*local_args, **local_kwargs)
    if written is not None:
        after_write(written)
        return written
    return _wrap(result, target)


def _written(op, args: tuple, kwargs: dict):
    """The argument that `op` writes into, if any."""
    if not op._schema.is_mutable:
        return None
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[index] if index < len(args) else kwargs.get(argument.name)
    return None


def _into_out(op, args: tuple, kwargs: dict, out: ShardTensor, shape: tuple[int, ...]):
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"{op}: out= has shape {tuple(out.shape)} but the result has {tuple(shape)}: pass an out of that shape")
    inputs = {k: v for k, v in kwargs.items() if k != "out"}
    operands = [v for v in [*args, *inputs.values()] if isinstance(v, Tensor)]
    target = out._spec.gradient()
    convert = _converter(target, len(shape))
    local = [convert(a) if isinstance(a, Tensor) else a for a in args]
    inputs = {k: convert(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    del operands
    if target is not out._spec:
        replace_shard(out, out._local_tensor, target)
    op(*local, **inputs, out=out._local_tensor)
    after_write(out)
    return out


# ---------------------------------------------------------------------- layouts


def _converter(target: ShardTensorSpec, ndim: int):
    """A function that brings an operand to the rows of `target` (the spec of the broadcast result)."""

    def convert(value: Tensor) -> Tensor:
        own = operand_spec(value, target, ndim)
        if isinstance(value, ShardTensor):
            return redistribute_local(value._local_tensor, value._spec, own)
        return redistribute_local(value, own.replicate(), own) if own.sharded_dims else value

    return convert


def operand_spec(value: Tensor, target: ShardTensorSpec, ndim: int) -> ShardTensorSpec:
    """How an operand that broadcasts to `target` must lie: the rows of `target`, replicated where it has only one."""
    shift = ndim - value.ndim
    shape = tuple(value.shape)
    if shape == target.shape and not shift:
        return target.with_dtype(value.dtype)
    sizes = tuple(None if shape[i] == 1 and target.shape[i + shift] != 1 else target.sizes[i + shift] for i in range(len(shape)))
    placements: list[Placement] = []
    for placement in target.placements:
        if isinstance(placement, Shard):
            dim = placement.dim - shift
            placements.append(Shard(dim) if dim >= 0 and sizes[dim] is not None else Replicate())
        else:
            placements.append(placement)
    return ShardTensorSpec(target.mesh, tuple(placements), shape, sizes, value.dtype)


def choose_layout(op, operands: Sequence[Tensor], shape: tuple[int, ...]) -> ShardTensorSpec:
    """The layout of a pointwise result: that of the operand to which the others move most cheaply."""
    sharded = [o for o in operands if isinstance(o, ShardTensor)]
    candidates: list[ShardTensorSpec] = []
    for operand in sharded:
        spec = _result_spec(operand, op, operands, shape)
        if all(spec.placements != c.placements or spec.sizes != c.sizes for c in candidates):
            candidates.append(spec)
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda c: (_cost(sharded, c, len(shape)), sum(isinstance(p, Replicate) for p in c.placements)))


def _cost(sharded: Sequence[ShardTensor], target: ShardTensorSpec, ndim: int) -> int:
    total = 0
    for operand in sharded:
        own = operand_spec(operand, target, ndim)
        if operand._spec.placements != own.placements or operand._spec.sizes != own.sizes:
            total += moved_bytes(operand._spec, own)
    return total


def _result_spec(operand: ShardTensor, op, operands: Sequence[Tensor], shape: tuple[int, ...]) -> ShardTensorSpec:
    """The layout of the result if it follows `operand`."""
    spec = operand._spec
    shift = len(shape) - spec.ndim
    keep = _keeps_partial(operand, op, operands)
    placements: list[Placement] = []
    sizes: list = [None] * len(shape)
    for dim, blocks in enumerate(spec.sizes):
        if blocks is not None and (spec.shape[dim] == shape[dim + shift]):
            sizes[dim + shift] = blocks
    for placement in spec.placements:
        if isinstance(placement, Shard):
            dim = placement.dim + shift
            placements.append(Shard(dim) if sizes[dim] is not None else Replicate())
        elif isinstance(placement, Partial) and not keep:
            placements.append(Replicate())
        else:
            placements.append(placement)
    return ShardTensorSpec(spec.mesh, tuple(placements), tuple(shape), tuple(sizes), spec.dtype)


def _keeps_partial(operand: ShardTensor, op, operands: Sequence[Tensor]) -> bool:
    partial = operand._spec.partial_mesh_dims
    if not partial or any(operand._spec.placements[i].reduce_op != "sum" for i in partial):
        return False
    place = next(i for i, o in enumerate(operands) if o is operand)
    others = [o for i, o in enumerate(operands) if i != place]  # `y * y` has `y` among the others
    if op in ADDITIVE:
        return bool(others) and all(isinstance(o, ShardTensor) and o._spec.placements == operand._spec.placements for o in others)
    if op in LINEAR:
        return not any(isinstance(o, ShardTensor) and o._spec.partial_mesh_dims for o in others)
    if op in LINEAR_FIRST:
        if op is aten._to_copy.default:
            return operand.dtype.is_floating_point or operand.dtype.is_complex
        return operand is operands[0] and not any(isinstance(o, ShardTensor) and o._spec.partial_mesh_dims for o in others)
    return False


registry.rule_families.append((is_pointwise, pointwise_rule))


# ---------------------------------------------------------------------- the short way, where nothing is recorded

_FAST = [
    torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch.sub, Tensor.sub, Tensor.__sub__, torch.mul, Tensor.mul, Tensor.__mul__,
    Tensor.__rmul__, torch.div, Tensor.div, Tensor.__truediv__, torch.neg, Tensor.neg, Tensor.__neg__, torch.exp, Tensor.exp, torch.tanh,
    Tensor.tanh, torch.sigmoid, Tensor.sigmoid, torch.relu, Tensor.relu, torch.sqrt, Tensor.sqrt, torch.rsqrt, Tensor.rsqrt, torch.sin,
    Tensor.sin, torch.cos, Tensor.cos, torch.abs, Tensor.abs, torch.nn.functional.gelu, torch.maximum, torch.minimum,
]  # fmt: skip


def _fast(func, types, args: tuple, kwargs: dict):
    """Compute on the shards directly when all operands lie alike and autograd has nothing to record."""
    alike = None if kwargs else _alike(args)
    if alike is None:
        return call_function(func, types, args, kwargs)
    if torch.is_grad_enabled():
        with _NoTorchFunction():
            for a in args:
                if isinstance(a, ShardTensor) and a.requires_grad:
                    return func(*args)
    spec, local = alike
    if spec.partial_mesh_dims:
        return call_function(func, types, args, kwargs)
    return ShardTensor(func(*local), spec)


registry.functions.update(dict.fromkeys(_FAST, _fast))

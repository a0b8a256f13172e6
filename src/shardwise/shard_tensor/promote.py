"""A plain tensor that meets a `ShardTensor` counts as replicated; its gradient is summed over the ranks. Decided here.

Each rank sees only its own shard, so its gradient of a plain weight is one summand of the true one. The sum is made
between the ops and the weight, as part of the graph, by two nodes that leave the values alone::

    weight -> last -> first -> every op that uses it

Backward, `first` receives what this rank's ops contributed and puts it in a bucket; full buckets are summed
asynchronously while backward goes on. `last` waits and hands the sum on. Its node has the lowest priority in the
autograd engine, so it runs when nothing else is left to do, yet before the gradient reaches the weight: tensor hooks,
post-accumulate hooks, a DDP reducer and the optimizer only ever see complete gradients. Under FSDP2, which reads
gradients in the middle of backward, each sum is finished at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate
from torch.utils.weak import TensorWeakRef

from shardwise.collectives import functional as comm
from shardwise.mesh.groups import axis_group, flat_group
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local

BUCKET_BYTES = 25 * 2**20
_alias = torch.ops.aten.alias.default


def summed_dims(specs: Sequence[ShardTensorSpec]) -> tuple[int, ...]:
    """The mesh dims over which a replicated operand's gradient is a pending sum: those where any neighbour is not replicated."""
    if len(specs) == 1:
        spec = specs[0]
        return spec.cached("summed", lambda: tuple(i for i, p in enumerate(spec.placements) if not isinstance(p, Replicate)))
    mesh_ndim = specs[0].mesh.ndim
    return tuple(i for i in range(mesh_ndim) if any(not isinstance(spec.placements[i], Replicate) for spec in specs))


def promote(value: Tensor, specs: Sequence[ShardTensorSpec]) -> Tensor:
    """`value` as a replicated `ShardTensor` on the mesh of `specs`, its gradient summed; a tensor without gradient as it is."""
    if isinstance(value, DTensor):
        return ShardTensor.from_dtensor(value)
    if not value.requires_grad or not torch.is_grad_enabled():
        return value
    mesh = specs[0].mesh
    spec = ShardTensorSpec(mesh, (Replicate(),) * mesh.ndim, tuple(value.shape), (None,) * value.ndim, value.dtype, tuple(value.stride()))
    dims = summed_dims(specs)
    return _Promote.apply(sum_gradient(value, mesh, dims), spec, dims)


def plain_operand(value: Tensor | None, specs: Sequence[ShardTensorSpec]) -> Tensor | None:
    """`value`, complete and plain on this rank, for use beside local shards of `specs`; its gradient is summed.

    For handlers that compute on shards: takes plain tensors, DTensors and `ShardTensor`s (gathered if need be).
    """
    if value is None:
        return None
    if isinstance(value, DTensor):
        value = ShardTensor.from_dtensor(value)
    dims = summed_dims(specs)
    if isinstance(value, ShardTensor):
        value = redistribute(value, value._spec.replicate())
        pending = tuple(Partial() if i in dims else Replicate() for i in range(specs[0].mesh.ndim))
        return to_local(value, ShardTensorSpec(value._spec.mesh, pending, value._spec.shape, value._spec.sizes, value._spec.dtype))
    if not value.requires_grad or not torch.is_grad_enabled():
        return value
    return sum_gradient(value, specs[0].mesh, dims)


def weight_operand(value: Tensor | None, spec: ShardTensorSpec) -> tuple[Tensor | None, _Use | None]:
    """`plain_operand` for an op with a backward of its own, which saves a node for each weight.

    Returns the tensor to use and, if its gradient is a pending sum, its use: backward must return `contributed(use, summand)`.
    """
    recorded = value is not None and type(value) in _PLAIN and value.requires_grad and value.is_leaf and torch.is_grad_enabled()
    dims = summed_dims((spec,)) if recorded else ()
    if dims and averaging.owns is None and not torch.compiler.is_compiling():
        use, last, _ = _use(value, spec.mesh, dims)
        if last is not None and not use.at_once:
            return last, use
    return plain_operand(value, (spec,)), None


def one_node(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply` without its preparations for functorch transforms, which cost as much as a small op. See `separate_nodes`."""
    return super(torch.autograd.Function, function).apply


def separate_nodes(local: Tensor) -> bool:
    """Whether an op must be recorded as the steps it is made of: while tracing, transforming (functorch) or under autocast."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled(local.device.type)


def contributed(use: _Use | None, grad: Tensor | None) -> Tensor | None:
    """The gradient to return for an operand of `weight_operand`, given this rank's summand."""
    if use is None or grad is None:
        return grad
    total = use.contribute(grad)
    return grad if total is None else total


def again_operand(use: _Use | None, value: Tensor | None) -> Tensor | None:
    """An operand of `weight_operand` for a backward that is itself recorded: what flows back to it from there is a summand too."""
    if use is None or value is None:
        return value
    alias = _alias(value)
    alias.register_hook(use.contribute)
    return alias


_PLAIN = (Tensor, torch.nn.Parameter)


def _hook(alias: Tensor, hook):
    """`alias.register_hook(hook)` for a hook that is never removed, at a third of its cost. Returns the node."""
    node = alias.grad_fn
    alias._backward_hooks = {0: hook}
    node._register_hook_dict(alias)
    return node


class _Promote(torch.autograd.Function):
    """Plain to replicated. Backward: this rank's summand of the gradient, over the mesh dims `dims`."""

    @staticmethod
    def forward(ctx, value: Tensor, spec: ShardTensorSpec, dims: tuple[int, ...]) -> ShardTensor:
        ctx.spec, ctx.dims = spec, dims
        return ShardTensor(value.detach(), spec)

    @staticmethod
    def backward(ctx, grad: ShardTensor):
        return to_local(_as_summand(grad, ctx.spec, ctx.dims)), None, None


def _as_summand(grad: ShardTensor, spec: ShardTensorSpec, dims: tuple[int, ...]) -> ShardTensor:
    """A local tensor of the whole shape that, summed over `dims`, gives `grad`."""
    have = grad._spec
    others = [i for i in range(have.mesh.ndim) if i not in dims]
    if any(not isinstance(have.placements[i], Replicate) for i in others):
        grad = redistribute(grad, have.replicate(others))
        have = grad._spec
    repeated = [i for i in dims if isinstance(have.placements[i], Replicate)]
    read = tuple(Partial() if i in repeated else p for i, p in enumerate(have.gradient().placements))
    local = to_local(grad, ShardTensorSpec(have.mesh, read, have.shape, have.sizes, have.dtype, have.stride))
    for dim in have.sharded_dims:  # a shard becomes a whole with zeros elsewhere
        start, stop = have.box()[dim]
        rest = have.shape[dim] - stop
        if start or rest:
            shape = list(local.shape)
            before, after = shape.copy(), shape.copy()
            before[dim], after[dim] = start, rest
            local = torch.cat([local.new_zeros(before), local, local.new_zeros(after)], dim)
    if any(have.coordinate[i] for i in repeated):  # equal on all ranks of these dims: one of them contributes it
        local = local.masked_fill(torch.ones((), dtype=torch.bool, device=local.device), 0)
    pending = tuple(Partial() if i in dims else Replicate() for i in range(have.mesh.ndim))
    return from_local(local, ShardTensorSpec(have.mesh, pending, spec.shape, spec.sizes, local.dtype, spec.stride))


# ---------------------------------------------------------------------- summing, in buckets, behind the graph


def sum_gradient(value: Tensor, mesh, dims: tuple[int, ...]) -> Tensor:
    """`value` unchanged; its gradient is summed over the ranks along mesh dims `dims` before it reaches `value`.

    Communication: backward, one all-reduce for each bucket of gradients; for a tensor that is not a leaf, one at once.
    """
    if not dims:
        return value
    if averaging.owns is not None and averaging.owns(value):
        return _Scaled.apply(value, prod(mesh.size(i) for i in dims))
    if not value.is_leaf or torch.compiler.is_compiling():
        group = _sums(mesh).group(mesh, dims)
        return value if group is None else comm.sum_gradient(value, group)
    use, last, first = _use(value, mesh, dims)
    return value if use is None else first if first is not None else use.make_first(last)


def _use(value: Tensor, mesh, dims: tuple[int, ...]) -> tuple[_Use | None, Tensor | None, Tensor | None]:
    """The use of leaf `value` on the group of `dims` with its `last` and `first` alias, as far as they live; at least one does.

    A use is made if there is none; none is needed if the group has one rank.
    """
    sums = _sums(mesh)
    use = sums.uses.get((id(value), dims))
    if use is not None and use.serves(value):
        last, first = use.last(), use.first() if use.first is not None else None
        if last is not None or first is not None:
            return use, last, first
    group = sums.group(mesh, dims)
    if group is None:
        return None, None, None
    use = sums.uses[id(value), dims] = _Use(value, group)
    return use, use.make_last(value), None


def _sums(mesh) -> _Sums:
    sums = mesh.__dict__.get("_shardwise_sums")
    if sums is None:
        sums = mesh.__dict__["_shardwise_sums"] = _Sums()
    return sums


class _Averaging(threading.local):
    """`owns(value)`: whether a data-parallel reducer will average the gradient of `value` over the data and the domain axes.

    Set while such a model runs. An average over n ranks of n times each summand is their sum, so the reducer's one pass over
    the wire does both axes' work; a gradient that is already complete, and equal on the ranks, stays what it is.
    """

    owns = None


averaging = _Averaging()


class _Scaled(torch.autograd.Function):
    """The value; its gradient times `factor`."""

    @staticmethod
    def forward(ctx, value: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return value.detach()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.factor, None


class _Sums:
    """The weights in use on one rank's mesh, and the groups over which their gradients are summed."""

    def __init__(self) -> None:
        self.uses: dict[tuple[int, tuple[int, ...]], _Use] = {}
        self.groups: dict[tuple[int, ...], object] = {}

    def group(self, mesh, dims: tuple[int, ...]):
        """The group of `dims`, or None if it has one rank."""
        if dims not in self.groups:
            alone = all(mesh.size(i) == 1 for i in dims)
            self.groups[dims] = None if alone else axis_group(mesh, dims[0]) if len(dims) == 1 else flat_group(mesh, dims)
        return self.groups[dims]


class _Use:
    """One weight on one group: the aliases that ops use, and the gradient on its way back. Holds no tensor alive.

    All that flows back to `last` comes through `contribute`, so `finish` may replace it by the sum of the contributions.
    """

    __slots__ = ("__weakref__", "at_once", "buckets", "first", "group", "last", "memory", "value")

    def __init__(self, value: Tensor, group) -> None:
        self.value = weakref.ref(value)
        self.memory = (value.data_ptr(), value._version)
        self.group = group
        self.buckets: list[_Bucket] = []
        self.at_once = _reads_gradients_early()
        self.last: TensorWeakRef | None = None
        self.first: TensorWeakRef | None = None

    def serves(self, value: Tensor) -> bool:
        """Whether the aliases stand for `value`: the same object and memory, and no backward has passed since."""
        return self.memory is not None and self.value() is value and (value.data_ptr(), value._version) == self.memory

    def make_last(self, value: Tensor) -> Tensor:
        """The alias whose gradient is replaced by the sum just before it reaches the weight."""
        alias = _alias(value)
        if not self.at_once:
            _hook(alias, self.finish)._set_sequence_nr(0)
        self.last = TensorWeakRef(alias)
        return alias

    def make_first(self, last: Tensor) -> Tensor:
        """The alias whose gradient, complete on this rank, is handed to a bucket."""
        alias = _alias(last)
        _hook(alias, self.contribute)
        self.first = TensorWeakRef(alias)
        return alias

    def contribute(self, grad: Tensor | None) -> Tensor | None:
        """Take this rank's summand, or a part of it."""
        self.memory = None
        if grad is None:  # a second derivative that does not reach the weight
            return None
        if self.at_once or torch.is_grad_enabled():
            return comm.sum_forward(grad, self.group)
        bucket = _open_bucket(self.group, grad)
        if self.buckets and self.buckets[0].task != bucket.task:  # of an earlier backward that did not ask for this weight
            self.buckets = []
        bucket.add(self, grad)
        return None

    def finish(self, grad: Tensor) -> Tensor | None:
        """Hand the sum on; runs last."""
        buckets, self.buckets = self.buckets, []
        if not buckets or buckets[0].task != torch._C._current_graph_task_id():
            return None
        total = buckets[0].take(self)
        for bucket in buckets[1:]:
            total = total + bucket.take(self)
        return total


def _reads_gradients_early() -> bool:
    """Whether a module that FSDP2 manages is running: it reads gradients in the middle of backward.

    Modules that merely exist do not count: they are collected at other times on other ranks, which must choose alike.
    """
    if not _module_state_mapping:
        return False
    states = (state() for state in list(_module_state_mapping.values()))
    return any(type(state).__name__ == "FSDPState" and state._training_state.name != "IDLE" for state in states)


class _Bucket:
    """Gradients of one dtype and group, from one backward (`task`), summed together."""

    def __init__(self, group, task: int) -> None:
        self.group = group
        self.task = task
        self.grads: dict[_Use, Tensor] = {}
        self.bytes = 0
        self.handle = None
        self.sums: dict[_Use, Tensor] = {}

    def add(self, use: _Use, grad: Tensor) -> None:
        if use in self.grads:
            self.grads[use] = self.grads[use] + grad
            return
        self.grads[use] = grad
        use.buckets.append(self)
        self.bytes += grad.numel() * grad.element_size()
        if self.bytes >= BUCKET_BYTES:
            self.launch()

    def launch(self) -> None:
        if self.handle is not None:
            return
        flat = _flatten_dense_tensors(list(self.grads.values()))
        if len(self.grads) == 1:  # not a copy, and others may hold the same gradient
            flat = flat.clone()
        self.handle = comm.start_all_reduce(flat, self.group)

    def take(self, use: _Use) -> Tensor:
        self.launch()
        if not self.sums:
            sums = _unflatten_dense_tensors(self.handle.wait(), list(self.grads.values()))
            self.sums = dict(zip(self.grads, sums, strict=True))
            self.grads = {}
        return self.sums.pop(use)


class _Open(threading.local):
    """The bucket that still takes gradients, for each running backward, group, dtype and device."""

    def __init__(self) -> None:
        self.buckets: weakref.WeakValueDictionary[tuple, _Bucket] = weakref.WeakValueDictionary()


_open = _Open()


def _open_bucket(group, grad: Tensor) -> _Bucket:
    task = torch._C._current_graph_task_id()
    key = (task, id(group), grad.dtype, grad.device)
    bucket = _open.buckets.get(key)
    if bucket is None or bucket.handle is not None:
        bucket = _open.buckets[key] = _Bucket(group, task)
    return bucket

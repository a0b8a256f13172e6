"""`ShardTensor`: one tensor, split over the ranks of a mesh.

Outside it has the global shape, dtype and gradient; inside, `_local_tensor` is this rank's shard and `_spec` says what
every rank holds. It is a `torch.Tensor` wrapper subclass that autograd knows as an ordinary tensor, so `.grad`, hooks,
`torch.autograd.grad` and custom autograd functions act on the object itself.

    mesh = DistributedManager().initialize_mesh((4,), ["domain"])
    x = scatter_tensor(x, 0, mesh, (Shard(2),))     # rows over four ranks
    y = model(x)                                    # a plain module, unchanged
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from shardwise.shard_tensor import registry
from shardwise.shard_tensor.redistribute import redistribute_local
from shardwise.shard_tensor.registry import call_function, functions, rules, settings
from shardwise.shard_tensor.spec import ShardTensorSpec, normalize_placements

_make_wrapper = Tensor._make_wrapper_subclass
_NoTorchFunction = torch._C.DisableTorchFunctionSubclass
_in_inference_mode = torch.is_inference_mode_enabled


class TensorPromotionMode(Enum):
    """What to do when a plain tensor meets a `ShardTensor` in an op: it counts as replicated (`SILENT`, the default),
    the same with a warning (`WARN`), or it is refused (`DISABLED`)."""

    DISABLED = "disabled"
    WARN = "warn"
    SILENT = "silent"


class ShardTensor(torch.Tensor):
    """A tensor of global shape whose shards lie on the ranks of a mesh, evenly or not. See the module's text."""

    _local_tensor: Tensor
    _spec: ShardTensorSpec

    @staticmethod
    def __new__(cls, local_tensor: Tensor, spec: ShardTensorSpec, *, requires_grad: bool = False) -> ShardTensor:
        dtype = local_tensor.dtype
        if dtype is not spec.dtype:
            spec = spec.with_dtype(dtype)
        if 0 in spec.stride:
            spec = spec.as_stored(local_tensor)
        if dtype.is_complex and local_tensor.is_conj():  # a flag of the shard that the wrapper could not show
            local_tensor = local_tensor.resolve_conj()
        self = _make_wrapper(cls, spec.shape, strides=spec.stride, dtype=dtype, device=local_tensor.device, requires_grad=requires_grad)
        self._local_tensor = local_tensor
        self._spec = spec
        return self

    # ------------------------------------------------------------------ dispatch

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if settings.promotion != "silent":
            registry.announce(func, args)
        return functions.get(func, call_function)(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        rule = rules.get(func) or registry.find_rule(func)
        if _in_inference_mode() and getattr(func, "is_view", False):
            return registry.view_in_inference_mode(rule, func, args, kwargs or {})
        return rule(func, args, kwargs or {})

    @staticmethod
    def register_function_handler(func: Callable, handler: Callable) -> None:
        """Call `handler(func, types, args, kwargs)` where `func` meets a `ShardTensor`. Wins over built-in handlers."""
        registry.functions[func] = handler

    @staticmethod
    def register_dispatch_handler(aten_op, handler: Callable) -> None:
        """Call `handler(*args, **kwargs)`, below autograd, where the operator overload `aten_op` meets a `ShardTensor`."""
        registry.rules[aten_op] = lambda func, args, kwargs: handler(*args, **kwargs)

    @staticmethod
    def register_named_function_handler(name: str, handler: Callable) -> None:
        """Call `handler(func, types, args, kwargs)` where a `torch.library` op named like `"lib.op.default"` meets one, or a
        Python function named like `"package.module.function"` that asks tensor classes for overrides. The name need not exist yet."""
        registry.named_functions[name] = handler

    @staticmethod
    def get_promotion_mode() -> TensorPromotionMode:
        return TensorPromotionMode(registry.settings.promotion)

    @staticmethod
    def set_promotion_mode(mode: TensorPromotionMode | str) -> None:
        registry.settings.promotion = TensorPromotionMode(mode).value

    @staticmethod
    @contextmanager
    def promotion_mode(mode: TensorPromotionMode | str):
        """Use `mode` inside the `with` block."""
        before = registry.settings.promotion
        ShardTensor.set_promotion_mode(mode)
        try:
            yield
        finally:
            registry.settings.promotion = before

    # ------------------------------------------------------------------ building

    @staticmethod
    @torch.compiler.disable(reason="a ShardTensor is made outside of a graph")
    def from_local(
        local: Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        sharding_shapes: str | Mapping[int, Sequence[Sequence[int]]] = "infer",
        global_shape: Sequence[int] | None = None,
    ) -> ShardTensor:
        """The tensor whose shard on this rank is `local`; differentiable.

        sharding_shapes: `"infer"` asks the ranks of every sharded axis for their shapes; `"chunk"` takes the
            `torch.chunk` sizes of `global_shape`; `{mesh_dim: [shape of rank 0, ...]}` states them.

        Communication: one gather of shapes for `"infer"`; for the other two, one small all-reduce that lets all ranks
            refuse together when any rank's tensor has another shape. Backward: none, or what the gradient's own layout needs.
        Raises: ValueError on every rank, with the numbers, when shapes contradict each other.
        """
        from shardwise.shard_tensor.create import spec_from_local

        spec = spec_from_local(local, device_mesh, placements, sharding_shapes, global_shape)
        return from_local(local, spec)

    @staticmethod
    @torch.compiler.disable(reason="a ShardTensor is made outside of a graph")
    def from_dtensor(dtensor) -> ShardTensor:
        """The same tensor as a `ShardTensor` (differentiable, no communication); a `ShardTensor` is returned as it is."""
        if isinstance(dtensor, ShardTensor):
            return dtensor
        placements = dtensor.placements
        if any(isinstance(p, Shard) and type(p) is not Shard for p in placements):
            raise ValueError(f"a DTensor with placements {placements} interleaves its shards: redistribute it to Shard or Replicate first")
        spec = ShardTensorSpec.chunked(dtensor.device_mesh, placements, dtensor.shape, dtensor.dtype, tuple(dtensor.stride()))
        return from_local(dtensor.to_local(), spec)

    # ------------------------------------------------------------------ properties

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._spec.placements

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...] | int:
        """First global row of this rank's shard for each mesh dim (0 where that axis does not shard)."""
        return self._spec.offsets(mesh_dim)

    # ------------------------------------------------------------------ leaving and moving

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's shard as a plain tensor; differentiable, no communication.

        grad_placements: how the gradient of the shard is to be read; `Partial()` says that each rank's is one summand.
        """
        grad_spec = None
        if grad_placements is not None:
            grad_spec = self._spec.with_placements(grad_placements)
        return to_local(self, grad_spec)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole tensor, plain, on every rank. Communication: one collective for each axis that is not replicated."""
        return redistribute(self, self._spec.replicate()).to_local(grad_placements=grad_placements)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, *, async_op: bool = False
    ) -> ShardTensor:
        """The same tensor under other placements; differentiable (the gradient comes back in this tensor's layout).

        A dim that stays sharded over the same axes keeps its sizes; a newly sharded one is split as `torch.chunk` does.
        `async_op` is accepted for scripts that pass it; the result is always ready to use.
        Raises: ValueError for another mesh, for `Partial` as a target, and without placements.
        """
        if device_mesh is not None and device_mesh != self._spec.mesh:
            raise NotImplementedError(f"redistribute from {self._spec.mesh} to {device_mesh}: only placements can change, not the mesh")
        if placements is None:
            raise RuntimeError("redistribute needs placements: one of Shard(dim) or Replicate() for each mesh dim")
        placements = normalize_placements(placements, self._spec.mesh, self.ndim)
        for before, after in zip(self._spec.placements, placements, strict=True):
            if isinstance(after, Partial) and after != before:
                raise RuntimeError(f"redistribute from {before} to {after}: a tensor cannot be made a pending sum")
        result = redistribute(self, self._spec.with_placements(placements))
        if result is self or not share_memory(result._local_tensor, self._local_tensor):
            return result
        return result.clone()  # rows of a replicated tensor: a write into them would leave it different on each rank

    # ------------------------------------------------------------------ operators
    # Defined here because those of torch.Tensor turn a TypeError from inside into "unsupported operand".

    def __add__(self, other):
        return torch.add(self, other)

    __radd__ = __add__

    def __sub__(self, other):
        return torch.sub(self, other)

    def __rsub__(self, other):
        return torch.sub(other, self) if isinstance(other, Tensor) else torch.rsub(self, other)

    def __mul__(self, other):
        return torch.mul(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other):
        return torch.div(self, other)

    def __rtruediv__(self, other):
        return torch.div(other, self) if isinstance(other, Tensor) else torch.mul(torch.reciprocal(self), other)

    def __matmul__(self, other):
        return torch.matmul(self, other)

    def __rmatmul__(self, other):
        return torch.matmul(other, self)

    # ------------------------------------------------------------------ protocols

    def __repr__(self, *, tensor_contents=None) -> str:
        with _NoTorchFunction():
            grad = ", requires_grad=True" if self.requires_grad else ""
        return f"ShardTensor({self.__dict__['_local_tensor']!r}, {self._spec.describe()}{grad})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and self.ndim == 0 else repr(self)

    def __deepcopy__(self, memo: dict) -> ShardTensor:
        if id(self) in memo:
            return memo[id(self)]
        with _NoTorchFunction():
            if not self.is_leaf:
                raise RuntimeError("only leaf tensors can be deep-copied: call detach() first")
            result = ShardTensor(copy.deepcopy(self._local_tensor, memo), self._spec)
            if self.requires_grad:
                result.requires_grad_()
                align_gradient(result)
            if self.grad is not None:
                result.grad = copy.deepcopy(self.grad, memo)
            if isinstance(self, torch.nn.Parameter):
                result = torch.nn.Parameter(result, requires_grad=self.requires_grad)
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, protocol):
        with _NoTorchFunction():
            state = (self._local_tensor, self._spec, self.requires_grad, isinstance(self, torch.nn.Parameter))
        return _rebuild, state

    def __tensor_flatten__(self):
        return ["_local_tensor"], (self._spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        spec, requires_grad = context
        return ShardTensor(inner["_local_tensor"], spec, requires_grad=requires_grad)

    def _stable_hash_for_caching(self) -> str:
        """For the cache of compiled code: such code is that of one rank, and speaks to process groups by name."""
        with _NoTorchFunction():
            spec, local = self._spec, self._local_tensor
            mesh = spec.mesh
            groups = [mesh.get_group(i).group_name for i in range(mesh.ndim)]
            where = (mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names, spec.coordinate, groups)
            kind = (tuple(local.shape), local.stride(), local.dtype, local.device, self.requires_grad)
            return repr((spec.placements, spec.shape, spec.sizes, spec.stride, where, kind))

    def __coerce_tangent_metadata__(self):
        spec = self._spec.gradient()
        return self if spec is self._spec else redistribute(self, spec)

    def __coerce_same_metadata_as_tangent__(self, expected_metadata, expected_type=None):
        return redistribute(self, expected_metadata[0].gradient())

    def __create_write_items__(self, fqn: str, tensor: ShardTensor):
        from shardwise.shard_tensor.saved import write_items

        return write_items(fqn, tensor)

    def __create_chunk_list__(self):
        from shardwise.shard_tensor.saved import chunk_list

        return chunk_list(self)

    def __get_tensor_shard__(self, index):
        from shardwise.shard_tensor.saved import tensor_shard

        return tensor_shard(self, index)


registry.ShardTensor = ShardTensor


def _rebuild(local: Tensor, spec: ShardTensorSpec, requires_grad: bool, parameter: bool) -> ShardTensor:
    result = ShardTensor(local, spec)
    if parameter:
        return torch.nn.Parameter(result, requires_grad=requires_grad)
    return align_gradient(result.requires_grad_()) if requires_grad else result


# ---------------------------------------------------------------------- moving between the two worlds, with gradients


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: ShardTensor, grad_spec: ShardTensorSpec) -> Tensor:
        ctx.grad_spec = grad_spec
        ctx.source = x._spec
        return x._local_tensor.detach()

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = from_local(grad, ctx.grad_spec)
        return redistribute(grad, ctx.source.gradient()) if ctx.grad_spec.sizes != ctx.source.sizes else grad, None


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: Tensor, spec: ShardTensorSpec) -> ShardTensor:
        ctx.spec = spec
        return ShardTensor(local.detach(), spec)

    @staticmethod
    def backward(ctx, grad: ShardTensor):
        # each summand of a pending sum gets the whole gradient, and whatever it makes of it is a summand in turn
        return to_local(redistribute(grad, ctx.spec.gradient()), ctx.spec), None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: ShardTensor, spec: ShardTensorSpec) -> ShardTensor:
        ctx.source = x._spec
        return ShardTensor(redistribute_local(x._local_tensor, x._spec, spec), spec)

    @staticmethod
    def backward(ctx, grad: ShardTensor):
        return redistribute(grad, ctx.source.gradient()), None


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether a write into one may show in the other."""
    return not torch.compiler.is_compiling() and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def needs_grad(x: Tensor) -> bool:
    """Whether autograd must record an op on `x`."""
    if not torch.is_grad_enabled():
        return False
    with _NoTorchFunction():
        return x.requires_grad


def to_local(x: ShardTensor, grad_spec: ShardTensorSpec | None = None) -> Tensor:
    """The shard as a plain tensor. `grad_spec` is the layout of its gradient (by default `x._spec.gradient()`)."""
    if needs_grad(x):
        with _NoTorchFunction():
            return _ToLocal.apply(x, grad_spec or x._spec.gradient())
    return x._local_tensor


def from_local(local: Tensor, spec: ShardTensorSpec) -> ShardTensor:
    """The tensor with this shard and spec, unchecked; differentiable."""
    if torch.is_grad_enabled() and local.requires_grad:
        return _FromLocal.apply(local, spec)
    return ShardTensor(local, spec)


def redistribute(x: ShardTensor, spec: ShardTensorSpec) -> ShardTensor:
    """`x` in the layout of `spec` (same mesh and shape); differentiable; `x` itself if it lies so already."""
    if not isinstance(x, ShardTensor):
        return ShardTensor(redistribute_local(x, spec.replicate(), spec), spec)
    if x._spec.placements == spec.placements and x._spec.sizes == spec.sizes:
        return x
    spec = spec.with_dtype(x._spec.dtype)
    if needs_grad(x):
        with _NoTorchFunction():
            return _Redistribute.apply(x, spec)
    return ShardTensor(redistribute_local(x._local_tensor, x._spec, spec), spec)


def align_gradient(x: ShardTensor) -> ShardTensor:
    """Make the gradient that arrives at leaf `x` take `x`'s own layout, in memory of its own, whatever the ops behind it produced."""
    spec = x._spec.gradient()

    def align(grad: ShardTensor) -> ShardTensor:
        grad = redistribute(grad, spec)
        if 0 in grad._local_tensor.stride():  # an expanded value: it could not be added to
            grad = from_local(to_local(grad).contiguous(), grad._spec)
        return grad

    with _NoTorchFunction():
        x.register_hook(align)
    return x

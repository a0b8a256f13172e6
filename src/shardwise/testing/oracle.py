"""The oracle of every sharded computation: the same computation in one process.

    x = shard(world.randn(2, 3, 12), world.mesh, dim=2, sizes=(7, 1, 4))
    assert_same_as_unsharded(F.conv1d, x, world.randn(4, 3, 5), kwargs={"padding": 2})

Compared are outputs, gradients of the inputs, and for a module the gradients of its weights, its buffers and, after one optimizer step,
its weights. All differences are told at once.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Shard
from torch.utils import _pytree as pytree

from shardwise.shard_tensor import ShardTensor, ShardTensorSpec, sync_module_over_mesh

TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 2e-5, torch.complex64: 2e-5}
LOW_PRECISION_TOLERANCE = 2e-2
LEARNING_RATE = 0.1


def shard(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    dim: int | None = None,
    *,
    placements: Sequence[Placement] | None = None,
    sizes: Sequence[int] | Mapping[int, Sequence[int]] | None = None,
) -> Any:
    """A `ShardTensor` of a tensor that every rank has whole, without communication.

    dim: the tensor dim that a mesh of one axis splits; `sizes` are then the rows of each rank, by default those of `torch.chunk`.
    placements: one for each axis instead; `sizes` then maps a tensor dim to its rows per block. A `Partial` axis gets summands that differ.
    """
    if (dim is None) == (placements is None):
        raise ValueError("shard takes either dim (for a mesh of one axis) or placements")
    if placements is None:
        assert dim is not None
        if mesh.ndim != 1:
            raise ValueError(f"dim={dim} is for a mesh of one axis, this one has {mesh.ndim}: give placements, one for each")
        placements = (Shard(dim % tensor.ndim),)
        if sizes is not None and not isinstance(sizes, Mapping):
            sizes = {dim % tensor.ndim: sizes}
    spec = ShardTensorSpec.chunked(mesh, placements, tensor.shape, tensor.dtype)
    if sizes is not None:
        if not isinstance(sizes, Mapping):
            raise ValueError(f"sizes={sizes} with placements: give them by tensor dim, as {{dim: sizes}}")
        for split, rows in sizes.items():
            known = spec.sizes[split]
            if known is None or len(known) != len(rows) or sum(rows) != tensor.shape[split]:
                raise ValueError(f"sizes {tuple(rows)} do not split dim {split} of {tuple(tensor.shape)} under {tuple(spec.placements)}")
        blocks = tuple(tuple(sizes[d]) if d in sizes else known for d, known in enumerate(spec.sizes))
        spec = ShardTensorSpec(mesh, spec.placements, spec.shape, blocks, spec.dtype)
    local = tensor.detach()[tuple(slice(start, stop) for start, stop in spec.box())].clone(memory_format=torch.contiguous_format)
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Partial):
            local = _summand(local, mesh.get_local_rank(axis), mesh.size(axis))
    return ShardTensor(local, spec)


def _summand(total: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """The summand of rank `index`: rank i > 0 has i everywhere, rank 0 the rest."""
    return total - sum(range(count)) if index == 0 else torch.full_like(total, index)


def assert_same_as_unsharded(
    function: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    grads: bool = True,
    step: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Fail unless `function` (a function or a module) does with these arguments what it does with them unsharded.

    args, kwargs: any nesting of values; a `ShardTensor` is what its `full_tensor()` is in one process, a plain tensor stays as it is.
        Plain tensors and modules must be equal on all ranks (`world.randn`, `world.same`).
    grads: also compare the gradients of every floating-point tensor and parameter, for one random gradient of the outputs.
    step: also compare the weights of the module after one step of gradient descent.
    rtol, atol: by default 1e-10 for fp64 and 2e-5 for fp32, relative to the largest value of the tensor compared.

    The module's gradients are those of this call afterwards. Communication: gathers every `ShardTensor` among arguments, outputs and
    gradients. Raises AssertionError with all differences.
    """
    _compare(function, function, args, kwargs or {}, grads=grads, step=step, rtol=rtol, atol=atol)


def numerical_shard_tensor_check(
    mesh: DeviceMesh,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    check_grads: bool = True,
    atol: float | None = None,
    rtol: float | None = None,
    amp: bool = False,
    distribute_fn: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None,
    output_check_fn: Callable[[Any, Any], Any] | None = None,
) -> None:
    """Fail unless `module` does with sharded arguments what it does in one process: outputs, and with `check_grads` all gradients.

    The module's weights are first made equal over the mesh. amp: run both in bf16 autocast. distribute_fn: makes the distributed module
    of a copy of `module`, `distribute_fn(module, mesh)`. output_check_fn: called with the sharded and the reference output instead of the
    comparison; returning False fails. TF32 is off during the check.
    """
    for axis in range(mesh.ndim):
        sync_module_over_mesh(module, mesh if mesh.ndim == 1 else mesh[_axis_name(mesh, axis)])
    ours = module if distribute_fn is None else distribute_fn(copy.deepcopy(module), mesh)
    device = next((p.device.type for p in module.parameters()), mesh.device_type)
    with torch.autocast(device, torch.bfloat16, enabled=amp):
        _compare(ours, module, args, kwargs, grads=check_grads, step=False, rtol=rtol, atol=atol, low=amp, output_check=output_check_fn)


def _axis_name(mesh: DeviceMesh, axis: int) -> str:
    if mesh.mesh_dim_names is None:
        raise ValueError("a mesh of several axes needs names: pass mesh_dim_names to init_device_mesh")
    return mesh.mesh_dim_names[axis]


def _compare(
    ours: Callable[..., Any],
    reference: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    grads: bool,
    step: bool,
    rtol: float | None,
    atol: float | None,
    low: bool = False,
    output_check: Callable[[Any, Any], Any] | None = None,
) -> None:
    difference = _Difference(rtol=rtol, atol=atol, low=low)
    reference = copy.deepcopy(reference) if isinstance(reference, nn.Module) else reference
    for module in (ours, reference):
        if isinstance(module, nn.Module):
            module.zero_grad()
    names, our_leaves, their_leaves, structure = _arguments(args, kwargs, grads)
    with _full_float32(), torch.set_grad_enabled(grads):
        our_args, our_kwargs = pytree.tree_unflatten(our_leaves, structure)
        their_args, their_kwargs = pytree.tree_unflatten(their_leaves, structure)
        our_result = ours(*our_args, **our_kwargs)
        their_result = reference(*their_args, **their_kwargs)
        our_outputs, their_outputs = _outputs(our_result), _outputs(their_result)
        if len(our_outputs) != len(their_outputs):
            raise AssertionError(f"{len(our_outputs)} output tensors, unsharded {len(their_outputs)}")
        for number, (mine, other) in enumerate(zip(our_outputs, their_outputs)):
            difference.add_metadata(f"output {number}", mine, other)
        whole = [full(output) for output in our_outputs]
        if output_check is None:
            for number, (mine, other) in enumerate(zip(whole, their_outputs)):
                difference.add(f"output {number}", mine, other)
        elif output_check(our_result, their_result) is False:
            difference.problems.append("output: output_check_fn returned False")
        if grads:
            _backward(whole, their_outputs, difference)
    if grads:
        for name, mine, other in zip(names, our_leaves, their_leaves):
            if isinstance(other, torch.Tensor) and other.requires_grad:
                difference.add_gradient(f"gradient of {name}", mine, other)
    if isinstance(ours, nn.Module) and isinstance(reference, nn.Module):
        _compare_modules(ours, reference, difference, grads=grads, step=step)
    if difference.problems:
        raise AssertionError("differs from one process:\n" + "\n".join(difference.problems))


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any], grads: bool) -> tuple[list[str], list[Any], list[Any], Any]:
    """Names, our values, values of one process, and how to put them back into (args, kwargs)."""
    paths, structure = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    names, ours, theirs = [], [], []
    for path, value in paths:
        names.append(("argument" if path[0].idx == 0 else "keyword") + pytree.keystr(path[1:]))  # type: ignore[attr-defined]
        if not isinstance(value, torch.Tensor):
            ours.append(value)
            theirs.append(value)
            continue
        wants_grad = grads and (value.is_floating_point() or value.is_complex())
        mine = value.detach() if isinstance(value, ShardTensor) else value.detach().clone()
        ours.append(mine.requires_grad_(wants_grad))
        theirs.append(full(value.detach()).detach().clone().requires_grad_(wants_grad))
    return names, ours, theirs, structure


def _outputs(result: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]


def full(tensor: Any) -> torch.Tensor:
    """The whole tensor of a `ShardTensor` or DTensor; a plain tensor as it is."""
    result: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result


def _backward(ours: list[torch.Tensor], theirs: list[torch.Tensor], difference: _Difference) -> None:
    pairs = []
    for number, (mine, other) in enumerate(zip(ours, theirs)):
        if mine.requires_grad != other.requires_grad:
            difference.problems.append(f"output {number}: requires_grad is {mine.requires_grad}, unsharded {other.requires_grad}")
        elif mine.requires_grad and (mine.shape, mine.dtype) == (other.shape, other.dtype):
            generator = torch.Generator().manual_seed(number)
            grad = torch.randn(other.shape, dtype=other.dtype, generator=generator).to(other.device)
            pairs.append((mine, other, grad))
    if pairs:
        torch.autograd.backward([mine for mine, _, _ in pairs], [grad for _, _, grad in pairs])
        torch.autograd.backward([other for _, other, _ in pairs], [grad for _, _, grad in pairs])


def _compare_modules(ours: nn.Module, theirs: nn.Module, difference: _Difference, *, grads: bool, step: bool) -> None:
    pairs = [(name, p, q) for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True)]
    if grads:
        for name, mine, other in pairs:
            difference.add_gradient(f"gradient of {name}", mine, other)
    for (name, buffer), (_, other_buffer) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        difference.add(f"buffer {name}", full(buffer), other_buffer)
    if step:
        for module in (ours, theirs):
            torch.optim.SGD(module.parameters(), lr=LEARNING_RATE).step()
        for name, mine, other in pairs:
            difference.add(f"{name} after a step", full(mine.detach()), other.detach())


class _Difference:
    """Collects what differs, so that all of it is told at once and all ranks take part in every gather."""

    def __init__(self, *, rtol: float | None, atol: float | None, low: bool) -> None:
        self.rtol, self.atol, self.low = rtol, atol, low
        self.problems: list[str] = []

    def add_metadata(self, name: str, mine: torch.Tensor, other: torch.Tensor) -> None:
        """What a sharded result says of itself: its global shape and the shape of its shard."""
        if isinstance(mine, ShardTensor):
            if mine.shape != other.shape:
                self.problems.append(f"{name}: says its shape is {tuple(mine.shape)}, unsharded {tuple(other.shape)}")
            if mine._local_tensor.shape != mine._spec.local_shape:
                have, want = tuple(mine._local_tensor.shape), mine._spec.local_shape
                self.problems.append(f"{name}: the shard is {have}, its spec says {want}")

    def add(self, name: str, mine: torch.Tensor, other: torch.Tensor) -> None:
        mine, other = mine.detach(), other.detach()
        if mine.shape != other.shape or mine.dtype != other.dtype:
            self.problems.append(f"{name}: {tuple(mine.shape)} {mine.dtype}, unsharded {tuple(other.shape)} {other.dtype}")
            return
        exact = not (other.is_floating_point() or other.is_complex())
        tolerance = 0.0 if exact else LOW_PRECISION_TOLERANCE if self.low else TOLERANCE.get(other.dtype, LOW_PRECISION_TOLERANCE)
        finite = other[other.isfinite()].abs() if other.numel() and not exact else other.new_zeros(0)
        largest = max(float(finite.max()) if finite.numel() else 0.0, 1e-2)
        rtol = tolerance if self.rtol is None else self.rtol
        atol = tolerance * largest if self.atol is None else self.atol
        try:
            torch.testing.assert_close(mine, other, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            self.problems.append(f"{name}: " + " ".join(str(error).split()))

    def add_gradient(self, name: str, mine: torch.Tensor, other: torch.Tensor) -> None:
        if other.grad is None or mine.grad is None:
            if (other.grad is None) != (mine.grad is None) and not (other.grad is None and not full(mine.grad).any()):
                self.problems.append(f"{name}: {'none' if mine.grad is None else 'there is one'}, unsharded the other way round")
            return
        if isinstance(mine, ShardTensor):
            if not isinstance(mine.grad, ShardTensor):
                self.problems.append(f"{name}: a plain tensor, the tensor itself is sharded")
                return
            have, want = mine.grad._spec, mine._spec.gradient()
            if (have.placements, have.sizes) != (want.placements, want.sizes):
                self.problems.append(f"{name}: lies as {have.describe()}, the tensor as {want.describe()}")
        self.add(name, full(mine.grad), other.grad)


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """TF32 off: it would hide differences."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before

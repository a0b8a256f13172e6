"""One training step under watch: the first module at which the split run departs from an unsplit one.

    for difference in check_step(model, lambda: F.mse_loss(model(x), y).backward(), mesh):
        print(difference)

Every module is checked on its own. Its inputs are gathered, a plain copy of it runs on them in one process, and outputs and gradients are
compared with those of the split run; then what counts as equal on several ranks (replicated tensors, plain tensors, weights and their
gradients) is compared between them. A missing, double or misdirected reduction shows at the module that has it: everything
after it is judged by the inputs it really got.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shardwise.mesh.groups import axis_group, flat_group
from shardwise.random import current_generator
from shardwise.shard_tensor import ShardTensor

TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
LOW_PRECISION_TOLERANCE = 3e-2


@dataclass(frozen=True, kw_only=True)
class Difference:
    """module: path of the module. what: the tensor and how it is wrong, with the largest relative difference."""

    module: str
    what: str

    def __str__(self) -> str:
        return f"{self.module or '(outermost)'}: {self.what}"


def check_step(module: nn.Module, step: Callable[[], Any], mesh: DeviceMesh) -> list[Difference]:
    """Run `step`, a forward and backward through `module`, and return what is wrong, in the order of execution; [] if nothing is.

    Call it on every rank, with a module that no data-parallel wrapper manages. mesh: of the tensors, usually `mesh["domain"]`. Modules that
    draw random numbers are compared between ranks only.

    Communication: gathers every input and output of every module. Memory: that of the unsplit step. It is for small sizes.
    """
    watch = _Watch(module, mesh)
    watch.compare_weights()
    with watch.hooks():
        step()
    watch.compare_gradients()
    return watch.differences


class _Watch:
    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.module, self.mesh = module, mesh
        self.plain = copy.deepcopy(module)
        self.group = axis_group(mesh, 0) if mesh.ndim == 1 else flat_group(mesh, tuple(range(mesh.ndim)))
        self.differences: list[Difference] = []
        self.calls: dict[str, list[_Call]] = {}

    def hooks(self):
        handles = []
        for path, child in self.module.named_modules():
            handles.append(child.register_forward_pre_hook(self._entering(path), with_kwargs=True, prepend=True))
            handles.append(child.register_forward_hook(self._leaving(path), with_kwargs=True))
        return _Removed(handles)

    def _entering(self, path: str):
        def enter(module, args, kwargs):
            call = _Call(path)
            self.calls.setdefault(path, []).append(call)
            return call.enter(args, kwargs)

        return enter

    def _leaving(self, path: str):
        def leave(module, args, kwargs, output):
            call = next(c for c in reversed(self.calls[path]) if not c.left)
            call.leave(self, output)

        return leave

    # ------------------------------------------------------------------ comparing

    def report(self, path: str, what: str) -> None:
        self.differences.append(Difference(module=path, what=what))

    def compare(self, path: str, name: str, mine: Tensor, expected: Tensor) -> bool:
        """Whether a value of the split run (whole) is that of one process, on all ranks together."""
        if mine.shape != expected.shape:
            self.report(path, f"{name} has shape {tuple(mine.shape)}, in one process {tuple(expected.shape)}")
            return False
        far = self._largest(_distance(mine, expected))
        if far > _tolerance(expected.dtype):
            self.report(path, f"{name} differs from one process by {far:.1e} of its largest value")
            return False
        return True

    def compare_ranks(self, path: str, name: str, value: Tensor) -> bool:
        """Whether what counts as equal on several ranks is."""
        if isinstance(value, ShardTensor):
            axes = [i for i, p in enumerate(value.placements) if isinstance(p, Replicate) and value.device_mesh.size(i) > 1]
            groups, local = [axis_group(value.device_mesh, i) for i in axes], value._local_tensor
        else:
            groups, local = [self.group], value
        far = 0.0
        for group in groups:
            first = local.detach().clone().contiguous()
            wire = torch.view_as_real(first) if first.is_complex() else first
            dist.broadcast(wire, src=dist.get_global_rank(group, 0), group=group)
            far = max(far, _distance(local.detach(), first))
        far = self._largest(far)
        if far > _tolerance(local.dtype):
            self.report(path, f"{name} counts as equal on all ranks but differs between them by {far:.1e} of its largest value")
            return False
        return True

    def _largest(self, value: float) -> float:
        largest = torch.tensor(value, dtype=torch.float64, device=self.mesh.device_type)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return float(largest)

    def compare_weights(self) -> None:
        for name, p in (*self.module.named_parameters(), *self.module.named_buffers()):
            if not hasattr(p, "full_tensor") and p.numel():
                path, _, leaf = name.rpartition(".")
                self.compare_ranks(path, leaf, p)

    def compare_gradients(self) -> None:
        """Gradients of weights against those of the plain copies of the outermost module; told at the innermost module that ran."""
        outermost = self.calls.get("", [])
        for name, p in self.module.named_parameters():
            if p.grad is None or hasattr(p.grad, "full_tensor"):
                continue
            owner, _, leaf = name.rpartition(".")
            while owner not in self.calls and owner:
                owner, _, rest = owner.rpartition(".")
                leaf = f"{rest}.{leaf}"
            if not self.compare_ranks(owner, f"the gradient of {leaf}", p.grad):
                continue
            parts = [call.weight_grads[name] for call in outermost if name in call.weight_grads]
            if parts and not any(call.random for call in outermost):
                self.compare(owner, f"the gradient of {leaf}", p.grad, sum(parts))


class _Call:
    """One call of one module: its inputs, outputs and gradients in the split run, and a plain copy of it on the same inputs."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.left = False
        self.random = False
        self.weight_grads: dict[str, Tensor] = {}
        self.input_grads: dict[int, Tensor] = {}
        self.output_grads: dict[int, Tensor] = {}

    def enter(self, args, kwargs):
        """Give the module aliases of its inputs, so that gradients of its own use of them can be seen."""
        leaves, structure = tree_flatten((args, kwargs))
        self.inputs = [leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves]
        self.structure = structure
        self.drawn = current_generator().get_state()
        return tree_unflatten(self.inputs, structure)

    def leave(self, watch: _Watch, output) -> None:
        self.left, self.watch = True, watch
        self.random = not torch.equal(self.drawn, current_generator().get_state())
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        sharded = any(isinstance(value, ShardTensor) for value in (*self.inputs, *outputs))
        if not sharded:
            return
        for number, value in enumerate(outputs):
            watch.compare_ranks(self.path, f"output {number}", value)
        if self.random:
            return
        plain = watch.plain.get_submodule(self.path)
        with torch.enable_grad():
            self.whole = [_whole(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.inputs]
            args, kwargs = tree_unflatten(self.whole, self.structure)
            self.expected = [leaf for leaf in tree_leaves(plain(*args, **kwargs)) if isinstance(leaf, Tensor)]
        right = True
        for number, (mine, expected) in enumerate(zip(outputs, self.expected, strict=True)):
            right = watch.compare(self.path, f"output {number}", _whole(mine), expected.detach()) and right
        if right and torch.is_grad_enabled():
            self._watch_gradients(outputs, plain)

    def _watch_gradients(self, outputs: list[Tensor], plain: nn.Module) -> None:
        prefix = f"{self.path}." if self.path else ""
        self.weights = {prefix + name: p for name, p in plain.named_parameters() if p.requires_grad}
        for number, value in enumerate(outputs):
            if value.requires_grad:
                value.register_hook(lambda grad, number=number: self._output_grad(number, grad))
        for number, value in enumerate(self.inputs):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda grad, number=number: self._input_grad(number, grad))

    def _output_grad(self, number: int, grad: Tensor) -> None:
        """The gradient of an output has come: what it should make of the inputs and weights."""
        out = self.expected[number]
        if not out.requires_grad:
            return
        inputs = {i: v for i, v in enumerate(self.whole) if isinstance(v, Tensor) and v.requires_grad}
        sources = [*inputs.values(), *self.weights.values()]
        with torch.enable_grad():
            grads = torch.autograd.grad(out, sources, _whole(grad).to(out.dtype).detach(), retain_graph=True, allow_unused=True)
        for (table, key), value in zip(
            [*((self.input_grads, i) for i in inputs), *((self.weight_grads, name) for name in self.weights)], grads, strict=True
        ):
            if value is not None:
                table[key] = value + table[key] if key in table else value

    def _input_grad(self, number: int, grad: Tensor) -> None:
        name = f"the gradient of input {number}"
        if isinstance(self.inputs[number], ShardTensor) and not self.watch.compare_ranks(self.path, name, grad):
            return
        expected = self.input_grads.get(number)
        mine = _whole(grad).detach()
        self.watch.compare(self.path, name, mine, torch.zeros_like(mine) if expected is None else expected)


class _Removed:
    """Removes hooks at the end of a `with` block."""

    def __init__(self, handles) -> None:
        self.handles = handles

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_) -> None:
        for handle in self.handles:
            handle.remove()


def _whole(value: Tensor) -> Tensor:
    """The complete value, apart from the graph, that needs a gradient where the original does."""
    with torch.no_grad():
        whole = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    return whole.requires_grad_(value.requires_grad and (whole.is_floating_point() or whole.is_complex()))


def _distance(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return float((a != b).any())
    a, b = a.detach().to(torch.complex128 if a.is_complex() else torch.float64), b.detach().to(a.device)
    scale = float(torch.nan_to_num(b.abs(), posinf=0.0).max()) or 1.0
    different = (a - b).abs() / scale
    different = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, different)
    return float(torch.nan_to_num(different, nan=float("inf")).max())


def _tolerance(dtype: torch.dtype) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return TOLERANCE.get(dtype, LOW_PRECISION_TOLERANCE)

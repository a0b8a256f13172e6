"""What a forward keeps for its backward: what is cheap to make again is made again, from what is kept anyway.

Modules of `transformers` compute norms, activation functions and routers in several ops, each of which keeps its input, often in float32.
Here they keep their input alone. Outputs that are one cheap step away from something kept (the output of an activation function; rows
gathered over tensor parallel ranks, Korthikanti et al., arXiv:2205.05198, section 4.2.2) are not kept for the ops that use them either.
Values are those that would have been kept, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from shardwise.parallel.roles import Roles
from shardwise.parallel.router import routers


class _Source:
    """How to make a value again. It stays between the first and the last use in a backward."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make
        self.kept = self.left = 0
        self.value: Tensor | None = None

    def use(self) -> Tensor:
        if self.value is None:
            with torch.no_grad():
                self.value = self.make()
            self.left = self.kept
        value = self.value
        self.left -= 1
        if not self.left:
            self.value = None
        return value


class _Remade:
    """A view of a value that is made again."""

    def __init__(self, source: _Source, view: Tensor) -> None:
        self.source, self.geometry = source, (view.size(), view.stride(), view.storage_offset())
        source.kept += 1

    def tensor(self) -> Tensor:
        return self.source.use().as_strided(*self.geometry)


class Savings:
    """Which values of the forward that runs are made again. `active` decides whether any are; `with savings.saving():` around a forward."""

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self._sources: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by storage

    def again(self, value: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """The value, of which no op keeps a copy: `make` returns it again. Communication of `make` happens in the backward, on all ranks
        that ran the forward, in one order."""
        if self.active and value.requires_grad and torch.is_grad_enabled():
            self._sources[value.untyped_storage()] = (_Source(make), value.dtype)
        return value

    def saving(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, x: Tensor) -> Tensor | _Remade:
        source, dtype = self._sources.get(x.untyped_storage(), (None, None)) if self._sources else (None, None)
        return _Remade(source, x) if source is not None and dtype == x.dtype else x


def _unpack(kept: Tensor | _Remade) -> Tensor:
    return kept.tensor() if isinstance(kept, _Remade) else kept


class _Lean(torch.autograd.Function):
    """A module of one tensor that keeps its input alone; `run` is its forward."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, *_: Tensor) -> Tensor:
        ctx.module, ctx.run = module, run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        x = ctx.saved_tensors[0].detach().requires_grad_(needed[0])
        with torch.enable_grad():
            out = ctx.run(x)
        inputs = (x, *ctx.module.parameters(recurse=False))
        found = iter(torch.autograd.grad(out, [each for each, wanted in zip(inputs, needed, strict=True) if wanted], grad))
        return None, None, *(next(found) if wanted else None for wanted in needed)


def save_less(model: PreTrainedModel, roles: Roles, savings: Savings) -> None:
    """Norms and activation functions keep their input alone, routers nothing that is not kept elsewhere."""
    for module in model.modules():
        kind = type(module)
        if kind.__module__.startswith("torch."):  # one kernel, which keeps its input
            if kind.__module__.endswith("activation"):
                module.register_forward_hook(partial(_offer, savings, module.forward))
        elif kind.__name__.endswith("Norm"):
            module.forward = partial(_lean, module, module.forward)
        elif kind.__module__ == "transformers.activations":
            plain = module.forward
            module.forward = partial(_lean, module, plain)
            module.register_forward_hook(partial(_offer, savings, plain))
    for _, router in routers(model, roles):
        router.forward = partial(checkpoint, router.forward, use_reentrant=False, preserve_rng_state=False)


def _lean(module: nn.Module, run: Callable[..., Tensor], x: Tensor, *rest: Any, **options: Any) -> Tensor:
    if rest or options or not torch.is_grad_enabled():
        return run(x, *rest, **options)
    return _Lean.apply(module, run, x, *module.parameters(recurse=False))


def _offer(savings: Savings, run: Callable[..., Tensor], _: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
    if len(args) == 1:
        x = args[0].detach()
        savings.again(out, lambda: run(x))

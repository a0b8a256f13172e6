"""Where ops are looked up.

An op reaches the tensor at two levels, each with its own table:

* *function level* (`functions`): `handler(func, types, args, kwargs)` for a Python-level function that would lose meaning
  when decomposed (linear, convolution, attention). `@shard_function(F.conv2d)` registers a handler that has the signature
  of the function it stands for; autograd records what it does.
* *dispatch level* (`rules`): `rule(func, args, kwargs)` for an operator overload, below autograd, so a rule needs no
  backward. `@shard_rule(aten.mm.default)` registers one; `rule_families` serve whole families by a predicate.

Whatever is in neither table takes the safe fallback of `fallback.py`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from types import FunctionType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

functions: dict[Callable, Callable] = {}
named_functions: dict[str, Callable] = {}
rules: dict[object, Callable] = {}
found_rules: set[object] = set()  # the keys of `rules` that a family or a decomposition serves
rule_families: list[tuple[Callable[[object], bool], Callable]] = []

# Functions that act on the tensor objects they are given: plain tensors among their arguments stay as they are.
IDENTITY_FUNCTIONS = {
    torch.autograd.grad,
    torch.autograd.backward,
    Tensor.backward,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
}
# Property setters: `(func, handler)`. They compare equal but hash differently at each look, so no dict finds them.
setters: list[tuple[Callable, Callable]] = []

_NoTorchFunction = torch._C.DisableTorchFunctionSubclass
ShardTensor: type = type(None)  # set by tensor.py, which imports this module first


class Settings(threading.local):
    """Per-thread switches: `promotion` (silent, warn, disabled) and `fallback` (gather, error)."""

    promotion = "silent"
    fallback = "gather"


settings = Settings()


@contextmanager
def fallback(mode: str):
    """Inside the block an op without a sharded form is gathered (`"gather"`, the default) or refused (`"error"`)."""
    if mode not in ("gather", "error"):
        raise ValueError(f"fallback mode {mode!r} is unknown: use 'gather' or 'error'")
    before, settings.fallback = settings.fallback, mode
    try:
        yield
    finally:
        settings.fallback = before


def shard_function(*funcs: Callable) -> Callable:
    """Register a handler with the signature of `funcs`. Returning `NotImplemented` passes the call on to dispatch level."""

    def register(handler: Callable) -> Callable:
        def adapter(func, types, args, kwargs):
            result = handler(*args, **kwargs)
            return call_function(func, types, args, kwargs) if result is NotImplemented else result

        adapter.handler = handler
        for func in funcs:
            if func.__name__ == "__set__":
                setters.append((func, adapter))
            else:
                functions[func] = adapter
        return handler

    return register


def shard_function_table(table: Iterable[Callable], handler: Callable) -> None:
    """Register one `handler(func, args, kwargs)` for every function of a simple family."""

    def adapter(func, types, args, kwargs):
        result = handler(func, args, kwargs)
        return call_function(func, types, args, kwargs) if result is NotImplemented else result

    adapter.handler = handler
    for func in table:
        functions[func] = adapter


def shard_rule(*ops) -> Callable:
    """Register `rule(func, args, kwargs)` for operator overloads."""

    def register(rule: Callable) -> Callable:
        for op in ops:
            rules[op] = rule
        return rule

    return register


def _function_name(func: Callable) -> str:
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or repr(func)


def find_rule(op) -> Callable:
    """The rule of an operator overload: its own, its family's, its decomposition, or the fallback. Remembered for the next call."""
    found = next((rule for matches, rule in rule_families if matches(op)), None)
    if found is None and isinstance(op, torch._ops.OpOverload) and _has_kernel(op.name(), "CompositeImplicitAutograd"):
        found = _decompose
    if found is not None:
        found_rules.add(op)
        rules[op] = found
        return found
    from shardwise.shard_tensor.fallback import fallback_rule

    return fallback_rule


_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def _decompose(op, args: tuple, kwargs: dict):
    """What autograd does before an op that is made of others arrives here; in inference mode there is no autograd."""
    return op.decompose(*args, **kwargs)


def view_in_inference_mode(rule: Callable, op, args: tuple, kwargs: dict):
    """`rule` of an op that returns a view: in inference mode too, the view of an ordinary tensor must be an ordinary one."""
    with _NoTorchFunction():
        ordinary = not args[0].is_inference()
    if not ordinary:
        return rule(op, args, kwargs)
    with torch.inference_mode(False), torch.no_grad():
        return rule(op, args, kwargs)


_NAMED = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, FunctionType)


def _named_handler(func: Callable) -> Callable | None:
    """The handler registered for the name of an operator, "lib.op.default", or of a Python function, "package.module.function"."""
    if type(func) is FunctionType:
        return named_functions.get(f"{func.__module__}.{func.__qualname__}")
    return named_functions.get(str(func)) or named_functions.get(f"{func}.default")


def call_function(func: Callable, types, args: tuple, kwargs: dict):
    """Call `func` on the tensors themselves: autograd records it, and its operators arrive at dispatch level."""
    if type(func) in _NAMED:
        handler = _named_handler(func)
        if handler is not None:
            return handler(func, types, args, kwargs)
    if getattr(func, "__name__", "") == "__set__":
        handler = next((handler for setter, handler in setters if setter == func), None)
        if handler is not None:
            return handler(func, types, args, kwargs)
    elif func not in IDENTITY_FUNCTIONS:
        if type(func) is FunctionType:
            body = _python_bodies.get(func) or _python_body(func)
            if body is not func:
                return body(*args, **kwargs)
        if torch.is_grad_enabled() or kwargs or not _MAY_HOLD_DTENSORS.isdisjoint(map(type, args)):
            args, kwargs = promote_operands(func, args, kwargs)
    with _NoTorchFunction():
        return func(*args, **kwargs)


_MAY_HOLD_DTENSORS = {DTensor, list, tuple}
_python_bodies: dict[Callable, Callable] = {}
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _python_body(func: FunctionType) -> Callable:
    """`func` without its own look for overrides; what it calls keeps theirs.

    A function written in Python (`F.multi_head_attention_forward`) asks `has_torch_function` first and would come straight
    back here. Its body, run with that question answered no, reaches the handlers of the functions it is made of.
    """
    body: Callable = func
    # Methods of Tensor written in Python call the C method of the same name, which would come back here as well.
    if func.__module__ != "torch._tensor" and any(name in func.__code__.co_names for name in _CHECKS):
        names = {**func.__globals__, **dict.fromkeys(_CHECKS, _no_override)}
        body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
        body.__kwdefaults__ = func.__kwdefaults__
    _python_bodies[func] = body
    return body


def _no_override(*args) -> bool:
    return False


def promote_operands(func: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Turn plain tensors that need a gradient, and DTensors, into replicated operands of the `ShardTensor`s beside them."""
    plain = False
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if isinstance(value, ShardTensor):
                found.append(value)
            else:
                plain = True
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, ShardTensor):
                    found.append(item)
                elif isinstance(item, Tensor):
                    plain = True
    if not plain or not found:
        return args, kwargs
    from shardwise.shard_tensor.promote import promote

    specs = [x._spec for x in found]

    def convert(value):
        if isinstance(value, Tensor):
            return value if isinstance(value, ShardTensor) else promote(value, specs)
        if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            return type(value)(convert(item) for item in value) if type(value) in (list, tuple) else value
        return value

    return tuple(convert(value) for value in args), {key: convert(value) for key, value in kwargs.items()}


def announce(func: Callable, args: tuple) -> None:
    """Warn about or refuse plain tensors beside a `ShardTensor`, as the promotion mode says."""
    if func in IDENTITY_FUNCTIONS:
        return
    for value in args:
        if isinstance(value, Tensor) and not isinstance(value, ShardTensor) and value.ndim > 0:
            given = f"{_function_name(func)} got a plain tensor of shape {tuple(value.shape)} beside a ShardTensor"
            if settings.promotion == "disabled":
                raise RuntimeError(
                    f"{given}, mixed operands are refused in promotion mode 'disabled': make it a ShardTensor with scatter_tensor(..., "
                    "placements=(Replicate(),)), or use ShardTensor.promotion_mode('silent')"
                )
            warnings.warn(f"{given}: auto-promoting it to a replicated one", UserWarning, stacklevel=4)

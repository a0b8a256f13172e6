"""Functions and operators of other packages, named here and looked up only once those packages are imported.

An operator of `torch.library` reaches the tensor under its own name, "lib.op.default"; so does a Python function that asks tensor classes
for an override (`torch.overrides`), as "package.module.function". A Python function that does not ask is made to ask by `connect`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType

from shardwise.functional.overrides import overridable
from shardwise.shard_tensor import registry


def third_party(*names: str) -> Callable:
    """Register a handler with the signature of the named functions. The package need not be installed."""

    def register(handler: Callable) -> Callable:
        def adapter(func, types, args, kwargs):
            return handler(*args, **kwargs)

        adapter.handler = handler
        registry.named_functions.update(dict.fromkeys(names, adapter))
        return handler

    return register


def connect(package: str) -> tuple[str, ...]:
    """Let the imported `package` ask for the handlers registered for its functions; returns their names.

    Needed for packages whose functions do not ask tensor classes for overrides, natten for one. Every module of the package that holds
    such a function gets one that asks first; plain tensors go on as before. Calling it again changes nothing.
    Errors: ImportError if the package is not imported, ValueError if none of its functions has a handler.
    """
    if package not in sys.modules:
        raise ImportError(f"connect({package!r}): the package is not imported: import it first")
    names = tuple(sorted(name for name in registry.named_functions if name.startswith(f"{package}.") and _find(name) is not None))
    if not names:
        known = sorted({name.partition(".")[0] for name in registry.named_functions})
        raise ValueError(f"connect({package!r}): none of its functions has a handler; packages with handlers: {', '.join(known)}")
    modules = [module for name, module in list(sys.modules.items()) if name == package or name.startswith(f"{package}.")]
    for name in names:
        function = _find(name)
        if hasattr(function, "overridable"):
            continue
        asking = overridable(function)
        for module in modules:
            for key, value in list(vars(module).items()):
                if value is function:
                    setattr(module, key, asking)
    return names


def _find(name: str) -> FunctionType | None:
    """The Python function of that name in a module that is loaded."""
    module, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(module), attribute, None)
    return found if isinstance(found, FunctionType) else None

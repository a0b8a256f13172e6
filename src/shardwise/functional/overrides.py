"""Functions in plain torch that tensor classes may override."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def overridable(function: Callable) -> Callable:
    """`function`, which asks the classes of its tensor arguments for an override first, as torch's own functions do."""

    @functools.wraps(function)
    def asking(*args, **kwargs):
        tensors = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if has_torch_function(tensors):
            return handle_torch_function(asking, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    asking.overridable = True
    return asking

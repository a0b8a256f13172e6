"""Reading arguments as torch does."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input"}


def torch_names(handler: Callable) -> Callable:
    """`handler` called with the names of torch where NumPy's were given (`axis`, `keepdims`, `x`), as torch accepts both.

    With `out=` the call goes on to the operator below, which writes it.
    """

    @wraps(handler)
    def named(*args, **kwargs):
        if kwargs:
            if kwargs.get("out") is not None:
                return NotImplemented
            kwargs.pop("out", None)
            kwargs = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
        return handler(*args, **kwargs)

    return named


def is_dim(value: object) -> bool:
    """Whether `value` is one dim (not a name, not None, not a bool)."""
    return isinstance(value, int) and not isinstance(value, bool)


def normal_dim(dim: int, ndim: int) -> int:
    """`dim` counted from the front. Raises IndexError as torch does."""
    top = max(ndim, 1)
    if not -top <= dim < top:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-top}, {top - 1}], but got {dim})")
    return dim % top

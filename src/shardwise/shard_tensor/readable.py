"""Whether the values of a tensor may be looked at."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def values_readable(x: Tensor) -> bool:
    """On the CPU, and not while tracing or rehearsing. On another device it would wait for it."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor)

"""The input rows and weights of each output row of an interpolation along one dim, as torch computes them.

Formulas: `aten/src/ATen/native/UpSample.h` and, with antialiasing, `cpu/UpSampleKernel.cpp` of PyTorch; cubic convolution after Keys
(1981), with the parameter -0.75, and -0.5 with antialiasing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Resize:
    """One dim of an interpolation. kind: nearest, nearest-exact, linear or cubic. scale: as the caller gave it, else None."""

    kind: str
    size: int
    outputs: int
    scale: float | None
    align_corners: bool
    antialias: bool

    @property
    def factor(self) -> int | None:
        """The whole number of equal output rows around each input row, if the rows repeat like that."""
        factor = self.outputs // self.size if self.size else 0
        if not factor or factor * self.size != self.outputs or self.scale not in (None, factor):
            return None
        if self.align_corners and factor > 1:
            return None
        if self.kind.startswith("nearest") and not torch.equal(_nearest(self, torch.float32), torch.arange(self.outputs) // factor):
            return None  # rounding of the step
        return factor

    @property
    def halo(self) -> int:
        """Rows on either side that outputs of a whole factor read."""
        return {"linear": 1, "cubic": 2}.get(self.kind, 0) if self.factor != 1 else 0


class Taps(NamedTuple):
    """rows, weights: (outputs, taps). weights None: each output is its one row."""

    rows: Tensor
    weights: Tensor | None


@lru_cache(maxsize=256)
def taps(resize: Resize, dtype: torch.dtype) -> Taps:
    """The rows and weights in precision `dtype` (torch.float32 or torch.float64), on the CPU."""
    if resize.kind.startswith("nearest"):
        return Taps(_nearest(resize, dtype).unsqueeze(1), None)
    at = torch.arange(resize.outputs, dtype=dtype)
    step = _step(resize, dtype)
    last = resize.size - 1
    if resize.antialias:
        return _antialiased(resize, at, step)
    source = step * at if resize.align_corners else step * (at + 0.5) - 0.5
    if resize.kind == "linear":
        source = source.clamp(min=0)
        low = source.long().clamp(max=last)
        high = (low + 1).clamp(max=last)
        part = (source - low).clamp(0, 1)
        return Taps(torch.stack((low, high), 1), torch.stack((1 - part, part), 1))
    low = source.floor().clamp(max=last)
    part = (source - low).clamp(0, 1)
    rows = (low.long().unsqueeze(1) + torch.arange(-1, 3)).clamp(0, last)
    return Taps(rows, _cubic(part.unsqueeze(1) - torch.arange(-1, 3, dtype=dtype), -0.75))


def _nearest(resize: Resize, dtype: torch.dtype) -> Tensor:
    rows = torch.arange(resize.size, dtype=dtype).view(1, 1, -1)
    if resize.scale is None:
        return F.interpolate(rows, size=resize.outputs, mode=resize.kind).flatten().long()
    return F.interpolate(rows, scale_factor=resize.scale, mode=resize.kind, recompute_scale_factor=False).flatten().long()


def _step(resize: Resize, dtype: torch.dtype) -> Tensor:
    """Input rows from one output row to the next."""
    size, outputs = (torch.tensor(float(n), dtype=dtype) for n in (resize.size, resize.outputs))
    if resize.align_corners:
        return (size - 1) / (outputs - 1) if resize.outputs > 1 else torch.zeros((), dtype=dtype)
    return torch.tensor(1.0 / resize.scale, dtype=dtype) if resize.scale else size / outputs


def _cubic(distance: Tensor, a: float) -> Tensor:
    x = distance.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _antialiased(resize: Resize, at: Tensor, step: Tensor) -> Taps:
    half = 1.0 if resize.kind == "linear" else 2.0
    stretch = step.clamp(min=1)
    support = half * stretch
    center = step * (at + 0.5)
    first = (center - support + 0.5).long().clamp(min=0)
    count = (center + support + 0.5).long().clamp(max=resize.size) - first
    offsets = torch.arange(int(count.max()))
    distance = (offsets + first.unsqueeze(1) - center.unsqueeze(1) + 0.5) / stretch
    weights = (1 - distance.abs()).clamp(min=0) if resize.kind == "linear" else _cubic(distance, -0.5)
    weights = torch.where(offsets < count.unsqueeze(1), weights, torch.zeros_like(weights))
    rows = (first.unsqueeze(1) + offsets).clamp(max=resize.size - 1)
    return Taps(rows, weights / weights.sum(1, keepdim=True))


def apply_taps(local: Tensor, dim: int, table: Taps) -> Tensor:
    """Interpolate along `dim`; `table.rows` are rows of `local`."""
    rows = table.rows.to(local.device)
    if table.weights is None:
        return local.index_select(dim, rows[:, 0])
    weights = table.weights.to(local.device)
    wide = local.to(weights.dtype)
    if rows.shape[1] > 4:
        matrix = weights.new_zeros(rows.shape[0], local.shape[dim]).scatter_add_(1, rows, weights)
        return torch.matmul(wide.movedim(dim, -1), matrix.t()).movedim(-1, dim).to(local.dtype)
    shape = (-1, *[1] * (local.ndim - 1 - dim))
    parts = (wide.index_select(dim, rows[:, i]) * weights[:, i].view(shape) for i in range(rows.shape[1]))
    total = next(parts)
    for part in parts:
        total = total + part
    return total.to(local.dtype)

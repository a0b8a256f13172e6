"""The input rows and weights of each output row of an interpolation along one dim, as torch computes them.

Formulas: `aten/src/ATen/native/UpSample.h` and, with antialiasing, `cpu/UpSampleKernel.cpp` of PyTorch; cubic convolution after Keys
(1981), with the parameter -0.75, and -0.5 with antialiasing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Rows = tuple[tuple[int, ...], ...]
Weights = tuple[tuple[float, ...], ...] | None


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
        if self.kind.startswith("nearest"):  # the rounding of a step may shift a row
            rows, _ = self.table(torch.float32)
            if any(row[0] != output // factor for output, row in enumerate(rows)):
                return None
        return factor

    @property
    def halo(self) -> int:
        """Rows on either side that outputs of a whole factor read."""
        return {"linear": 1, "cubic": 2}.get(self.kind, 0) if self.factor != 1 else 0

    def table(self, dtype: torch.dtype) -> tuple[Rows, Weights]:
        """For each output the rows it reads, and their weights in precision `dtype` (torch.float32 or torch.float64). Without
        weights each output is its one row."""
        return _constant_table(self.kind, self.size, self.outputs, self.scale, self.align_corners, self.antialias, dtype)


@dataclass(frozen=True, kw_only=True)
class Taps:
    """Rows of a local tensor, and weights, for each output made there."""

    rows: Rows
    weights: Weights
    dtype: torch.dtype
    made: dict = field(default_factory=dict)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """As tensors, made once for each device."""
        if torch.compiler.is_compiling():
            return self._tensors(device)
        if device not in self.made:
            self.made[device] = self._tensors(device)
        return self.made[device]

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        rows = torch.tensor(self.rows, dtype=torch.int64, device=device)
        return rows, None if self.weights is None else torch.tensor(self.weights, dtype=self.dtype, device=device)


@torch.compiler.assume_constant_result
def _constant_table(*args) -> tuple[Rows, Weights]:
    with _disable_current_modes():  # with numbers, also where the compiler traces without them
        return _table(*args)


@lru_cache(maxsize=256)
def _table(
    kind: str, size: int, outputs: int, scale: float | None, align_corners: bool, antialias: bool, dtype: torch.dtype
) -> tuple[Rows, Weights]:
    if kind.startswith("nearest"):
        whole = torch.arange(size, dtype=dtype).view(1, 1, -1)
        how = {"size": outputs} if scale is None else {"scale_factor": scale, "recompute_scale_factor": False}
        return tuple((int(row),) for row in F.interpolate(whole, mode=kind, **how).flatten().tolist()), None
    at = torch.arange(outputs, dtype=dtype)
    step = _step(size, outputs, scale, align_corners, dtype)
    if antialias:
        rows, weights = _antialiased(kind, size, at, step)
    else:
        source = step * at if align_corners else step * (at + 0.5) - 0.5
        rows, weights = (_linear if kind == "linear" else _cubic_rows)(source, size - 1)
    return tuple(map(tuple, rows.tolist())), tuple(map(tuple, weights.tolist()))


def _linear(source: Tensor, last: int) -> tuple[Tensor, Tensor]:
    source = source.clamp(min=0)
    low = source.long().clamp(max=last)
    part = (source - low).clamp(0, 1)
    return torch.stack((low, (low + 1).clamp(max=last)), 1), torch.stack((1 - part, part), 1)


def _cubic_rows(source: Tensor, last: int) -> tuple[Tensor, Tensor]:
    low = source.floor().clamp(max=last)
    part = (source - low).clamp(0, 1)
    rows = (low.long().unsqueeze(1) + torch.arange(-1, 3)).clamp(0, last)
    return rows, _cubic(part.unsqueeze(1) - torch.arange(-1, 3, dtype=source.dtype), -0.75)


def _step(size: int, outputs: int, scale: float | None, align_corners: bool, dtype: torch.dtype) -> Tensor:
    """Input rows from one output row to the next."""
    rows, made = (torch.tensor(float(n), dtype=dtype) for n in (size, outputs))
    if align_corners:
        return (rows - 1) / (made - 1) if outputs > 1 else torch.zeros((), dtype=dtype)
    return torch.tensor(1.0 / scale, dtype=dtype) if scale else rows / made


def _cubic(distance: Tensor, a: float) -> Tensor:
    x = distance.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _antialiased(kind: str, size: int, at: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    stretch = step.clamp(min=1)
    support = (1.0 if kind == "linear" else 2.0) * stretch
    center = step * (at + 0.5)
    first = (center - support + 0.5).long().clamp(min=0)
    count = (center + support + 0.5).long().clamp(max=size) - first
    offsets = torch.arange(int(count.max()))
    distance = (offsets + first.unsqueeze(1) - center.unsqueeze(1) + 0.5) / stretch
    weights = (1 - distance.abs()).clamp(min=0) if kind == "linear" else _cubic(distance, -0.5)
    weights = torch.where(offsets < count.unsqueeze(1), weights, torch.zeros_like(weights))
    return (first.unsqueeze(1) + offsets).clamp(max=size - 1), weights / weights.sum(1, keepdim=True)


def apply_taps(local: Tensor, dim: int, taps: Taps) -> Tensor:
    """Interpolate along `dim`."""
    rows, weights = taps.on(local.device)
    if weights is None:
        return local.index_select(dim, rows[:, 0])
    wide = local.to(weights.dtype)
    if rows.shape[1] > 4:
        matrix = weights.new_zeros(rows.shape[0], local.shape[dim]).scatter_add_(1, rows, weights)
        return torch.matmul(wide.movedim(dim, -1), matrix.t()).movedim(-1, dim).to(local.dtype)
    shape = (-1, *[1] * (local.ndim - 1 - dim))
    parts = [wide.index_select(dim, rows[:, i]) * weights[:, i].view(shape) for i in range(rows.shape[1])]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(local.dtype)

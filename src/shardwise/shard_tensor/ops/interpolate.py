"""Interpolation in every mode, to any size or scale, on any shards.

A sharded dim that grows by a whole factor runs torch's own kernel on the local rows and their halo; any other is interpolated with
the weights of its global rows (`taps.py`). Unsharded dims always run torch's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shardwise.shard_tensor.empty import connected_empty
from shardwise.shard_tensor.halo import Halo, fetch, make_halo, with_sizes
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.taps import Resize, Rows, Taps, apply_taps
from shardwise.shard_tensor.tensor import from_local, redistribute, to_local
from shardwise.spec.spans import Span

AREA = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
KINDS = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the ranks do. tables: (dim, rows and weights) for this rank's outputs. native: arguments of torch's own kernel, None if no
    dim needs it. pieces: (dim, first row, rows) of its result that are this rank's output."""

    halos: tuple[Halo, ...]
    tables: tuple[tuple[int, Taps], ...]
    native: dict | None
    pieces: tuple[tuple[int, int, int], ...]
    out: ShardTensorSpec


@shard_function(F.interpolate)
def interpolate(input, size=None, scale_factor=None, mode="nearest", align_corners=None, recompute_scale_factor=None, antialias=False):
    """Communication: for each sharded spatial dim one exchange of the rows that a rank's outputs read and that it does not own (none
    for nearest by a whole factor), backward the same. Mode "area" is adaptive average pooling. Integer tensors, but for the nearest
    modes, are gathered."""
    n = input.ndim - 2
    nearest = mode.startswith("nearest")
    if not input.is_floating_point() and not nearest:
        return NotImplemented
    x = redistribute(input, input._spec.gradient())
    spec = x._spec
    size, scale_factor = (tuple(v) if isinstance(v, list | tuple) else v for v in (size, scale_factor))
    key = ("interpolate", size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    plan = spec.cached(key, lambda: _make_plan(spec, n, *key[1:]))
    if mode == "area":
        return AREA[n](x, plan.out.shape[2:])
    local = fetch(to_local(x), spec, plan.halos)
    if 0 in plan.out.local_shape:
        return from_local(connected_empty(plan.out.local_shape, local), plan.out)
    for dim, table in plan.tables:
        local = apply_taps(local, dim, table)
    if plan.native is not None:
        local = F.interpolate(local, mode=mode, align_corners=align_corners, antialias=antialias, **plan.native)
    for piece in plan.pieces:
        local = local.narrow(*piece)
    return from_local(local, plan.out)


def _make_plan(spec: ShardTensorSpec, n: int, size, scale_factor, mode: str, align_corners, recompute, antialias: bool) -> _Plan:
    whole = torch.empty(spec.shape, device="meta")
    shape = tuple(F.interpolate(whole, size, scale_factor, mode, align_corners, recompute, antialias).shape)
    scales: list[float | None] = [None] * n
    if scale_factor is not None and not recompute:
        scales = list(scale_factor) if isinstance(scale_factor, tuple) else [scale_factor] * n
    dtype = torch.float64 if spec.dtype is torch.float64 else torch.float32
    halos, tables, pieces = [], [], []
    sizes: list[int] = []
    factors: list[float] = []
    for i in range(n if mode != "area" else 0):
        dim = 2 + i
        resize = Resize(
            kind=KINDS.get(mode, mode),
            size=spec.shape[dim],
            outputs=shape[dim],
            scale=scales[i],
            align_corners=bool(align_corners),
            antialias=antialias,
        )
        if spec.sizes[dim] is None:
            sizes.append(shape[dim])
            factors.append(scales[i] or 1.0)
            continue
        factor = resize.factor
        rows, weights = resize.table(dtype) if factor is None else ((), None)
        halo = _halo(spec, dim, resize, rows)
        halos.append(halo)
        low, high = halo.reads[halo.block]
        start, stop = halo.made
        if factor is None:
            local = tuple(tuple(row - low for row in taps) for taps in rows[start:stop])
            tables.append((dim, Taps(rows=local, weights=weights and weights[start:stop], dtype=dtype)))
            sizes.append(stop - start)
            factors.append(1.0)
        else:
            sizes.append((high - low) * factor)
            factors.append(float(factor))
            if (start, stop) != (low * factor, high * factor):
                pieces.append((dim, start - low * factor, stop - start))
    native = None
    if any(spec.sizes[2 + i] is None and shape[2 + i] != spec.shape[2 + i] for i in range(n)) or any(f != 1 for f in factors):
        native = {"size": sizes} if scales[0] is None else {"scale_factor": factors, "recompute_scale_factor": False}
    return _Plan(halos=tuple(halos), tables=tuple(tables), native=native, pieces=tuple(pieces), out=with_sizes(spec, shape, halos))


def _halo(spec: ShardTensorSpec, dim: int, resize: Resize, rows: Rows) -> Halo:
    factor, around = resize.factor, resize.halo

    def reads(owned: Span, makes: Span) -> Span:
        if factor is not None:
            return max(0, makes[0] // factor - around), min(resize.size, -(-makes[1] // factor) + around)
        read = [row for taps in rows[makes[0] : makes[1]] for row in taps]
        return min(read), max(read) + 1

    return make_halo(spec, dim, resize.outputs, lambda o: (2 * o + 1) * resize.size // (2 * resize.outputs), reads)

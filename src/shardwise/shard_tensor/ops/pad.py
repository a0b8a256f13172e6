"""Padding of every mode and width, cropping included, on any dims and shards.

Padded rows belong to the first and last rank of a sharded dim. Constant ones are made there; reflected, replicated and circular ones
are fetched from whoever owns the rows they repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.shard_tensor.halo import Halo, fetch, make_halo, with_sizes
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import from_local, redistribute, share_memory, to_local
from shardwise.spec.spans import Span, Spans, as_spans
from shardwise.spec.windows import runs


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the ranks do. native: padding of the unsharded dims, as torch takes it. tables: (dim, the fetched row of each row made)."""

    halos: tuple[Halo, ...]
    native: tuple[int, ...]
    tables: tuple[tuple[int, tuple[int, ...]], ...]
    out: ShardTensorSpec


@shard_function(F.pad, torch._C._nn.pad)
def pad(input, pad, mode="constant", value=None):
    """Communication: none for constant padding; for the other modes one exchange for each padded sharded dim, of the rows that the
    padding repeats, and for crops none. Backward the same."""
    pad = tuple(int(rows) for rows in pad)
    x = redistribute(input, input._spec.gradient())
    spec = x._spec
    plan = spec.cached(("pad", pad, mode), lambda: _make_plan(spec, pad, mode))
    local = fetch(to_local(x), spec, plan.halos, 0 if value is None else value)
    for dim, table in plan.tables:
        local = local.index_select(dim, torch.tensor(table, dtype=torch.int64, device=local.device))
    if any(plan.native):
        local = _pad_local(local, plan.native, mode, value)
    if share_memory(local, x._local_tensor):  # rows of this rank alone, none added
        local = local.clone()
    return from_local(local, plan.out)


@shard_function(torch.constant_pad_nd)
def constant_pad_nd(input, pad, value=0):
    """Communication: none."""
    return F.pad(input, pad, "constant", value)


def _make_plan(spec: ShardTensorSpec, pads: tuple[int, ...], mode: str) -> _Plan:
    shape = tuple(F.pad(torch.empty(spec.shape, device="meta"), pads, mode).shape)
    halos, tables, native = [], [], list(pads)
    for i in range(len(pads) // 2):
        dim = spec.ndim - 1 - i
        before, after = pads[2 * i : 2 * i + 2]
        if not (before or after):
            continue
        if mode != "constant":
            rows = source_rows(spec.shape[dim], before, after, mode)  # raises here, on all ranks, what torch finds only with data
        if spec.sizes[dim] is None:
            continue
        native[2 * i : 2 * i + 2] = 0, 0
        if mode == "constant":
            halos.append(_shifted(spec, dim, shape[dim], before))
            continue
        halo = _repeating(spec, dim, rows, before)
        halos.append(halo)
        have = [row for span in as_spans(halo.reads[halo.block]) for row in range(*span)]
        want = rows[slice(*halo.made)]
        if list(want) != have:
            places = {row: place for place, row in enumerate(have)}
            tables.append((dim, tuple(places[row] for row in want)))
    return _Plan(halos=tuple(halos), native=tuple(native), tables=tuple(tables), out=with_sizes(spec, shape, halos))


def _shifted(spec: ShardTensorSpec, dim: int, outputs: int, before: int) -> Halo:
    def reads(owned: Span, makes: Span) -> Span:
        return makes[0] - before, makes[1] - before

    return make_halo(spec, dim, outputs, lambda o: o - before, reads)


def _repeating(spec: ShardTensorSpec, dim: int, rows: tuple[int, ...], before: int) -> Halo:
    def reads(owned: Span, makes: Span) -> Spans:
        return runs(rows[slice(*makes)])

    return make_halo(spec, dim, len(rows), lambda o: o - before, reads)


@torch.compiler.assume_constant_result
def source_rows(size: int, before: int, after: int, mode: str) -> tuple[int, ...]:
    """The input row of each row of a padded dim, by torch itself."""
    with _disable_current_modes():  # with numbers, also where the compiler traces without them
        return _source_rows(size, before, after, mode)


@lru_cache(maxsize=1024)
def _source_rows(size: int, before: int, after: int, mode: str) -> tuple[int, ...]:
    kept = size + min(before, 0) + min(after, 0)
    if mode == "circular" and max(before, after) > kept:  # torch leaves such rows undefined when it also crops
        raise RuntimeError(
            f"circular padding by {before} and {after} of {size} rows wraps around the {kept} rows that are left more than once"
        )
    rows = torch.arange(size, dtype=torch.float64).view(1, 1, size)
    return tuple(F.pad(rows, (before, after), mode).flatten().long().tolist())


def _pad_local(local: Tensor, pads: tuple[int, ...], mode: str, value: float | None) -> Tensor:
    if mode == "constant" or local.numel():
        return F.pad(local, pads, mode, value)
    for i in range(len(pads) // 2):  # torch refuses to repeat rows of an empty tensor
        dim = local.ndim - 1 - i
        rows = source_rows(local.shape[dim], *pads[2 * i : 2 * i + 2], mode) if local.shape[dim] else ()
        local = local.index_select(dim, torch.tensor(rows, dtype=torch.int64, device=local.device))
    return local

"""Ops that only rearrange dims: view, permute, expand, slice, select and their like, and their backward forms.

Communication: none, except where a view regroups a sharded dim off its row borders (rows are rebalanced), where the
sharded dim does not lead its run (the shard moves), and where one row of a sharded dim is selected (it is broadcast).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardwise.shard_tensor.aliases import copied, same_memory
from shardwise.shard_tensor.redistribute import redistribute_local
from shardwise.shard_tensor.registry import call_function, functions, shard_rule
from shardwise.shard_tensor.regroup import complete_shape, view_specs
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor

aten = torch.ops.aten
_slice = aten.slice.Tensor._op
_NoTorchFunction = torch._C.DisableTorchFunctionSubclass


# ---------------------------------------------------------------------- view and reshape


@shard_rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default)
def view(op, args, kwargs):
    x, shape = args[0], args[1]
    spec = x._spec
    before, after, local_shape = spec.cached(("view", tuple(shape)), lambda: _view_plan(spec, shape))
    if before is spec:
        try:
            return same_memory(ShardTensor(x._local_tensor.view(local_shape), after), x)
        except (RuntimeError, ValueError):  # the shard's memory order allows no view
            pass

    def gather(source: ShardTensor) -> torch.Tensor:
        return redistribute_local(source._local_tensor, spec, before).reshape(local_shape)

    def push(source: ShardTensor, written: torch.Tensor) -> None:
        source._local_tensor.copy_(redistribute_local(written.reshape(before.local_shape), before, spec))

    return copied(ShardTensor(gather(x), after), x, gather, push)


def _view_plan(spec: ShardTensorSpec, shape: Sequence[int]):
    shape = complete_shape(shape, spec.numel)
    before, after = view_specs(spec, shape)
    with suppress(RuntimeError):  # where the memory order allows a view
        after = after.with_stride(torch.empty_strided(spec.shape, spec.stride, device="meta").view(shape).stride())
    return before, after, after.local_shape


@shard_rule(aten.view.dtype)
def view_dtype(op, args, kwargs):
    """Another dtype on the same bytes; between dtypes of different size the last dim must not be sharded."""
    x, dtype = args
    source, spec = x._spec, x._spec.gradient()  # the bytes of a pending sum are not a sum
    if dtype.itemsize != spec.dtype.itemsize and spec.sizes[-1] is not None:
        spec = spec.replicate(spec.mesh_dims_of(spec.ndim - 1))

    def gather(of: ShardTensor) -> torch.Tensor:
        return redistribute_local(of._local_tensor, source, spec).view(dtype)

    def push(of: ShardTensor, written: torch.Tensor) -> None:
        of._local_tensor.copy_(redistribute_local(written.view(source.dtype), spec, source))

    shape = (*spec.shape[:-1], spec.shape[-1] * spec.dtype.itemsize // dtype.itemsize) if spec.ndim else ()
    result = ShardTensor(gather(x), spec.with_dims(shape, range(spec.ndim), dtype=dtype))
    return same_memory(result, x) if spec is source else copied(result, x, gather, push)


# ---------------------------------------------------------------------- order of dims


def _reordered(spec: ShardTensorSpec, order: Sequence[int]) -> ShardTensorSpec:
    return spec.with_dims([spec.shape[d] for d in order], order, tuple(spec.stride[d] for d in order))


def transpose_local(x: ShardTensor, dim0: int, dim1: int) -> ShardTensor:
    spec = x._spec

    def make() -> ShardTensorSpec:
        order = list(range(spec.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return _reordered(spec, order)

    return same_memory(ShardTensor(x._local_tensor.transpose(dim0, dim1), spec.cached(("transpose", dim0, dim1), make)), x)


@shard_rule(aten.transpose.int)
def transpose(op, args, kwargs):
    return transpose_local(*args)


@shard_rule(aten.t.default)
def t(op, args, kwargs):
    (x,) = args
    return transpose_local(x, 0, 1) if x._spec.ndim == 2 else x


@shard_rule(aten.permute.default)
def permute(op, args, kwargs):
    x, dims = args
    spec = x._spec
    order = tuple(d % spec.ndim for d in dims)
    out = spec.cached(("permute", order), lambda: _reordered(spec, order))
    return same_memory(ShardTensor(x._local_tensor.permute(order), out), x)


# ---------------------------------------------------------------------- size-1 dims


def _without_shards(x: ShardTensor, dims: Sequence[int]) -> ShardTensor:
    """A view of `x` with the given dims unsharded; `x` itself if they are."""
    axes = [axis for dim in dims if x._spec.sizes[dim] is not None for axis in x._spec.mesh_dims_of(dim)]
    if not axes:
        return x
    spec, whole = x._spec, x._spec.replicate(sorted(axes))

    def gather(source: ShardTensor) -> torch.Tensor:
        return redistribute_local(source._local_tensor, spec, whole)

    def push(source: ShardTensor, written: torch.Tensor) -> None:
        source._local_tensor.copy_(redistribute_local(written, whole, spec))

    return copied(ShardTensor(gather(x), whole), x, gather, push)


@shard_rule(aten.unsqueeze.default)
def unsqueeze(op, args, kwargs):
    x, dim = args
    spec = x._spec
    dim = dim % (spec.ndim + 1)

    def make():
        shape = [*spec.shape[:dim], 1, *spec.shape[dim:]]
        inner = spec.shape[dim] * spec.stride[dim] if dim < spec.ndim else 1
        return spec.with_dims(shape, [*range(dim), None, *range(dim, spec.ndim)], (*spec.stride[:dim], inner, *spec.stride[dim:]))

    return same_memory(ShardTensor(x._local_tensor.unsqueeze(dim), spec.cached(("unsqueeze", dim), make)), x)


@shard_rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(op, args, kwargs):
    x = args[0]
    ndim = x._spec.ndim
    named = range(ndim) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = {d % ndim for d in named if ndim and x._spec.shape[d] == 1}
    x = _without_shards(x, sorted(gone))
    local, spec = x._local_tensor, x._spec
    kept = [d for d in range(ndim) if d not in gone]
    out = spec.with_dims([spec.shape[d] for d in kept], kept, tuple(spec.stride[d] for d in kept))
    return same_memory(ShardTensor(local.squeeze(tuple(sorted(gone))) if gone else local.view(local.shape), out), x)


@shard_rule(aten.expand.default)
def expand(op, args, kwargs):
    x, size = args[0], tuple(args[1])
    shift = len(size) - x._spec.ndim
    grown = [d for d in range(x._spec.ndim) if x._spec.shape[d] == 1 and size[d + shift] not in (1, -1)]
    x = _without_shards(x, grown)
    spec = x._spec
    shape = tuple(spec.shape[i - shift] if n == -1 else n for i, n in enumerate(size))
    stride = tuple(0 if i < shift or (spec.shape[i - shift] == 1 and shape[i] != 1) else spec.stride[i - shift] for i in range(len(shape)))
    out = spec.with_dims(shape, [None] * shift + list(range(spec.ndim)), stride)
    for d in range(spec.ndim):
        if spec.sizes[d] is None and shape[d + shift] != spec.shape[d] and spec.shape[d] != 1:
            raise RuntimeError(f"expand: dim {d} of size {spec.shape[d]} cannot become {shape[d + shift]}")
    return same_memory(ShardTensor(x._local_tensor.expand(out.local_shape), out), x)


# ---------------------------------------------------------------------- slices


def _bounds(start: int | None, stop: int | None, step: int, size: int) -> tuple[int, int]:
    return slice(start, stop, step).indices(size)[:2]


def sliced(x: ShardTensor, dim: int, start: int | None, stop: int | None, step: int = 1) -> ShardTensor:
    """Rows start:stop:step of `dim`. On a sharded dim each rank keeps those of its own rows; shards may become empty."""
    return _sliced(x, (dim, start, stop, step))


def _sliced(x: ShardTensor, key: tuple) -> ShardTensor:
    spec = x._spec
    plan = spec._cache.get(key)
    if plan is None:
        plan = spec._cache[key] = _slice_plan(spec, *key)
    on_shards, dim, start, count, step, out = plan
    if on_shards:
        _remember(spec, dim)
    local = x._local_tensor.narrow(dim, start, count) if step == 1 else _slice(x._local_tensor, dim, start, start + count, step)
    return same_memory(ShardTensor(local, out), x)


def _remember(spec: ShardTensorSpec, dim: int) -> None:
    """Keep the layout of a tensor cut along a sharded dim: its gradient is best laid out the same way.

    A hint only. It is the same on all ranks, since all cut the same tensors in the same order; a gradient is right in any layout.
    """
    spec.mesh.__dict__.setdefault("_shardwise_cuts", {})[spec.shape, dim, spec.placements] = spec.sizes[dim]


def _remembered(spec: ShardTensorSpec, shape: tuple[int, ...], dim: int, placements) -> tuple[int, ...] | None:
    return spec.mesh.__dict__.get("_shardwise_cuts", {}).get((shape, dim, placements))


def _slice_plan(spec: ShardTensorSpec, dim: int, start: int | None = None, stop: int | None = None, step: int = 1):
    """Whether it cuts a sharded dim; dim, start, length and step of this rank's slice; the layout of the result."""
    dim %= spec.ndim
    start, stop = _bounds(start, stop, step, spec.shape[dim])
    count = len(range(start, stop, step))
    shape = [*spec.shape[:dim], count, *spec.shape[dim + 1 :]]
    stride = (*spec.stride[:dim], spec.stride[dim] * step, *spec.stride[dim + 1 :])
    blocks = spec.sizes[dim]
    if blocks is None:
        return False, dim, start, max(stop - start, 0), step, spec.with_dims(shape, range(spec.ndim), stride)
    kept = rows_kept(blocks, start, stop, step)
    sizes = (*spec.sizes[:dim], tuple(len(rows) for rows in kept), *spec.sizes[dim + 1 :])
    mine = kept[spec.block_index(dim, spec.coordinate)]
    first, last = (mine.start, mine[-1] + 1) if len(mine) else (0, 0)
    out = ShardTensorSpec(spec.mesh, spec.placements, tuple(shape), sizes, spec.dtype, stride)
    return True, dim, first, last - first, step, out


def rows_kept(blocks: Sequence[int], start: int, stop: int, step: int) -> list[range]:
    """For each block, the local rows among start:stop:step of the whole dim."""
    kept, low = [], 0
    for size in blocks:
        first = start if start >= low else start + -(-(low - start) // step) * step
        kept.append(range(first - low, min(stop, low + size) - low, step) if first < min(stop, low + size) else range(0))
        low += size
    return kept


@shard_rule(aten.slice.Tensor)
def slice_tensor(op, args, kwargs):
    return _sliced(args[0], args[1:] or (0,))


@shard_rule(aten.select.int)
def select(op, args, kwargs):
    """One row of `dim`. On a sharded dim its owner broadcasts it and the result is replicated over that axis."""
    x, dim, index = args
    dim %= x._spec.ndim
    index = index + x._spec.shape[dim] if index < 0 else index
    if not 0 <= index < x._spec.shape[dim]:
        raise IndexError(f"index {args[2]} is out of bounds for dim {dim} with size {x._spec.shape[dim]}")
    if x._spec.sizes[dim] is None:
        spec = x._spec
        kept = [d for d in range(spec.ndim) if d != dim]
        out = spec.cached(("select", dim), lambda: spec.with_dims([spec.shape[d] for d in kept], kept, tuple(spec.stride[d] for d in kept)))
        return same_memory(ShardTensor(x._local_tensor.select(dim, index), out), x)
    return select(op, (_without_shards(sliced(x, dim, index, index + 1), [dim]), dim, 0), {})


@shard_rule(aten.slice_backward.default)
def slice_backward(op, args, kwargs):
    """Zeros of the whole shape with `grad` in the slice. Rows outside the slice go to the ranks next to it."""
    grad, shape, dim, start, stop, step = args
    dim %= len(shape)
    spec = grad._spec
    start, stop = _bounds(start, stop, step, shape[dim])
    blocks = spec.sizes[dim]
    if blocks is None or not spec.shape[dim]:
        grad = grad if blocks is None else _without_shards(grad, [dim])
        local, spec = grad._local_tensor, grad._spec
        out = spec.cached(("slice_backward", tuple(shape)), lambda: spec.with_dims(shape, range(spec.ndim)))
        return ShardTensor(op(local, out.local_shape, dim, start, stop, step), out)
    borders = [sum(blocks[:i]) for i in range(len(blocks) + 1)]
    rows = _remembered(spec, tuple(shape), dim, spec.placements)
    if rows is None or tuple(map(len, rows_kept(rows, start, stop, step))) != blocks:
        cuts = [0, *(start + border * step if border < spec.shape[dim] else shape[dim] for border in borders[1:-1]), shape[dim]]
        rows = tuple(b - a for a, b in pairwise(cuts))
    sizes = (*spec.sizes[:dim], rows, *spec.sizes[dim + 1 :])
    out = ShardTensorSpec(spec.mesh, spec.placements, tuple(shape), sizes, spec.dtype)
    me = spec.block_index(dim, spec.coordinate)
    local = grad._local_tensor
    if not blocks[me]:
        return ShardTensor(local.new_zeros(out.local_shape), out)
    first = start + borders[me] * step - sum(rows[:me])
    return ShardTensor(op(local, out.local_shape, dim, first, first + (blocks[me] - 1) * step + 1, step), out)


@shard_rule(aten.select_backward.default)
def select_backward(op, args, kwargs):
    """Zeros of the whole shape with `grad` in one row, in the layout of the tensor the row was taken from."""
    grad, shape, dim, index = args
    dim %= len(shape)
    spec = grad._spec
    shape = tuple(shape)
    for placements, rows in _layouts_cut(spec, shape, dim):
        axes = tuple(i for i, p in enumerate(placements) if p == Shard(dim))
        if any(not isinstance(spec.placements[i], Replicate) for i in axes):
            continue
        merged = tuple(p if i in axes else _shifted(spec.placements[i], dim) for i, p in enumerate(placements))
        sizes = (*spec.sizes[:dim], rows, *spec.sizes[dim:])
        out = ShardTensorSpec(spec.mesh, merged, shape, sizes, spec.dtype)
        start, stop = out.box()[dim]
        index = index % shape[dim]
        if start <= index < stop:
            return ShardTensor(op(grad._local_tensor, out.local_shape, dim, index - start), out)
        return ShardTensor(grad._local_tensor.new_zeros(out.local_shape), out)
    out = spec.with_dims(shape, [*range(dim), None, *range(dim, spec.ndim)])
    return ShardTensor(op(grad._local_tensor, out.local_shape, dim, index), out)


def _layouts_cut(spec: ShardTensorSpec, shape: tuple[int, ...], dim: int):
    """The remembered layouts of tensors of this shape that were cut along `dim`, latest first."""
    cuts = spec.mesh.__dict__.get("_shardwise_cuts", {})
    return [(placements, rows) for (s, d, placements), rows in reversed(cuts.items()) if s == shape and d == dim]


def _shifted(placement, dim: int):
    return Shard(placement.dim + 1) if isinstance(placement, Shard) and placement.dim >= dim else placement


@shard_rule(aten.split.Tensor, aten.unsafe_split.Tensor)
def split(op, args, kwargs):
    x, size, dim = (*args, 0)[:3]
    count = x._spec.shape[dim]
    starts = range(0, count, size) if count else [0]
    return [sliced(x, dim, start, min(start + size, count)) for start in starts]


@shard_rule(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(op, args, kwargs):
    x, sizes, dim = (*args, 0)[:3]
    if sum(sizes) != x._spec.shape[dim]:
        raise RuntimeError(f"split sizes {list(sizes)} add up to {sum(sizes)}, but dim {dim} has {x._spec.shape[dim]}")
    parts, start = [], 0
    for size in sizes:
        parts.append(sliced(x, dim, start, start + size))
        start += size
    return parts


@shard_rule(aten.unbind.int)
def unbind(op, args, kwargs):
    x, dim = (*args, 0)[:2]
    dim %= x._spec.ndim
    x = _without_shards(x, [dim])
    return [select(aten.select.int, (x, dim, i), {}) for i in range(x._spec.shape[dim])]


# ---------------------------------------------------------------------- the same tensor


@shard_rule(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def same(op, args, kwargs):
    return same_memory(ShardTensor(op(args[0]._local_tensor), args[0]._spec), args[0])


@shard_rule(aten.view_as_real.default)
def view_as_real(op, args, kwargs):
    spec = args[0]._spec
    local = op(args[0]._local_tensor)
    out = spec.with_dims((*spec.shape, 2), [*range(spec.ndim), None], (*(2 * s for s in spec.stride), 1), local.dtype)
    return same_memory(ShardTensor(local, out), args[0])


@shard_rule(aten.view_as_complex.default)
def view_as_complex(op, args, kwargs):
    x = _without_shards(args[0], [args[0]._spec.ndim - 1])
    spec = x._spec
    out = spec.with_dims(spec.shape[:-1], range(spec.ndim - 1), tuple(s // 2 for s in spec.stride[:-1]), x.dtype.to_complex())
    if x._local_tensor.stride()[-1] == 1:
        return same_memory(ShardTensor(op(x._local_tensor), out), x)

    def gather(source: ShardTensor) -> torch.Tensor:
        return op(source._local_tensor.contiguous())

    def push(source: ShardTensor, written: torch.Tensor) -> None:
        source._local_tensor.copy_(torch.view_as_real(written))

    return copied(ShardTensor(gather(x), out), x, gather, push)


# ---------------------------------------------------------------------- the short way, where nothing is recorded


def _fast_transpose(func, types, args, kwargs):
    if len(args) != 3 or kwargs or not isinstance(args[0], ShardTensor):
        return call_function(func, types, args, kwargs)
    if torch.is_grad_enabled():
        with _NoTorchFunction():
            if args[0].requires_grad:
                return func(*args)
    elif torch.is_inference_mode_enabled():  # whether the view is an ordinary tensor is decided below
        return call_function(func, types, args, kwargs)
    return transpose_local(*args)


def _fast_view(func, types, args, kwargs):
    x = args[0]
    shape = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if kwargs or not isinstance(x, ShardTensor) or not shape or not all(type(n) is int for n in shape):
        return call_function(func, types, args, kwargs)
    if torch.is_grad_enabled():
        with _NoTorchFunction():
            if x.requires_grad:
                return func(*args)
    elif torch.is_inference_mode_enabled():
        return call_function(func, types, args, kwargs)
    return view(aten.view.default, (x, shape), {})


def _fast_getitem(func, types, args, kwargs):
    """Slices and integers: local where they cut unsharded dims only."""
    x, index = args
    items = index if type(index) is tuple else (index,)
    for item in items:
        if type(item) is not slice and type(item) is not int:
            return call_function(func, types, args, kwargs)
    if torch.is_grad_enabled():
        with _NoTorchFunction():
            if x.requires_grad:
                return x[index]
    elif torch.is_inference_mode_enabled():
        return call_function(func, types, args, kwargs)
    key = tuple((item.start, item.stop, item.step) if type(item) is slice else item for item in items)
    spec = x._spec
    key = ("getitem", *key)
    if key not in spec._cache:
        spec._cache[key] = _getitem_spec(spec, key[1:])
    out = spec._cache[key]
    return call_function(func, types, args, kwargs) if out is None else same_memory(ShardTensor(x._local_tensor[index], out), x)


def _getitem_spec(spec: ShardTensorSpec, key: tuple) -> ShardTensorSpec | None:
    """The layout of `x[key]`, or None where it cuts a sharded dim or is out of range (left to the operators themselves)."""
    if len(key) > spec.ndim:
        return None
    shape, source, stride = [], [], []
    for dim in range(spec.ndim):
        item = key[dim] if dim < len(key) else (None, None, None)
        size = spec.shape[dim]
        if type(item) is int:
            if spec.sizes[dim] is not None or not -size <= item < size:
                return None
            continue
        if not all(n is None or type(n) is int for n in item) or (item[2] or 1) < 1:
            return None
        rows = range(size)[slice(*item)]
        if spec.sizes[dim] is not None and rows != range(size):
            return None
        shape.append(len(rows))
        source.append(dim)
        stride.append(spec.stride[dim] * rows.step)
    return spec.with_dims(shape, source, tuple(stride))


functions |= {torch.transpose: _fast_transpose, torch.Tensor.transpose: _fast_transpose}
functions |= {torch.Tensor.view: _fast_view, torch.Tensor.__getitem__: _fast_getitem}

"""Order along a dim that may be sharded: sorting, ranks of values, flipping, rolling, repeating.

An op that compares all rows of a dim runs where the dim is whole: the split moves to another dim and back (`transposed.py`). Indices are
global, since each rank then sees every row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.shard_tensor.arguments import is_dim, normal_dim, torch_names
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.rows import repeat_spans, resized, take_spans
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.shard_tensor.transposed import run_there_and_back, run_whole
from shardwise.spec.spans import spans_of

aten = torch.ops.aten


# ---------------------------------------------------------------------- sorting


@shard_function(torch.sort, Tensor.sort)
@torch_names
def sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool | None = False, **other):
    """Communication: none along an unsharded dim, else three all-to-alls (there, values and indices back)."""
    if other or not isinstance(input, ShardTensor) or not is_dim(dim) or not input.ndim:
        return NotImplemented
    dim = normal_dim(dim, input.ndim)
    result = run_there_and_back(input, [dim], lambda x: tuple(torch.sort(x, dim=dim, descending=descending, stable=bool(stable))))
    return torch.return_types.sort(result)


@shard_function(torch.argsort, Tensor.argsort)
@torch_names
def argsort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False):
    """Communication: none along an unsharded dim, else two all-to-alls."""
    if not isinstance(input, ShardTensor) or not is_dim(dim) or not input.ndim:
        return NotImplemented
    dim = normal_dim(dim, input.ndim)
    return run_there_and_back(input.detach(), [dim], lambda x: torch.argsort(x, dim=dim, descending=descending, stable=stable))


@shard_function(torch.msort, Tensor.msort)
@torch_names
def msort(input: Tensor):
    """Communication: as `sort`."""
    if not isinstance(input, ShardTensor) or not input.ndim:
        return NotImplemented
    return run_there_and_back(input, [0], torch.msort)


@shard_function(torch.topk, Tensor.topk)
@torch_names
def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True):
    """Communication: none along an unsharded dim, else k rows of each rank gathered, values and indices."""
    if not isinstance(input, ShardTensor) or not is_dim(dim) or not isinstance(k, int) or not input.ndim:
        return NotImplemented
    x = redistribute(input, input._spec.gradient())
    spec = x._spec
    dim = normal_dim(dim, spec.ndim)
    if not 0 <= k <= spec.shape[dim]:
        raise RuntimeError(f"topk: k={k} is out of range for dim {dim} of size {spec.shape[dim]}")
    blocks = spec.sizes[dim]
    if blocks is None:
        return torch.return_types.topk(run_whole(x, [dim], lambda t: tuple(t.topk(k, dim, largest, sorted))))
    local = to_local(x)
    values, indices = local.topk(min(k, local.shape[dim]), dim, largest, True)
    few = resized(spec, dim, tuple(min(k, rows) for rows in blocks))
    axes = spec.mesh_dims_of(dim)
    values = redistribute(from_local(values, few), few.replicate(axes))
    indices = redistribute(ShardTensor(indices + spec.box()[dim][0], few), few.replicate(axes))
    best, places = to_local(values).topk(k, dim, largest, sorted)
    out = resized_whole(values._spec, dim, k)
    return torch.return_types.topk((from_local(best, out), ShardTensor(indices._local_tensor.gather(dim, places), out)))


def resized_whole(spec: ShardTensorSpec, dim: int, size: int) -> ShardTensorSpec:
    """`spec` with another size of unsharded `dim`."""
    return ShardTensorSpec(spec.mesh, spec.placements, (*spec.shape[:dim], size, *spec.shape[dim + 1 :]), spec.sizes, spec.dtype)


# ---------------------------------------------------------------------- one value of the order


def _picking(func, return_type):
    """A handler for `func(input, ..., dim, keepdim)` that gives values and indices."""

    def pick(x: ShardTensor, dim: int, keepdim: bool, *args):
        dim = normal_dim(dim, x.ndim)
        values, indices = run_whole(x, [dim], lambda t: tuple(func(t, *args, dim=dim, keepdim=True)))
        return return_type((values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim)))

    return pick


_kth = _picking(torch.kthvalue, torch.return_types.kthvalue)
_median = _picking(torch.median, torch.return_types.median)
_nanmedian = _picking(torch.nanmedian, torch.return_types.nanmedian)
_mode = _picking(torch.mode, torch.return_types.mode)


@shard_function(torch.kthvalue, Tensor.kthvalue)
@torch_names
def kthvalue(input: Tensor, k: int, dim: int = -1, keepdim: bool = False):
    """Communication: none along an unsharded dim, else one all-to-all."""
    if not isinstance(input, ShardTensor) or not is_dim(dim) or not input.ndim:
        return NotImplemented
    return _kth(input, dim, keepdim, k)


@shard_function(torch.median, Tensor.median)
@torch_names
def median(input: Tensor, dim: int | None = None, keepdim: bool = False):
    """Communication: along an unsharded dim none, along a sharded one an all-to-all; of everything, the tensor is gathered."""
    if not isinstance(input, ShardTensor) or not is_dim(dim) or not input.ndim:
        return NotImplemented
    return _median(input, dim, keepdim)


@shard_function(torch.nanmedian, Tensor.nanmedian)
@torch_names
def nanmedian(input: Tensor, dim: int | None = None, keepdim: bool = False):
    """Communication: as `median`."""
    if not isinstance(input, ShardTensor) or not is_dim(dim) or not input.ndim:
        return NotImplemented
    return _nanmedian(input, dim, keepdim)


@shard_function(torch.mode, Tensor.mode)
@torch_names
def mode(input: Tensor, dim: int = -1, keepdim: bool = False):
    """Communication: none along an unsharded dim, else one all-to-all."""
    if not isinstance(input, ShardTensor) or not is_dim(dim) or not input.ndim:
        return NotImplemented
    return _mode(input, dim, keepdim)


def _quantile_of(func):
    def handler(input: Tensor, q, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"):
        if not isinstance(input, ShardTensor) or isinstance(q, ShardTensor) or not (dim is None or is_dim(dim)):
            return NotImplemented
        if dim is None:
            result = handler(input.reshape(-1), q, 0, interpolation=interpolation)
            return result.reshape(*result.shape, *(1,) * input.ndim) if keepdim else result
        dim = normal_dim(dim, input.ndim)
        many = isinstance(q, Tensor) and q.ndim == 1
        points = q if many else [q]
        results = [run_whole(input, [dim], lambda t, p=p: func(t, p, dim, True, interpolation=interpolation)) for p in points]
        results = results if keepdim else [r.squeeze(dim) for r in results]
        return torch.stack(results) if many else results[0]

    handler.__doc__ = (
        "Communication: none along an unsharded dim, else one all-to-all for each quantile; of everything, the tensor is gathered."
    )
    return handler


quantile = shard_function(torch.quantile, Tensor.quantile)(torch_names(_quantile_of(torch.quantile)))
nanquantile = shard_function(torch.nanquantile, Tensor.nanquantile)(torch_names(_quantile_of(torch.nanquantile)))


# ---------------------------------------------------------------------- flip and roll


def _numbers(each: tuple, named: Sequence[int] | int | None) -> tuple:
    """Numbers given one by one, as a sequence, or by name."""
    if named is not None:
        return (named,) if isinstance(named, int) else tuple(named)
    return tuple(each[0]) if len(each) == 1 and not isinstance(each[0], int) else each


@shard_function(torch.flip, Tensor.flip)
def flip(input: Tensor, *each, dims=None):
    """Communication: for each sharded dim, one exchange of the rows that change ranks; none if the rank's own rows stay its own."""
    dims = _numbers(each, dims)
    if not isinstance(input, ShardTensor) or not all(is_dim(d) for d in dims):
        return NotImplemented
    x = redistribute(input, input._spec.gradient())
    dims = [normal_dim(d, x.ndim) for d in dims]
    if len(set(dims)) != len(dims):
        raise RuntimeError(f"flip: dims {tuple(dims)} name a dim twice")
    for dim in dims:
        sizes = x._spec.sizes[dim]
        if sizes is not None:
            total = x._spec.shape[dim]
            x = take_spans(x, dim, [((total - stop, total - start),) for start, stop in spans_of(sizes)], sizes)
    return from_local(to_local(x).flip(dims), x._spec)


@shard_function(torch.fliplr, Tensor.fliplr)
def fliplr(input: Tensor):
    """Communication: as `flip`."""
    return flip(input, 1)


@shard_function(torch.flipud, Tensor.flipud)
def flipud(input: Tensor):
    """Communication: as `flip`."""
    return flip(input, 0)


@shard_function(torch.rot90, Tensor.rot90)
def rot90(input: Tensor, k: int = 1, dims=(0, 1)):
    """Communication: as `flip`; the split turns with the dims."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    first, second = (normal_dim(d, input.ndim) for d in dims)
    if first == second:
        raise RuntimeError(f"rot90: dims {tuple(dims)} name one dim twice")
    match k % 4:
        case 1:
            return flip(input, second).transpose(first, second)
        case 2:
            return flip(input, first, second)
        case 3:
            return flip(input, first).transpose(first, second)
    return input.clone()


@shard_function(torch.roll, Tensor.roll)
def roll(input: Tensor, shifts, dims=()):
    """Communication: for each sharded dim, one exchange of the rows that change ranks."""
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    if not isinstance(input, ShardTensor):
        return NotImplemented
    if not dims:
        if len(shifts) != 1:
            raise RuntimeError(f"roll without dims takes one shift, got {shifts}")
        return roll(input.reshape(-1), shifts, 0).reshape(input.shape)
    if len(shifts) != len(dims):
        raise RuntimeError(f"roll: {len(shifts)} shifts for {len(dims)} dims: give one for each")
    x = redistribute(input, input._spec.gradient())
    whole = []
    for shift, dim in zip(shifts, (normal_dim(d, x.ndim) for d in dims), strict=True):
        sizes, total = x._spec.sizes[dim], x._spec.shape[dim]
        if sizes is None:
            whole.append((shift, dim))
        elif total and shift % total:
            wanted = [_rolled(start - shift, stop - shift, total) for start, stop in spans_of(sizes)]
            x = take_spans(x, dim, wanted, sizes)
    if not whole:
        return x if x is not input else input.clone()
    return from_local(to_local(x).roll([s for s, _ in whole], [d for _, d in whole]), x._spec)


def _rolled(start: int, stop: int, total: int):
    """The rows start:stop of a ring of `total` rows, as spans inside 0:total."""
    count, start = stop - start, start % total
    if start + count <= total:
        return ((start, start + count),)
    return ((start, total), (0, start + count - total))


# ---------------------------------------------------------------------- repeating


@shard_function(Tensor.repeat)
def repeat(input: Tensor, *each, repeats=None):
    """Communication: for each sharded dim that repeats, one exchange: the result is split as `torch.chunk` does."""
    sizes = _numbers(each, repeats)
    if not isinstance(input, ShardTensor) or not all(isinstance(n, int) for n in sizes):
        return NotImplemented
    if len(sizes) < input.ndim or min(sizes, default=1) < 0:
        raise RuntimeError(
            f"repeat: {sizes} for a tensor of shape {tuple(input.shape)}: give one count of at least 0 for each dim at least"
        )
    x = redistribute(input, input._spec.gradient())
    for _ in range(len(sizes) - x.ndim):
        x = x.unsqueeze(0)
    counts = list(sizes)
    for dim in x._spec.sharded_dims:
        blocks, total = len(x._spec.sizes[dim]), x._spec.shape[dim]
        if counts[dim] != 1 and total:
            x = take_spans(x, dim, *repeat_spans(total, counts[dim], blocks))
        counts[dim] = 1
    local = to_local(x).repeat(counts)
    spec = x._spec
    shape = [size * n for size, n in zip(spec.shape, counts, strict=True)]
    return from_local(local, ShardTensorSpec(spec.mesh, spec.placements, tuple(shape), spec.sizes, spec.dtype))


@shard_function(torch.tile, Tensor.tile)
def tile(input: Tensor, *each, dims=None):
    """Communication: as `repeat`."""
    dims = _numbers(each, dims)
    return repeat(input, *(1,) * (input.ndim - len(dims)), *dims)


@shard_function(torch.repeat_interleave, Tensor.repeat_interleave)
@torch_names
def repeat_interleave(input: Tensor, repeats=None, dim: int | None = None, *, output_size: int | None = None):
    """Each rank repeats its own rows. Communication: none; counts that are sharded are gathered."""
    if not isinstance(input, ShardTensor) or repeats is None:
        return NotImplemented
    x = redistribute(input, input._spec.gradient())
    if dim is None:
        x, dim = x.flatten(), 0
    dim = normal_dim(dim, x.ndim)
    blocks = x._spec.sizes[dim]
    counts = repeats.full_tensor() if isinstance(repeats, ShardTensor) else repeats
    if isinstance(counts, Tensor) and counts.numel() == 1:
        counts = int(counts)
    if isinstance(counts, int):
        local = to_local(x).repeat_interleave(counts, dim)
        sizes = None if blocks is None else tuple(rows * counts for rows in blocks)
    else:
        if counts.shape[0] != x._spec.shape[dim]:
            raise RuntimeError(f"repeat_interleave: {counts.shape[0]} counts for dim {dim} of size {x._spec.shape[dim]}")
        start, stop = x._spec.box()[dim]
        local = to_local(x).repeat_interleave(counts[start:stop], dim)
        sizes = None if blocks is None else tuple(int(counts[a:b].sum()) for a, b in spans_of(blocks))
    out = resized(x._spec, dim, sizes) if sizes is not None else resized_whole(x._spec, dim, local.shape[dim])
    return from_local(local, out)


# ---------------------------------------------------------------------- below autograd


_RULES = {
    aten.sort.default: lambda x, dim=-1, descending=False: sort(x, dim, descending),
    aten.sort.stable: lambda x, dim=-1, descending=False, *, stable=None: sort(x, dim, descending, stable=stable),
    aten.argsort.default: argsort,
    aten.topk.default: topk,
    aten.kthvalue.default: kthvalue,
    aten.median.dim: median,
    aten.nanmedian.dim: nanmedian,
    aten.mode.default: mode,
    aten.flip.default: flip,
    aten.roll.default: roll,
    aten.repeat.default: repeat,
}


@shard_rule(*_RULES)
def order_rule(op, args, kwargs):
    """Communication: as the function."""
    with torch.no_grad():
        result = _RULES[op](*args, **kwargs)
    if result is NotImplemented:
        from shardwise.shard_tensor.fallback import fallback_rule

        return fallback_rule(op, args, kwargs)
    return tuple(result) if isinstance(result, tuple) else result

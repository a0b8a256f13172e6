"""Picking rows and elements by index. Indices are global, plain or sharded themselves; negative ones count from the end.

One sharded dim picked from: each rank takes a part of the indices and asks the owners for those rows. Several sharded dims: each rank
fills in the elements it has, and the parts are added up. A mask selects where the rows lie (`masks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardwise.shard_tensor import registry
from shardwise.shard_tensor.adopt import part_of, sharded, whole_value
from shardwise.shard_tensor.arguments import normal_dim, torch_names
from shardwise.shard_tensor.fallback import fallback_rule
from shardwise.shard_tensor.halo import dim_group
from shardwise.shard_tensor.ops import views  # noqa: F401  (its handler for slices stands behind this one's)
from shardwise.shard_tensor.ops.masks import select_masked
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.rows import fetch_rows, row_route
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.shard_tensor.transposed import laid_as, whole_spec

aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)


# ---------------------------------------------------------------------- what `x[...]` says


def has_tensor_index(key) -> bool:
    """Whether a key of `x[key]` holds a tensor or list, beyond integers and slices."""
    for part in key if type(key) is tuple else (key,):
        if type(part) is not slice and type(part) is not int and part is not None and part is not Ellipsis and not isinstance(part, bool):
            return True
    return False


def split_key(x: Tensor, key) -> tuple[tuple, list[Tensor | None]] | None:
    """A key as the part of slices and integers, and the index tensors of the dims that remain; None if it has a bool or an odd part."""
    parts = [*key] if isinstance(key, tuple) else [key]
    parts = [_as_index(part) for part in parts]
    used = sum(
        part.ndim if isinstance(part, Tensor) and part.dtype in MASKS else part is not None and part is not Ellipsis for part in parts
    )
    basic: list = []
    indices: list[Tensor | None] = []
    for part in parts:
        if part is Ellipsis:
            basic += [slice(None)] * (x.ndim - used)
            indices += [None] * (x.ndim - used)
        elif isinstance(part, Tensor):
            if part.dtype in MASKS and not part.ndim:
                return None
            count = part.ndim if part.dtype in MASKS else 1
            basic += [slice(None)] * count
            indices += [part, *[_COVERED] * (count - 1)]
        elif isinstance(part, bool):
            return None
        elif part is None or isinstance(part, slice):
            basic.append(part)
            indices.append(None)
        elif isinstance(part, int):
            basic.append(part)
        else:
            return None
    return tuple(basic), [i for i in indices if i is not _COVERED]


_COVERED = object()  # a dim that a mask of several dims covers after its first


def _as_index(part):
    if isinstance(part, list | tuple | range) or (hasattr(part, "__array__") and not isinstance(part, Tensor)):
        part = torch.as_tensor(part)
        return part.long() if not part.numel() else part
    if isinstance(part, Tensor) and not part.ndim and part.dtype not in MASKS:
        return int(part)
    return part


def _is_everything(basic: tuple) -> bool:
    return all(isinstance(part, slice) and part == slice(None) for part in basic)


_slices = registry.functions[Tensor.__getitem__]  # of views.py


def getitem(func, types, args, kwargs):
    """Slices and integers as views; with index tensors as `index`."""
    if has_tensor_index(args[1]):
        result = _by_tensors(*args)
        if result is not NotImplemented:
            return result
    return _slices(func, types, args, kwargs)


registry.functions[Tensor.__getitem__] = getitem


def _by_tensors(self: Tensor, key):
    if not isinstance(self, ShardTensor):
        return NotImplemented
    split = split_key(self, key)
    if split is None:
        return NotImplemented
    basic, indices = split
    if not any(isinstance(i, Tensor) for i in indices):
        return self[basic]
    return index(self if _is_everything(basic) else self[basic], indices)


# ---------------------------------------------------------------------- x[i, j, ...]


def index(x: Tensor, indices: Sequence[Tensor | None]) -> ShardTensor:
    """`x` indexed by tensors (None: a dim taken whole), as `aten.index`; differentiable.

    Communication: none if the indexed dims are whole and indices are plain or split; one sharded dim: two small exchanges and one of the
    rows asked for; several: one sum of the result; a mask: a gather of counts.
    """
    tensors = [i for i in indices if i is not None]
    if len(tensors) == 1 and tensors[0].dtype in MASKS:
        first = next(dim for dim, i in enumerate(indices) if i is not None)
        return select_masked(sharded(x, [t for t in (x, *tensors) if isinstance(t, ShardTensor)]), tensors[0], first)
    dims, places = index_places(indices)
    x = sharded(x, [t for t in (x, *places) if isinstance(t, ShardTensor)])
    shape = torch.broadcast_shapes(*(tuple(p.shape) for p in places))
    split = [dim for dim in dims if x._spec.sizes[dim] is not None]
    if split and torch.compiler.is_compiling():  # who asks whom depends on data
        x = redistribute(x, x._spec.replicate([axis for dim in split for axis in x._spec.mesh_dims_of(dim)]))
        split = []
    if len(dims) == 1 and split and shape:
        return _ask_owners(x, dims[0], places[0])
    if not split:
        return _pick_here(x, dims, places, shape)
    return _pick_own(x, dims, [whole_value(p) for p in places], shape)


def index_places(indices: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
    """The indexed dims and their integer indices; masks become the places where they are true."""
    dims: list[int] = []
    places: list[Tensor] = []
    dim = 0
    for i in indices:
        if i is None:
            dim += 1
        elif i.dtype in MASKS:
            found = whole_value(i).nonzero().unbind(1)
            dims += range(dim, dim + i.ndim)
            places += found
            dim += i.ndim
        else:
            dims.append(dim)
            places.append(i if i.dtype is torch.int64 else aten._to_copy.default(i, dtype=torch.int64))
            dim += 1
    return dims, places


def result_dims(ndim: int, dims: Sequence[int], count: int) -> list[int | None]:
    """For each dim of `x[indices]` the dim of `x` it is, None for the `count` dims of the broadcast indices: these take the place of the
    indexed dims if those are neighbours, else they lead."""
    kept = [dim for dim in range(ndim) if dim not in dims]
    neighbours = list(dims) == list(range(dims[0], dims[0] + len(dims)))
    at = dims[0] if neighbours else 0
    return [*kept[:at], *[None] * count, *kept[at:]]


def _merged(x: ShardTensorSpec, source: list[int | None], shape: tuple[int, ...], at: ShardTensorSpec | None, dtype) -> ShardTensorSpec:
    """The layout of a result with dims `source` of `x`, the others (of `shape`) laid out as `at`."""
    first = source.index(None) if None in source else 0
    where = {dim: i for i, dim in enumerate(source) if dim is not None}
    whole = tuple(x.shape[dim] if dim is not None else None for dim in source)
    sizes = [x.sizes[dim] if dim is not None else None for dim in source]
    full = [*whole]
    for i, size in enumerate(shape):
        full[first + i] = size
        if at is not None:
            sizes[first + i] = at.sizes[i]
    placements = []
    for axis, p in enumerate(x.placements):
        q = at.placements[axis] if at is not None else Replicate()
        if isinstance(p, Shard) and p.dim in where:
            placements.append(Shard(where[p.dim]))
        else:
            placements.append(Shard(first + q.dim) if isinstance(q, Shard) else Replicate())
    return ShardTensorSpec(x.mesh, tuple(placements), tuple(full), tuple(sizes), dtype)


def _pick_here(x: ShardTensor, dims: list[int], places: list[Tensor], shape: tuple[int, ...]) -> ShardTensor:
    """The indexed dims are whole: each rank picks for its own part of split indices, on axes that do not split `x`."""
    spec = x._spec
    largest = max((p for p in places if isinstance(p, ShardTensor)), key=lambda p: p._spec.numel, default=None)
    at = None
    if largest is not None and tuple(largest.shape) == shape:
        at = largest._spec.gradient()
        at = at.replicate([axis for axis in range(spec.mesh.ndim) if isinstance(spec.placements[axis], Shard)])
    local_places = []
    for place in places:
        if at is None:
            local_places.append(whole_value(place))
            continue
        with torch.no_grad():
            wide = sharded(place, [x]).expand(shape)
            local_places.append(redistribute(wide, at)._local_tensor)
    local = part_of(x, spec, () if at is None else at.sharded_mesh_dims)
    selected = local[_key(spec.ndim, dims, local_places)]
    return from_local(selected, _merged(spec, result_dims(spec.ndim, dims, len(shape)), shape, at, selected.dtype))


def _key(ndim: int, dims: Sequence[int], places: Sequence[Tensor]) -> tuple:
    key: list = [slice(None)] * ndim
    for dim, place in zip(dims, places, strict=True):
        key[dim] = place
    return tuple(key)


def _ask_owners(x: ShardTensor, dim: int, place: Tensor) -> ShardTensor:
    """Each rank of the axes that split `dim` takes a part of the indices and asks the owners for the rows."""
    spec = x._spec
    remember_rows(spec, dim)
    axes = spec.mesh_dims_of(dim)
    place = sharded(place.detach(), [x])
    have = place._spec
    longest = max(range(have.ndim), key=lambda d: have.shape[d])
    if have.mesh_dims_of(longest) != axes:
        known = [d for d in range(have.ndim) if have.mesh_dims_of(d) == axes]
        longest = known[0] if known else longest
    placements = []
    for axis, p in enumerate(have.placements):
        if axis in axes:
            placements.append(Shard(longest))
        else:
            placements.append(Replicate() if isinstance(spec.placements[axis], Shard) else p)
    with torch.no_grad():
        at = have.with_placements(placements)
        wanted = redistribute(place, at)._local_tensor
    route = row_route(wanted.reshape(-1), spec.sizes[dim], dim_group(spec, axes))
    others = [axis for axis in at.sharded_mesh_dims if axis not in axes]
    rows = fetch_rows(part_of(x, spec, others).movedim(dim, 0), route)
    rows = rows.reshape(*wanted.shape, *rows.shape[1:])
    for i in range(wanted.ndim):  # the dims of the indices take the place of the picked one
        rows = (
            rows.movedim(wanted.ndim - 1, dim + wanted.ndim - 1 - i)
            if i == 0
            else rows.movedim(wanted.ndim - 1 - i, dim + wanted.ndim - 1 - i)
        )
    kept = spec.replicate(axes)
    return from_local(rows, _merged(kept, result_dims(spec.ndim, [dim], have.ndim), tuple(have.shape), at, rows.dtype))


def remember_rows(spec: ShardTensorSpec, dim: int) -> None:
    """Keep how the rows lie from which others are picked: what is gathered for them later is best laid out the same way. A hint only,
    the same on all ranks."""
    spec.mesh.__dict__.setdefault("_shardwise_rows", {})[spec.shape[dim]] = (spec.mesh_dims_of(dim), spec.sizes[dim])


def _pick_own(x: ShardTensor, dims: list[int], places: list[Tensor], shape: tuple[int, ...]) -> ShardTensor:
    """Several dims, some of them sharded: each rank fills in what it holds, the parts add up."""
    spec = x._spec
    inside, shifted = own_places(spec, dims, places, shape)
    axes = [axis for dim in dims for axis in spec.mesh_dims_of(dim)]
    local = to_local(x)
    source = result_dims(spec.ndim, dims, len(shape))
    out = _merged(spec.replicate(axes), source, shape, None, spec.dtype)
    number = local.to(torch.uint8) if local.dtype is torch.bool else local
    at = inside.reshape(-1).nonzero()[:, 0]
    first = source.index(None) if None in source else 0
    mine = number[_key(spec.ndim, dims, [p.reshape(-1)[at] for p in shifted])]  # indices in one dim, where those of `shape` will be
    kept = [size for i, size in enumerate(out.local_shape) if not first <= i < first + len(shape)]
    flat = number.new_zeros((*kept[:first], prod(shape), *kept[first:])).index_copy(first, at, mine)
    placements = tuple(Partial() if axis in axes else p for axis, p in enumerate(out.placements))
    pending = ShardTensorSpec(spec.mesh, placements, out.shape, out.sizes, number.dtype)
    result = redistribute(from_local(flat.reshape(out.local_shape), pending), out.with_dtype(number.dtype))
    return result.bool() if local.dtype is torch.bool else result


def own_places(spec: ShardTensorSpec, dims: Sequence[int], places: Sequence[Tensor], shape) -> tuple[Tensor, list[Tensor]]:
    """Which of the indices lie in this rank's shard, and all of them counted from its first row. Raises IndexError as torch does."""
    inside = torch.ones(tuple(shape), dtype=torch.bool, device=places[0].device)
    shifted = []
    for dim, place in zip(dims, places, strict=True):
        size = spec.shape[dim]
        place = place.expand(shape)
        if place.numel() and (int(place.min()) < -size or int(place.max()) >= size):
            raise IndexError(
                f"index out of range for dim {dim} of size {size}: the indices go from {int(place.min())} to {int(place.max())}"
            )
        place = torch.where(place < 0, place + size, place)
        start, stop = spec.box()[dim]
        inside = inside & (place >= start) & (place < stop)
        shifted.append(place - start)
    return inside, shifted


# ---------------------------------------------------------------------- its relatives


@shard_function(torch.index_select, Tensor.index_select)
@torch_names
def index_select(input: Tensor, dim: int, index: Tensor):
    """Communication: none if `dim` is whole, else an exchange of the rows asked for; the result is split where `dim` was."""
    if not input.ndim:
        return NotImplemented
    dim = normal_dim(dim, input.ndim)
    if index.ndim > 1:
        raise IndexError(f"index_select takes indices of one dim, got shape {tuple(index.shape)}")
    return _index(input, [*[None] * dim, index if index.ndim else index.reshape(1)])


_index = index


@shard_function(torch.take, Tensor.take)
@torch_names
def take(input: Tensor, index: Tensor):
    """Elements by their row-major number. Communication: as `index` of the flattened tensor."""
    return _index(input.reshape(-1), [index])


@shard_function(torch.gather, Tensor.gather)
@torch_names
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False):
    """Along a whole dim each rank picks from its own rows. Communication: none; along a sharded dim two all-to-alls move the split."""
    if sparse_grad or not input.ndim or index.ndim != input.ndim:
        return NotImplemented
    dim = normal_dim(dim, input.ndim)
    both = [t for t in (input, index) if isinstance(t, ShardTensor)]
    if input.ndim == 1:
        return _index(input, [index])
    x, place = sharded(input, both), sharded(index, both)
    for d in range(x.ndim):
        if d != dim and place.shape[d] != x.shape[d]:
            x = x.narrow(d, 0, place.shape[d])
    largest = max((x, place), key=lambda t: (bool(t._spec.sharded_dims), t._spec.numel))
    base = whole_spec(largest._spec, [dim])
    with torch.no_grad():
        local_place = redistribute(place, _with_size(base, dim, place, torch.int64))._local_tensor
    local = to_local(redistribute(x, _with_size(base, dim, x, x.dtype))).gather(dim, local_place)
    result = from_local(local, _with_size(base, dim, place, local.dtype))
    target = place if place._spec.sharded_dims else x
    return laid_as(result, target._spec) if x._spec.sizes[dim] is not None or place._spec.sizes[dim] is not None else result


def _with_size(base: ShardTensorSpec, dim: int, x: ShardTensor, dtype: torch.dtype) -> ShardTensorSpec:
    """`base`, in which `dim` is whole, for `x`, which differs in the size of `dim`."""
    shape = (*base.shape[:dim], x.shape[dim], *base.shape[dim + 1 :])
    return ShardTensorSpec(base.mesh, base.placements, tuple(shape), base.sizes, dtype)


@shard_function(torch.take_along_dim, Tensor.take_along_dim)
@torch_names
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None):
    """Communication: as `gather`."""
    if dim is None:
        return _index(input.reshape(-1), [indices.reshape(-1)])
    dim = normal_dim(dim, input.ndim)
    if indices.ndim != input.ndim:
        return NotImplemented
    shape = list(torch.broadcast_shapes(*(_without(t, dim) for t in (input, indices))))
    wide = [t.expand([*shape[:dim], t.shape[dim], *shape[dim + 1 :]]) for t in (input, indices)]
    return gather(wide[0], dim, wide[1])


def _without(x: Tensor, dim: int) -> tuple[int, ...]:
    return (*x.shape[:dim], 1, *x.shape[dim + 1 :])


# ---------------------------------------------------------------------- below autograd

_RULES = {
    aten.index.Tensor: index,
    aten.index_select.default: index_select,
    aten.gather.default: gather,
    aten.take.default: take,
}


@shard_rule(*_RULES)
def index_rule(op, args, kwargs):
    """Communication: as the function."""
    with torch.no_grad():
        result = _RULES[op](*args, **kwargs)
    return fallback_rule(op, args, kwargs) if result is NotImplemented else result

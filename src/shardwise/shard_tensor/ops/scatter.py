"""Placing rows and elements by index: scatter, index_add, index_put and their kin, and writing `x[...] = value`. Indices are global.

Along a whole dim each rank places into its own rows. Along a sharded one rows that are added go to the owners of the rows they are added to
(message passing); else the split moves to another dim and back; where there is no other, sums are made on every rank and reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardwise.collectives import functional as comm
from shardwise.shard_tensor.adopt import become_sharded, part_of, plain_values, replicated_spec, sharded, whole_value
from shardwise.shard_tensor.aliases import complete_in_place
from shardwise.shard_tensor.arguments import normal_dim, torch_names
from shardwise.shard_tensor.fallback import fallback_rule
from shardwise.shard_tensor.halo import dim_group
from shardwise.shard_tensor.ops.indexing import MASKS, has_tensor_index, index_places, own_places, result_dims, split_key
from shardwise.shard_tensor.registry import shard_function, shard_function_table, shard_rule
from shardwise.shard_tensor.rows import row_route
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.shard_tensor.transposed import laid_as, whole_spec

aten = torch.ops.aten


# ---------------------------------------------------------------------- along one dim, by a tensor of indices


def _along(x: Tensor, dim: int, others: Sequence[Tensor], place: Callable, adds: Callable | None) -> ShardTensor:
    """`place(x, *others)` where `dim` is whole in all of them. `others` have the size of `x` in every dim but `dim`, or one
    dim, that of the rows along `dim`.

    adds: `adds(zeros, *others)` for a sum, which can be made in parts. Where `dim` is sharded and no other dim can be, the parts are made
    on the rank that has the rows of `others`, and reduced.
    """
    every = [t for t in (x, *others) if isinstance(t, ShardTensor)]
    x, others = sharded(x, every), [sharded(t, every) for t in others]
    full = [t for t in (x, *others) if t.ndim == x.ndim]
    if adds is not None and len(others) == 2 and others[0].ndim == 1 and _alike(x, others[1], dim) and not torch.compiler.is_compiling():
        return _to_owners(x, dim, *others, adds)
    largest = max(full, key=lambda t: (bool(t._spec.sharded_dims), t._spec.numel))
    base = whole_spec(largest._spec, [dim])
    source = max((t for t in others if t.ndim == x.ndim), key=lambda t: t._spec.numel, default=None)
    if adds is not None and source is not None and not base.sharded_dims and source._spec.sizes[dim] is not None:
        return _in_parts(x, dim, others, source._spec, adds)
    parts = []
    for t in (x, *others):
        if t.ndim == x.ndim:
            shape = (*base.shape[:dim], t.shape[dim], *base.shape[dim + 1 :])
            spec = ShardTensorSpec(base.mesh, base.placements, tuple(shape), base.sizes, t.dtype)
        else:
            spec = t._spec.replicate()
        parts.append(to_local(redistribute(t, spec)))
    shape = (*base.shape[:dim], x.shape[dim], *base.shape[dim + 1 :])
    local = place(*parts)
    result = from_local(local, ShardTensorSpec(base.mesh, base.placements, tuple(shape), base.sizes, local.dtype))
    return laid_as(result, x._spec) if x._spec.sharded_dims else result


def _alike(x: ShardTensor, source: ShardTensor, dim: int) -> bool:
    """Whether both are split along `dim`, over the same axes, and lie alike in all other dims."""
    a, b = x._spec, source._spec
    return a.sizes[dim] is not None and a.placements == b.placements and all(a.sizes[d] == b.sizes[d] for d in range(x.ndim) if d != dim)


def _to_owners(x: ShardTensor, dim: int, index: ShardTensor, source: ShardTensor, adds: Callable) -> ShardTensor:
    """Each rank adds up its rows of `source` by the row of `x` they belong to; the sums go to the owners of these rows.

    Communication: two all-to-alls of row numbers, and one of a row for each row of `x` that a rank has something for and does not own.
    """
    spec = source._spec
    axes = spec.mesh_dims_of(dim)
    placements = tuple(Shard(0) if axis in axes else Replicate() for axis in range(spec.mesh.ndim))
    rows = to_local(redistribute(index, ShardTensorSpec(spec.mesh, placements, tuple(index.shape), (spec.sizes[dim],), index.dtype)))
    local = to_local(source)
    rows, place = rows.unique(return_inverse=True)
    sums = adds(local.new_zeros((*local.shape[:dim], rows.shape[0], *local.shape[dim + 1 :])), place, local)
    wanted = torch.where(rows < 0, x.shape[dim], rows)  # these ops have no negative rows
    route = row_route(wanted, x._spec.sizes[dim], dim_group(spec, axes))  # in the order of their owners, as `rows` ascends
    come = comm.all_to_all(sums.movedim(dim, 0), route.take, route.give, 0, route.group)
    return from_local(torch.index_add(to_local(x), dim, route.asked, come.movedim(0, dim)), x._spec)


def _in_parts(x: ShardTensor, dim: int, others: Sequence[ShardTensor], base: ShardTensorSpec, adds: Callable) -> ShardTensor:
    """The sum that each rank's rows of `others` make, reduced to the rows of `x`. Communication: one reduce-scatter."""
    axes = base.mesh_dims_of(dim)
    base = base.replicate([axis for axis in range(base.mesh.ndim) if axis not in axes])
    parts = []
    for t in others:
        if t.ndim == x.ndim:
            spec = ShardTensorSpec(base.mesh, base.placements, tuple(t.shape), base.sizes, t.dtype)
        else:
            placements = tuple(Shard(0) if axis in axes else Replicate() for axis in range(base.mesh.ndim))
            spec = ShardTensorSpec(base.mesh, placements, tuple(t.shape), (base.sizes[dim],), t.dtype)
        parts.append(to_local(redistribute(t, spec)))
    zeros = torch.zeros(tuple(x.shape), dtype=x.dtype, device=x._local_tensor.device)
    local = adds(zeros, *parts)
    placements = tuple(Partial() if axis in axes else p for axis, p in enumerate(base.placements))
    pending = ShardTensorSpec(base.mesh, placements, tuple(x.shape), (None,) * x.ndim, local.dtype)
    return x + redistribute(from_local(local, pending), x._spec)


def _scatter(x: Tensor, dim: int, index: Tensor, src, call: Callable, adds: bool) -> ShardTensor:
    """`call(x, dim, index, src)`: `src` a tensor or a number; `index` may be smaller than `x` and `src` larger than `index`."""
    if not x.ndim or index.ndim != x.ndim:
        return NotImplemented
    dim = normal_dim(dim, x.ndim)
    if isinstance(src, Tensor):
        for d in range(x.ndim):
            if src.shape[d] > index.shape[d]:
                src = src.narrow(d, 0, index.shape[d])
    for d in range(x.ndim):
        if d != dim and index.shape[d] < x.shape[d]:  # rows beyond those of the indices stay as they are
            below = x.narrow(d, index.shape[d], x.shape[d] - index.shape[d])
            return torch.cat([_scatter(x.narrow(d, 0, index.shape[d]), dim, index, src, call, adds), below], d)
    index = index.detach()
    if isinstance(src, Tensor) and all(
        d == dim or size == 1 or step == 0 for d, (size, step) in enumerate(zip(index.shape, index.stride()))
    ):
        rows = index  # one index for each row, spread over the row: it stays small
        for d in reversed([d for d in range(x.ndim) if d != dim]):
            rows = rows.select(d, 0)
        spread = [1] * dim + [-1] + [1] * (x.ndim - 1 - dim)

        def by_rows(t: Tensor, i: Tensor, s: Tensor) -> Tensor:
            return call(t, dim, i.view(spread).expand(s.shape), s)

        return _along(x, dim, [rows, src], by_rows, by_rows if adds else None)
    if isinstance(src, Tensor):
        return _along(x, dim, [index, src], lambda t, i, s: call(t, dim, i, s), (lambda t, i, s: call(t, dim, i, s)) if adds else None)
    return _along(x, dim, [index], lambda t, i: call(t, dim, i, src), None)


@shard_function(torch.scatter, Tensor.scatter)
@torch_names
def scatter(input: Tensor, dim: int, index: Tensor, src=None, *, value=None, reduce: str | None = None):
    """Communication: none along a whole dim, else two all-to-alls for the input and one for each other operand."""
    src = value if src is None else src
    if src is None or (reduce is not None and reduce not in ("add", "multiply")):
        return NotImplemented
    options = {} if reduce is None else {"reduce": reduce}
    return _scatter(input, dim, index, src, lambda t, d, i, s: torch.scatter(t, d, i, s, **options), False)


@shard_function(torch.scatter_add, Tensor.scatter_add)
@torch_names
def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor):
    """Communication: as `scatter`; an index that is one number for each row of sharded rows: only rows that cross, to their owners."""
    return _scatter(input, dim, index, src, torch.scatter_add, True)


@shard_function(torch.scatter_reduce, Tensor.scatter_reduce)
@torch_names
def scatter_reduce(input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True):
    """Communication: as `scatter`; sums as `scatter_add`."""
    if reduce == "sum" and include_self:
        return scatter_add(input, dim, index, src)
    return _scatter(input, dim, index, src, lambda t, d, i, s: torch.scatter_reduce(t, d, i, s, reduce, include_self=include_self), False)


def _by_rows(x: Tensor, dim: int, index: Tensor, source: Tensor, call: Callable, adds: bool) -> ShardTensor:
    if not x.ndim or index.ndim > 1 or source.ndim != x.ndim:
        return NotImplemented
    dim = normal_dim(dim, x.ndim)
    index = index.detach().reshape(-1)
    if index.shape[0] != source.shape[dim] or any(source.shape[d] != x.shape[d] for d in range(x.ndim) if d != dim):
        raise RuntimeError(
            f"rows of shape {tuple(source.shape)} at {index.shape[0]} indices along dim {dim} do not fit a tensor of shape {tuple(x.shape)}"
        )
    return _along(x, dim, [index, source], lambda t, i, s: call(t, dim, i, s), (lambda t, i, s: call(t, dim, i, s)) if adds else None)


@shard_function(torch.index_add, Tensor.index_add)
@torch_names
def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha=1):
    """Communication: along an unsharded dim none, or split indices are gathered; along one sharded alike in both, only the sums of rows
    that cross, to their owners, and their row numbers; else as `scatter`."""
    return _by_rows(input, dim, index, source, lambda t, d, i, s: torch.index_add(t, d, i, s, alpha=alpha), True)


@shard_function(torch.index_copy, Tensor.index_copy)
@torch_names
def index_copy(input: Tensor, dim: int, index: Tensor, source: Tensor):
    """Communication: as `scatter`; split indices are gathered."""
    return _by_rows(input, dim, index, source, torch.index_copy, False)


@shard_function(torch.index_reduce, Tensor.index_reduce)
@torch_names
def index_reduce(input: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True):
    """Communication: as `index_copy`."""
    return _by_rows(input, dim, index, source, lambda t, d, i, s: torch.index_reduce(t, d, i, s, reduce, include_self=include_self), False)


@shard_function(torch.index_fill, Tensor.index_fill)
@torch_names
def index_fill(input: Tensor, dim: int, index: Tensor, value):
    """Each rank fills the rows it holds. Communication: split indices are gathered."""
    if not isinstance(input, ShardTensor) or not input.ndim or isinstance(value, ShardTensor):
        return NotImplemented
    dim = normal_dim(dim, input.ndim)
    return index_put(
        input, [*[None] * dim, index.reshape(-1)], torch.as_tensor(value, dtype=input.dtype, device=input._local_tensor.device)
    )


# ---------------------------------------------------------------------- x[i, j, ...] = values


@shard_function(torch.index_put, Tensor.index_put)
def index_put(input: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False):
    """Each rank places what falls into its shard. Communication: split indices, and the values along their dims, are gathered."""
    if not input.ndim or not any(i is not None for i in indices):
        return NotImplemented
    x = sharded(input, [t for t in (input, values, *indices) if isinstance(t, ShardTensor)])
    dims, places = index_places(indices)
    places = [whole_value(p) for p in places]
    shape = torch.broadcast_shapes(*(tuple(p.shape) for p in places))
    spec = x._spec
    source = result_dims(spec.ndim, dims, len(shape))
    first = source.index(None) if None in source else 0
    result_shape = [spec.shape[d] if d is not None else None for d in source]
    result_shape[first : first + len(shape)] = shape
    if torch.compiler.is_compiling():  # what falls into the shard depends on data
        whole = [t.full_tensor() if isinstance(t, ShardTensor) else t for t in (x, values)]
        key = [None] * spec.ndim
        for dim, place in zip(dims, places, strict=True):
            key[dim] = place
        local = aten.index_put.default(whole[0], key, whole[1], accumulate)
        return redistribute(from_local(local, spec.replicate()), spec)
    inside, shifted = own_places(spec, dims, places, shape)
    mine = inside.reshape(-1).nonzero()[:, 0]
    values = _placed(values, x, source, tuple(result_shape), [axis for dim in dims for axis in spec.mesh_dims_of(dim)])
    values = values.flatten(first, first + len(shape) - 1) if shape else values.unsqueeze(first)
    values = values.index_select(first, mine)
    key = [None] * spec.ndim
    for dim, place in zip(dims, shifted, strict=True):
        key[dim] = place.reshape(-1)[mine]
    return from_local(aten.index_put.default(to_local(x), key, values, accumulate), spec)


def _placed(values: Tensor, x: ShardTensor, source: list[int | None], shape: tuple[int, ...], axes: Sequence[int]) -> Tensor:
    """`values`, broadcast to `shape`, whole in the dims of the indices and laid out as `x` in the others; each rank of `axes` uses a
    part."""
    values = sharded(values, [x])
    values = values.to(x.dtype) if values.dtype is not x.dtype else values
    values = values.expand(shape)
    spec = x._spec
    where = {dim: i for i, dim in enumerate(source) if dim is not None}
    placements = tuple(Shard(where[p.dim]) if isinstance(p, Shard) and p.dim in where else Replicate() for p in spec.placements)
    sizes = tuple(None if dim is None else spec.sizes[dim] for dim in source)
    return part_of(values, ShardTensorSpec(spec.mesh, placements, shape, sizes, values.dtype), axes)


# ---------------------------------------------------------------------- in place


def _in_place(method: Callable, functional: Callable):
    def handler(self: Tensor, *args, **kwargs):
        if not isinstance(self, ShardTensor) and (values := plain_values((args, kwargs))) is not None:
            return method(self, *values[0], **values[1])
        result = functional(self, *args, **kwargs)
        if result is NotImplemented:
            return NotImplemented
        if not isinstance(self, ShardTensor):
            become_sharded(self, result._spec)
        return self.copy_(result)

    handler.__doc__ = "As the op that returns a new tensor, whose result is written. Communication: the same."
    return handler


_IN_PLACE = {
    Tensor.scatter_: scatter,
    Tensor.scatter_add_: scatter_add,
    Tensor.scatter_reduce_: lambda x, *args, **kwargs: scatter_reduce(x.clone(), *args, **kwargs),  # it saves what is overwritten
    Tensor.index_add_: index_add,
    Tensor.index_copy_: index_copy,
    Tensor.index_reduce_: lambda x, *args, **kwargs: index_reduce(x.clone(), *args, **kwargs),
    Tensor.index_fill_: index_fill,
    Tensor.index_put_: index_put,
}
for _method, _functional in _IN_PLACE.items():
    shard_function(_method)(_in_place(_method, _functional))


@shard_function(Tensor.__setitem__)
def setitem(self: Tensor, key, value):
    """Slices as views that are written; index tensors as `index_put`, masks with a number as `masked_fill`.

    A plain tensor that is given sharded values becomes a `ShardTensor`.
    """
    if not isinstance(self, ShardTensor):
        return _into_plain(self, key, value)
    complete_in_place(self)
    if not has_tensor_index(key):
        return NotImplemented
    split = split_key(self, key)
    if split is None:
        return NotImplemented
    basic, indices = split
    everything = all(isinstance(part, slice) and part == slice(None) for part in basic)
    target = self if everything else self[basic]
    given = [i for i in indices if i is not None]
    if not given:
        target.copy_(value) if isinstance(value, Tensor) else target.fill_(value)
        return None
    if (
        len(given) == 1
        and given[0].dtype in MASKS
        and (not isinstance(value, Tensor) or (value.ndim == 0 and not isinstance(value, ShardTensor)))
    ):
        at = next(dim for dim, i in enumerate(indices) if i is not None)
        mask = given[0].bool()
        if tuple(mask.shape) != tuple(target.shape[at : at + mask.ndim]):
            raise IndexError(
                f"the shape of the mask {tuple(mask.shape)} does not match that of the indexed tensor {tuple(target.shape)} at dim {at}"
            )
        for _ in range(target.ndim - at - mask.ndim):
            mask = mask.unsqueeze(-1)
        target.masked_fill_(mask, value)
        return None
    if not isinstance(value, Tensor):
        value = torch.as_tensor(value, dtype=target.dtype, device=target._local_tensor.device)
    target.copy_(index_put(target, indices, value))
    return None


_POINTWISE_IN_PLACE = [Tensor.copy_, Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_, Tensor.masked_fill_]


def _pointwise_into_plain(func, args, kwargs):
    """A plain tensor that a pointwise op writes sharded values into becomes a `ShardTensor` in their layout."""
    target = args[0]
    if isinstance(target, ShardTensor):
        return NotImplemented
    values = plain_values((args, kwargs))
    if values is not None:
        return func(*values[0], **values[1])
    value = next(t for t in (*args[1:], *kwargs.values()) if isinstance(t, ShardTensor))
    spec = value._spec.gradient() if value.shape == target.shape else replicated_spec(target, value._spec.mesh)
    become_sharded(target, spec.with_dtype(target.dtype).contiguous())
    return func(*args, **kwargs)


shard_function_table(_POINTWISE_IN_PLACE, _pointwise_into_plain)


def _into_plain(self: Tensor, key, value) -> None:
    values = plain_values((key, value))
    if values is not None:
        self[values[0]] = values[1]
        return
    every = [t for t in (value, *(key if isinstance(key, tuple) else (key,))) if isinstance(t, ShardTensor)]
    spec = replicated_spec(self, every[0]._spec.mesh)
    if isinstance(value, ShardTensor):
        spec = _layout_for(self, value, key, spec)
    become_sharded(self, spec)
    self[key] = value


def _layout_for(x: Tensor, value: ShardTensor, key, whole: ShardTensorSpec) -> ShardTensorSpec:
    """A layout for `x` that suits `x[key] = value`: the split dims of `value` that `key` takes whole, and its pending sums on the largest
    such dim, so that they are reduced to where they are written."""
    if has_tensor_index(key):
        return whole
    shape = tuple(torch.empty(x.shape, device="meta")[key].shape)
    parts = [*key] if isinstance(key, tuple) else [key]
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (x.ndim - sum(p is not None and p is not Ellipsis for p in parts))
    parts += [slice(None)] * (x.ndim - sum(p is not None for p in parts))
    dims: list[int | None] = []  # of each dim of x[key], the dim of x that it takes whole
    dim = 0
    for part in parts:
        if part is None:
            dims.append(None)
            continue
        if isinstance(part, slice):
            dims.append(dim if len(range(x.shape[dim])[part]) == x.shape[dim] else None)
        dim += 1
    shift = len(shape) - value.ndim
    taken = [d for i, d in enumerate(dims) if d is not None and i >= shift and value.shape[i - shift] == x.shape[d]]
    placements: list = []
    for p in value._spec.placements:
        if isinstance(p, Shard) and 0 <= p.dim + shift < len(dims) and dims[p.dim + shift] in taken:
            placements.append(Shard(dims[p.dim + shift]))
        elif isinstance(p, Partial) and taken:
            placements.append(Shard(max(taken, key=lambda d: x.shape[d])))
        else:
            placements.append(Replicate())
    fresh = ShardTensorSpec.chunked(whole.mesh, placements, whole.shape, whole.dtype)
    sizes = [*fresh.sizes]
    for i, d in enumerate(dims):
        if d in taken and i >= shift and fresh.mesh_dims_of(d) == value._spec.mesh_dims_of(i - shift):
            sizes[d] = value._spec.sizes[i - shift]
    return ShardTensorSpec(whole.mesh, fresh.placements, whole.shape, tuple(sizes), whole.dtype)


# ---------------------------------------------------------------------- below autograd

_RULES = {
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter_add.default: scatter_add,
    aten.scatter_reduce.two: scatter_reduce,
    aten.index_add.default: index_add,
    aten.index_copy.default: index_copy,
    aten.index_reduce.default: index_reduce,
    aten.index_put.default: index_put,
}
_RULES_IN_PLACE = {aten.index_put_.default: index_put, aten.index_add_.default: index_add, aten.scatter_add_.default: scatter_add}


@shard_rule(*_RULES)
def place_rule(op, args, kwargs):
    """Communication: as the function."""
    with torch.no_grad():
        result = _RULES[op](*args, **kwargs)
    return fallback_rule(op, args, kwargs) if result is NotImplemented else result


@shard_rule(*_RULES_IN_PLACE)
def place_rule_(op, args, kwargs):
    """Communication: as the function."""
    if not isinstance(args[0], ShardTensor):
        return fallback_rule(op, args, kwargs)
    with torch.no_grad():
        result = _RULES_IN_PLACE[op](*args, **kwargs)
        if result is NotImplemented:
            return fallback_rule(op, args, kwargs)
        return aten.copy_.default(args[0], result)

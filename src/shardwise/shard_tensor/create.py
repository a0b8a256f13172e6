"""Making sharded tensors: from the shards every rank has, or from one rank that has the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Shard

from shardwise.collectives import functional as comm
from shardwise.mesh.groups import axis_group, flat_group
from shardwise.random import follow_source
from shardwise.shard_tensor.spec import ShardTensorSpec, Sizes, normalize_placements
from shardwise.shard_tensor.tensor import ShardTensor, align_gradient

# Number -> dtype, the same on every rank, for metadata that travels as integers.
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_MAX_DIMS = 16


def _mesh_group(mesh: DeviceMesh):
    return axis_group(mesh, 0) if mesh.ndim == 1 else flat_group(mesh, tuple(range(mesh.ndim)))


# ---------------------------------------------------------------------- from shards


def spec_from_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    sharding_shapes: str | Mapping[int, Sequence[Sequence[int]]],
    global_shape: Sequence[int] | None,
) -> ShardTensorSpec:
    """The spec of `ShardTensor.from_local`'s arguments, checked on all ranks together."""
    placements = normalize_placements(placements, mesh, local.ndim)
    if isinstance(sharding_shapes, str):
        if sharding_shapes == "infer":
            return _inferred(local, mesh, placements, global_shape)
        if sharding_shapes == "chunk":
            if global_shape is None:
                raise ValueError("from_local with sharding_shapes='chunk' needs global_shape: give the shape of the whole tensor")
            spec = ShardTensorSpec.chunked(mesh, placements, global_shape, local.dtype)
            return _agreed(local, spec)
        raise ValueError(f"sharding_shapes {sharding_shapes!r} is unknown: use 'infer', 'chunk' or {{mesh_dim: [shape of each rank]}}")
    return _agreed(local, _stated(local, mesh, placements, sharding_shapes, global_shape))


def _inferred(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], global_shape: Sequence[int] | None) -> ShardTensorSpec:
    shapes = _all_shapes(local, mesh)
    names = f"local shapes {[tuple(s) for s in shapes.values()]}"
    if len({len(shape) for shape in shapes.values()}) != 1:
        raise ValueError(f"{names}: the shards have different numbers of dims; every rank must pass a shard of the same tensor")
    shape, sizes = list(local.shape), [None] * local.ndim
    for dim in range(local.ndim):
        axes = [i for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
        blocks: dict[tuple[int, ...], int] = {}
        for coordinate, local_shape in shapes.items():
            block = tuple(coordinate[i] for i in axes)
            if blocks.setdefault(block, local_shape[dim]) != local_shape[dim]:
                raise ValueError(
                    f"{names}: dim {dim} must be equal on ranks that share the shard {block} under placements {placements}, "
                    f"but is {blocks[block]} and {local_shape[dim]}"
                )
        if axes:
            sizes[dim] = tuple(blocks[block] for block in sorted(blocks))
            shape[dim] = sum(sizes[dim])
    if global_shape is not None and tuple(global_shape) != tuple(shape):
        raise ValueError(f"{names} make a tensor of shape {tuple(shape)}, but global_shape is {tuple(global_shape)}")
    return ShardTensorSpec(mesh, placements, tuple(shape), tuple(sizes), local.dtype)


def _all_shapes(local: Tensor, mesh: DeviceMesh) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The local shape at every coordinate of the mesh. Communication: one all-gather of a few integers."""
    record = torch.full((_MAX_DIMS + 2,), 0, dtype=torch.int64)
    record[0], record[1] = local.ndim, DTYPES.index(local.dtype)
    record[2 : 2 + local.ndim] = torch.tensor(tuple(local.shape), dtype=torch.int64)
    record = record.to(local.device)
    ranks = mesh.size()
    gathered = comm.all_gather(record, 0, [len(record)] * ranks, _mesh_group(mesh))
    rows = gathered.view(ranks, -1).tolist()
    if len({row[1] for row in rows}) != 1:
        raise ValueError(f"local dtypes {[str(DTYPES[row[1]]) for row in rows]} differ between ranks: convert the shards to one dtype")
    coordinates = _coordinates(mesh)
    return {c: tuple(row[2 : 2 + row[0]]) for c, row in zip(coordinates, rows, strict=True)}


def _coordinates(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    result = [()]
    for size in mesh.shape:
        result = [(*c, i) for c in result for i in range(size)]
    return result


def _stated(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shapes: Mapping[int, Sequence[Sequence[int]]],
    global_shape: Sequence[int] | None,
) -> ShardTensorSpec:
    shape: list[int] = list(local.shape)
    sizes: list[Sizes] = [None] * local.ndim
    for dim in range(local.ndim):
        axes = [i for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
        if not axes:
            continue
        missing = [i for i in axes if i not in shapes]
        if missing:
            raise ValueError(f"sharding_shapes {dict(shapes)} has no entry for mesh dim {missing[0]}, which {placements} shards")
        for axis in axes:
            if len(shapes[axis]) != mesh.size(axis):
                raise ValueError(
                    f"sharding_shapes[{axis}] lists {len(shapes[axis])} shapes, but mesh dim {axis} has {mesh.size(axis)} ranks"
                )
        if len(axes) > 1:
            raise ValueError(
                f"sharding_shapes cannot state the shards of dim {dim}, which mesh dims {axes} split together: use 'infer' or 'chunk'"
            )
        sizes[dim] = tuple(int(s[dim]) for s in shapes[axes[0]])
        shape[dim] = sum(sizes[dim])
    if global_shape is not None and tuple(global_shape) != tuple(shape):
        raise ValueError(f"sharding_shapes {dict(shapes)} make a tensor of shape {tuple(shape)}, but global_shape is {tuple(global_shape)}")
    return ShardTensorSpec(mesh, placements, tuple(shape), tuple(sizes), local.dtype)


def _agreed(local: Tensor, spec: ShardTensorSpec) -> ShardTensorSpec:
    """`spec`, once all ranks hold the shard it gives them. Communication: one small all-gather."""
    shapes = _all_shapes(local, spec.mesh)
    wrong = []
    for coordinate, have in shapes.items():
        want = tuple(stop - start for start, stop in spec.box(coordinate)) if len(have) == spec.ndim else None
        if have != want:
            wrong.append(f"rank at {coordinate} has {have}, the spec says {want}")
    if wrong:
        raise ValueError(f"local shards do not fit {spec.describe()}: " + "; ".join(wrong))
    return spec


# ---------------------------------------------------------------------- from one rank


@torch.compiler.disable(reason="a ShardTensor is made outside of a graph")
def scatter_tensor(
    tensor: Tensor | None,
    global_src: int,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> ShardTensor:
    """Split the tensor of one rank over the mesh.

    Args:
        tensor: the whole tensor on the source rank; elsewhere it is not read and may be None.
        global_src: the global rank of the source, a member of the mesh.
        placements: one `Shard(dim)` or `Replicate()` for each mesh dim; shards are `torch.chunk` sizes.
        global_shape, dtype: of the whole tensor. When either is missing, the source tells the others.
        requires_grad: make the result a leaf whose `.grad` has the same layout.

    Communication: one scatter that sends each rank its shard only, one small broadcast of shape and dtype, and, once random ops
        have run on the mesh, one of the source's generator state (see `shardwise.random`).
    Raises: ValueError on every rank for a source outside the mesh or a tensor that contradicts `global_shape` or `dtype`.
    """
    group = _mesh_group(mesh)
    members = mesh.mesh.flatten().tolist()
    if not isinstance(global_src, int) or global_src not in members:
        raise ValueError(f"global_src {global_src!r} is not one of the ranks {members} of the mesh: give the global rank of the source")
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device(mesh.device_type)
    source = dist.get_rank() == global_src
    shape, dtype = _agree_on_source(tensor, global_src, group, device, global_shape, dtype, source)
    spec = ShardTensorSpec.chunked(mesh, placements, shape, dtype)
    local = _scatter(tensor.detach().to(device) if source else None, spec, global_src, members, group, device)
    follow_source(mesh, global_src)
    result = ShardTensor(local, spec)
    return align_gradient(result.requires_grad_()) if requires_grad else result


def _agree_on_source(tensor, global_src: int, group, device, global_shape, dtype, source: bool):
    """Shape and dtype of the source's tensor, known on all ranks; what the caller stated is checked by all together."""
    record = torch.zeros(_MAX_DIMS + 3, dtype=torch.int64)
    if source:
        if tensor is None:
            record[0] = -1
        else:
            record[0], record[1] = tensor.ndim, DTYPES.index(tensor.dtype)
            record[2 : 2 + tensor.ndim] = torch.tensor(tuple(tensor.shape), dtype=torch.int64)
    record = record.to(device)
    dist.broadcast(record, src=global_src, group=group)
    values = record.tolist()
    if values[0] < 0:
        raise ValueError(f"scatter_tensor: tensor is None on the source rank {global_src}: pass the whole tensor there")
    shape, have = tuple(values[2 : 2 + values[0]]), DTYPES[values[1]]
    if global_shape is not None and tuple(global_shape) != shape:
        raise ValueError(f"scatter_tensor: global_shape {tuple(global_shape)}, but the tensor on rank {global_src} has shape {shape}")
    if dtype is not None and dtype is not have:
        raise ValueError(f"scatter_tensor: dtype {dtype}, but the tensor on rank {global_src} is {have}: convert it first")
    return shape, have


def _scatter(tensor: Tensor | None, spec: ShardTensorSpec, global_src: int, members: Sequence[int], group, device) -> Tensor:
    """Each rank's shard from the source: one all-to-all in which only the source sends."""
    boxes = [spec.box(c) for c in _coordinates(spec.mesh)]
    counts = [_numel(box) for box in boxes]
    me, src = dist.get_group_rank(group, dist.get_rank()), list(members).index(global_src)
    received = torch.empty(counts[me], dtype=spec.dtype, device=device)
    if tensor is None:
        packed, send = torch.empty(0, dtype=spec.dtype, device=device), [0] * len(boxes)
    else:
        parts = [tensor[tuple(slice(a, b) for a, b in box)].reshape(-1) for box in boxes]
        packed, send = torch.cat(parts) if parts else tensor.reshape(-1), counts
    recv = [counts[me] if i == src else 0 for i in range(len(boxes))]
    dist.all_to_all_single(received, packed, recv, list(send), group=group)
    return received.view(spec.local_shape)


def _numel(box) -> int:
    count = 1
    for start, stop in box:
        count *= stop - start
    return count

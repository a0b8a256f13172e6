"""Process groups of a device mesh, in mesh order.

The rank inside a group is the coordinate on the mesh: group rank i of `axis_group(mesh, d)` is the rank with coordinate i along `d`.
Everything above this module speaks group ranks; `torch.distributed.get_global_rank` turns one into a global rank.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.mesh.leaving import wait_for_gloo_at_exit

_groups: dict[int, dict[tuple[int, ...], dist.ProcessGroup]] = {}
_of_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str | int, ...], dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
_axis_names: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def axis_group(mesh: DeviceMesh, mesh_dim: int = 0) -> dist.ProcessGroup:
    """The group of the ranks that differ from this one only along `mesh_dim`; torch's own, unless the ranks of the mesh do not ascend."""
    return flat_group(mesh, (mesh_dim,))


def flat_group(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> dist.ProcessGroup:
    """The group of the ranks that differ from this one along `mesh_dims` only, in row-major order of these dims as given.

    Made once for the same ranks in the same order under the same names of dims, by its members alone: ranks outside (other coordinates,
    or outside the mesh) need not call. Every member must call for the first time at the same place in its program.
    """
    if torch.compiler.is_compiling() and len(mesh_dims) == 1:
        return mesh.get_group(mesh_dims[0])
    groups = _groups.get(id(mesh))
    if groups is None:
        groups = _groups[id(mesh)] = {}
        weakref.finalize(mesh, _groups.pop, id(mesh), None)
    key = tuple(mesh_dims)
    group = groups.get(key)
    if group is None:
        group = groups[key] = _make(mesh, tuple(dim % mesh.ndim for dim in key))
    return group


def axis_name(group: dist.ProcessGroup) -> str:
    """The mesh dim name of a group from this module (several joined by "+"), the description of any other group."""
    return _axis_names.get(group) or group.group_desc


def _make(mesh: DeviceMesh, dims: tuple[int, ...]) -> dist.ProcessGroup:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"rank {dist.get_rank()} is not on {mesh}: only ranks of a mesh have groups on it")
    wait_for_gloo_at_exit()
    if len(set(dims)) != len(dims):
        raise ValueError(f"mesh dims {dims} name one dim twice")
    kept = sorted(dims)
    ranks_at = mesh.mesh[tuple(slice(None) if dim in dims else coordinate[dim] for dim in range(mesh.ndim))]
    ranks = ranks_at.permute([kept.index(dim) for dim in dims]).reshape(-1).tolist()
    names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
    name = "+".join(names[dim] for dim in dims)
    group = mesh.get_group(dims[0]) if len(dims) == 1 else dist.group.WORLD
    if dist.get_process_group_ranks(group) != ranks:
        own = _of_ranks.setdefault(dist.group.WORLD, {})
        key = (name, *ranks)
        if key not in own:
            own[key] = new_group(ranks, description=f"mesh_{name}")
        group = own[key]
    _axis_names[group] = name
    return group


def new_group(ranks: Sequence[int], *, description: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A group of these global ranks, in this order, on the default backend. Its members alone call, each at the same place in its program.

    `torch.distributed.new_group` with local synchronization names a group by its ranks and by how many groups the process has. Members
    that have made different numbers of groups before would wait for each other forever. This name counts only groups of the same ranks.
    """
    c10d, world = dist.distributed_c10d, dist.group.WORLD
    backend, store = c10d._world.pg_map[world]
    ranks, me = list(ranks), dist.get_rank()
    if me not in ranks:
        raise ValueError(f"rank {me} is not one of {ranks}: only the members of a group make it")
    made = _made.setdefault(world, Counter())
    made[tuple(ranks)] += 1
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(me),
        ranks,
        dist.Backend(backend),
        store,
        f"shardwise_{'_'.join(map(str, ranks))}_{made[tuple(ranks)]}",
        timeout=timeout or c10d._get_default_timeout(dist.Backend(backend)),
        group_desc=description,
    )
    c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group

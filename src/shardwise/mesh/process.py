"""Who am I, and which device is mine: the processes of one run.

The process group of torch is the only state, so several managers agree, and a process group that was there before is adopted.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.errors import InputError
from shardwise.mesh.groups import flat_group
from shardwise.mesh.leaving import wait_for_gloo_at_exit


@dataclass(frozen=True, kw_only=True)
class _Launcher:
    """The names under which a launcher tells a process its place; of several, the first that is set counts."""

    name: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]


# In this order: torchrun and mpirun also run inside SLURM jobs, whose own names then count launchers, not ranks.
_LAUNCHERS = (
    _Launcher(name="torchrun", rank="RANK", world_size=("WORLD_SIZE",), local_rank=("LOCAL_RANK",), local_world_size=("LOCAL_WORLD_SIZE",)),
    _Launcher(
        name="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        name="MPI",
        rank="PMI_RANK",
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "SLURM_LOCALID"),
        local_world_size=("MPI_LOCALNRANKS",),
    ),
    _Launcher(
        name="SLURM", rank="SLURM_PROCID", world_size=("SLURM_NTASKS", "SLURM_NPROCS"), local_rank=("SLURM_LOCALID",), local_world_size=()
    ),
)
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_KVSNAME")  # equal on all ranks of a run


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process among the processes of its run. `address` and `port`, where all meet, are None in a world of one."""

    rank: int = 0
    world_size: int = 1
    address: str | None = None
    port: int | None = None


def place_from_environment(env: Mapping[str, str]) -> Place:
    """The place that torchrun, MPI or SLURM put into the environment; a world of one without any of them.

    Ranks meet at MASTER_ADDR and MASTER_PORT. Without them: on the first node of the SLURM step, else on this machine if the run has
    no other; at a port made from the job. Raises `InputError` when a place is half given or impossible.
    """
    launcher = _launcher(env)
    if launcher is None:
        size = _integer(env, ("WORLD_SIZE",))
        if size is not None and size > 1:
            raise InputError(given=f"WORLD_SIZE={size}", why="RANK is not set", try_="start with torchrun, or set RANK as well")
        return Place()
    rank = _integer(env, (launcher.rank,))
    world_size = _integer(env, launcher.world_size)
    given = f"{launcher.rank}={rank} {launcher.world_size[0]}={world_size}"
    if rank is None or world_size is None:
        raise InputError(given=given, why=f"{launcher.world_size[0]} is not set", try_=f"start with {launcher.name}, or set it as well")
    if not 0 <= rank < world_size:
        raise InputError(given=given, why=f"ranks of a world of {world_size} are 0 to {world_size - 1}", try_="let the launcher set both")
    if world_size == 1:
        return Place()
    address = env.get("MASTER_ADDR") or _first_slurm_node(env)
    if address is None:
        local_world_size = _integer(env, launcher.local_world_size)
        if local_world_size is not None and local_world_size < world_size:
            raise InputError(
                given=f"{given} {launcher.local_world_size[0]}={local_world_size}",
                why="the run has several nodes and MASTER_ADDR is not set, so the ranks cannot meet",
                try_="set MASTER_ADDR (name of the first node) and MASTER_PORT on every rank",
            )
        address = "127.0.0.1"
    port = _integer(env, ("MASTER_PORT",))
    if port is None:
        job = " ".join(env[name] for name in _JOB if name in env)
        port = 20000 + zlib.crc32(job.encode()) % 10000
    return Place(rank=rank, world_size=world_size, address=address, port=port)


def _launcher(env: Mapping[str, str]) -> _Launcher | None:
    return next((launcher for launcher in _LAUNCHERS if launcher.rank in env), None)


def _integer(env: Mapping[str, str], names: Sequence[str]) -> int | None:
    name = next((name for name in names if name in env), None)
    if name is None:
        return None
    try:
        return int(env[name])
    except ValueError:
        raise InputError(given=f"{name}={env[name]}", why=f"{name} must be an integer", try_=f"let the launcher set {name}") from None


def _first_slurm_node(env: Mapping[str, str]) -> str | None:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)  # "node[07-09,12],other" begins with node07
    return match[1] + (match[2] or "") if match else env.get("SLURM_LAUNCH_NODE_IPADDR")


_meetings = itertools.count()


@functools.cache
def _meeting_point(place: Place) -> dist.Store:
    """The store of the run. It lives as long as the process, so that ranks may leave and meet again without a race for its port."""
    # torchrun may keep the store in its agent, which only env:// knows
    at = "env://" if {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() else f"tcp://{place.address}:{place.port}"
    return next(dist.rendezvous(at, place.rank, place.world_size))[0]


class DistributedManager:
    """The processes of this run: `rank`, `local_rank`, `world_size`, `device`, and device meshes over them.

    `DistributedManager.initialize()` once, then `DistributedManager()` anywhere. All instances are alike.
    """

    def __init__(self) -> None:
        if not self.is_initialized():
            raise InputError(
                given="DistributedManager()",
                why="the processes of this run have not met yet",
                try_="call DistributedManager.initialize() first",
            )

    @staticmethod
    def initialize() -> None:
        """Meet the other processes, by the environment of torchrun, SLURM or MPI; alone without any. NCCL with CUDA, gloo without.

        Does nothing when the process group is there already. Communication: the rendezvous. Raises `InputError` for an environment that
        is only half set.
        """
        wait_for_gloo_at_exit()
        if DistributedManager.is_initialized():
            return
        place = place_from_environment(os.environ)
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(_gpu(place.rank))
        if place.address is None:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            return
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives the ranks that it restarts
        store = dist.PrefixStore(f"shardwise/{attempt}/{next(_meetings)}", _meeting_point(place))
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size)

    @staticmethod
    def is_initialized() -> bool:
        return dist.is_available() and dist.is_initialized()

    @staticmethod
    def cleanup() -> None:
        """Leave the process group, if there is one. Afterwards `initialize()` may be called again."""
        if DistributedManager.is_initialized():
            dist.destroy_process_group()

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this machine."""
        return _local_rank(self.rank)

    @property
    def device(self) -> torch.device:
        """The device of this rank: its GPU where the process group uses GPUs, else the CPU."""
        if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()):
            return torch.device("cuda", _gpu(self.rank))
        return torch.device("cpu")

    def initialize_mesh(self, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
        """A device mesh over all ranks with named dims, rank order row-major. One size may be -1: what is left of the world.

        Communication: creates process groups; every rank calls it. Raises `InputError` when the sizes do not multiply to the world.
        """
        shape = _mesh_shape(tuple(mesh_shape), tuple(mesh_dim_names), self.world_size)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=tuple(mesh_dim_names))

    def get_mesh_group(self, mesh: DeviceMesh) -> dist.ProcessGroup:
        """The process group of all ranks of a mesh, in row-major order."""
        return flat_group(mesh, tuple(range(mesh.ndim)))

    def __repr__(self) -> str:
        return f"DistributedManager(rank={self.rank}, world_size={self.world_size}, local_rank={self.local_rank}, device={self.device})"


def _local_rank(rank: int) -> int:
    launcher = _launcher(os.environ)
    local_rank = None if launcher is None else _integer(os.environ, launcher.local_rank)
    return rank if local_rank is None else local_rank


def _gpu(rank: int) -> int:
    return _local_rank(rank) % torch.cuda.device_count()


def _mesh_shape(shape: tuple[int, ...], names: tuple[str, ...], world_size: int) -> tuple[int, ...]:
    given = f"mesh_shape={shape} mesh_dim_names={names} on {world_size} ranks"
    problems = []
    if len(shape) != len(names) or not shape:
        problems.append(f"{len(shape)} sizes and {len(names)} names: every mesh dim needs one size and one name")
    if len(set(names)) != len(names):
        problems.append("a name stands twice")
    if any(size != -1 and size < 1 for size in shape) or shape.count(-1) > 1:
        problems.append("sizes are positive, and one of them may be -1")
    if problems:
        raise InputError(given=given, why="; ".join(problems), try_="for example mesh_shape=(-1, 2), mesh_dim_names=('ddp', 'domain')")
    known = math.prod(size for size in shape if size != -1)
    if -1 in shape and world_size % known == 0:
        return tuple(world_size // known if size == -1 else size for size in shape)
    if known != world_size:
        left = (
            f"{known} does not divide the {world_size} ranks"
            if -1 in shape
            else f"they multiply to {known}, the world has {world_size} ranks"
        )
        raise InputError(
            given=given,
            why=f"the sizes must multiply to the world size: {left}",
            try_=f"start {known} ranks, or choose sizes that multiply to {world_size}",
        )
    return shape

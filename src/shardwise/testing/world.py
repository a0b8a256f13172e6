"""What a rank function is given: who it is, its mesh, and the same numbers on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")
_build_lock = threading.Lock()


class World:
    """One rank's view of the ranks that run a test. `mesh` is one axis, `domain`, unless the decorator names others."""

    def __init__(self, *, device: torch.device, axes: Mapping[str, int] | None = None) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = device
        self.mesh = self.make_mesh(tuple(axes.values()), tuple(axes)) if axes else self.make_mesh((self.size,), ("domain",))
        self._draws = 0

    def make_mesh(self, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
        """A device mesh over all ranks. Communication: new process groups; call it on every rank."""
        return init_device_mesh(self.device.type, tuple(shape), mesh_dim_names=tuple(names))

    def randn(self, *shape: int, dtype: torch.dtype = torch.float64, seed: int | None = None) -> torch.Tensor:
        """Normal numbers, the same on every rank. Each call draws others, unless `seed` says which."""
        if seed is None:
            self._draws += 1
            seed = self._draws
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, dtype=dtype, generator=generator).to(self.device)

    def same(self, build: Callable[[], T], *, seed: int = 0) -> T:
        """What `build()` returns, with the same random numbers on every rank: `world.same(lambda: nn.Linear(4, 8).double())`."""
        with _build_lock, torch.random.fork_rng():
            torch.manual_seed(seed)
            return build()

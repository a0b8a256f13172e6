"""Which samples a domain group takes, so that a global batch has the same samples in every layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import InputError

DATA_AXES = ("ddp", "dp")


class DomainSampler:
    """Batches of indices for this rank's domain group; all ranks of the group get the same ones.

    Args:
        size: number of samples of the dataset.
        mesh: its axis `ddp` (or `dp`) counts the replicas; all other axes share their samples.
        global_batch: samples of one optimizer step, over all replicas and accumulated batches.
        accumulate: batches of one replica per optimizer step.
        shuffle, seed: a new order each epoch, the same on every rank and in every layout.

    The samples that are left when `global_batch` does not divide `size` are dropped at the end of an epoch.
    Raises: InputError on every rank, with the numbers, when the batch cannot be dealt out.
    """

    def __init__(self, size: int, mesh: DeviceMesh, *, global_batch: int, accumulate: int = 1, shuffle: bool = True, seed: int = 0) -> None:
        axis = next((name for name in DATA_AXES if name in (mesh.mesh_dim_names or ())), None)
        self.replicas = 1 if axis is None else mesh[axis].size()
        self.replica = 0 if axis is None else mesh.get_local_rank(axis)
        _check(size, global_batch, self.replicas, accumulate)
        self.size, self.global_batch, self.accumulate, self.shuffle, self.seed = size, global_batch, accumulate, shuffle, seed

    @property
    def batch(self) -> int:
        """Samples of one domain group in one forward."""
        return self.global_batch // (self.replicas * self.accumulate)

    def __len__(self) -> int:
        """Batches of this replica in an epoch."""
        return self.size // self.global_batch * self.accumulate

    def batches(self, epoch: int = 0, first: int = 0) -> Iterator[list[int]]:
        """The batches of an epoch from number `first` on."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.size, generator=generator).tolist()
        else:
            order = list(range(self.size))
        for number in range(first, len(self)):
            step, part = divmod(number, self.accumulate)
            start = step * self.global_batch + (self.replica * self.accumulate + part) * self.batch
            yield order[start : start + self.batch]


def _check(size: int, global_batch: int, replicas: int, accumulate: int) -> None:
    problems = []
    unit = replicas * max(accumulate, 1)
    if global_batch < 1 or accumulate < 1:
        problems.append("global_batch and accumulate are 1 or more")
    elif global_batch % unit:
        problems.append(f"{replicas} replicas take {accumulate} equal batches each per step, so global_batch is a multiple of {unit}")
    if size < global_batch:
        problems.append(f"the dataset has {size} samples, fewer than one global batch")
    if problems:
        fitting = max(1, min(global_batch, size) // unit) * unit
        raise InputError(
            given=f"global_batch={global_batch} accumulate={accumulate} over {replicas} domain groups, {size} samples",
            why="; ".join(problems),
            try_=f"global_batch={fitting}" if fitting <= size else "fewer replicas or more samples",
        )

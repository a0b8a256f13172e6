"""Batches on the mesh: one rank reads and scatters, or every rank reads its own rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Dataset

from shardwise.data.arrays import read_sharded
from shardwise.data.sampler import DomainSampler
from shardwise.mesh.groups import axis_group
from shardwise.shard_tensor import scatter_tensor


class SourceReader:
    """The first rank of each domain group reads whole samples and sends every rank its rows.

    Args:
        dataset: a map-style dataset of tensors, tuples or dicts of them. Other ranks never index it.
        mesh: its axis `domain`, or the whole mesh if it has one dim, is the one to split over.
        placements: a structure like that of one sample, with `Shard(dim)` or `Replicate()` in place of each tensor; dims count the batch
            as dim 0, so `Shard(2)` splits the rows of [batch, channels, rows, columns].
        workers: processes of the reading rank that prepare batches ahead.

    Communication: for each batch one small broadcast, then for each tensor as `scatter_tensor`. A failure to read is raised on all ranks.
    """

    def __init__(self, dataset: Dataset, mesh: DeviceMesh, placements: Any, *, workers: int = 0) -> None:
        self.dataset, self.mesh, self.workers = dataset, _domain(mesh), workers
        self.placements, self.structure = tree_flatten(placements, is_leaf=lambda p: isinstance(p, Placement))
        self.group = axis_group(self.mesh, 0)
        self.source = dist.get_global_rank(self.group, 0)

    def read(self, batches: Iterator[list[int]]) -> Iterator[Any]:
        reading = dist.get_rank() == self.source
        prepared = iter(DataLoader(self.dataset, batch_sampler=list(batches), num_workers=self.workers)) if reading else batches
        while True:
            batch, state = None, "end"
            if reading:
                batch, state = self._next(prepared)
            said = [state]
            dist.broadcast_object_list(said, src=self.source, group=self.group)
            if said[0] == "end":
                return
            if said[0]:
                raise RuntimeError(f"rank {self.source} could not read a batch: {said[0]}")
            leaves = batch if reading else [None] * len(self.placements)
            tensors = [scatter_tensor(t, self.source, self.mesh, (p,)) for t, p in zip(leaves, self.placements, strict=True)]
            yield tree_unflatten(tensors, self.structure)

    def _next(self, prepared: Iterator[Any]) -> tuple[list | None, str]:
        """The tensors of a batch in the order of the placements, or what went wrong."""
        try:
            leaves, structure = tree_flatten(next(prepared))
        except StopIteration:
            return None, "end"
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"
        if len(leaves) != len(self.placements):
            return None, f"a sample has {len(leaves)} tensors ({structure}), placements has {len(self.placements)}"
        return leaves, ""


class RowReader:
    """Every rank reads its own rows of each sample straight from arrays on disk; no rank has a whole sample.

    Args:
        arrays: by name, what `open_array` returns: dim 0 counts the samples.
        mesh: as for `SourceReader`.
        placements: by name, `Shard(dim)` or `Replicate()`; dim 0 is the batch.

    Communication: for each batch one small all-reduce, so that a failure to read is raised on all ranks.
    """

    def __init__(self, arrays: Mapping[str, Any], mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
        if arrays.keys() != placements.keys():
            raise ValueError(f"arrays {sorted(arrays)} and placements {sorted(placements)} must have the same names")
        self.arrays, self.placements, self.mesh = dict(arrays), dict(placements), _domain(mesh)
        self.group = axis_group(self.mesh, 0)

    def read(self, batches: Iterator[list[int]]) -> Iterator[dict[str, Any]]:
        for samples in batches:
            batch, problem = {}, None
            try:
                for name, array in self.arrays.items():
                    batch[name] = read_sharded(array, self.mesh, (self.placements[name],), samples=samples)
            except Exception as error:
                problem = error
            failed = torch.tensor([problem is not None], dtype=torch.int32, device=self.mesh.device_type)
            dist.all_reduce(failed, group=self.group)
            if problem is not None:
                raise problem
            if failed.item():
                raise RuntimeError(f"another rank of the domain group could not read samples {samples}")
            yield batch


class DomainLoader:
    """The batches of a reader in the order of a sampler, epoch after epoch; knows where it is.

    `for batch in loader` is one epoch, from where it stopped. `state_dict` and `load_state_dict` resume at the next batch, so that
    a resumed run sees the samples an uninterrupted one would have seen.
    """

    def __init__(self, reader: SourceReader | RowReader, sampler: DomainSampler) -> None:
        self.reader, self.sampler = reader, sampler
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.reader.read(self.sampler.batches(self.epoch, self.position)):
            self.position += 1
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def _domain(mesh: DeviceMesh) -> DeviceMesh:
    names: Sequence[str] = mesh.mesh_dim_names or ()
    if "domain" in names:
        return mesh["domain"] if mesh.ndim > 1 else mesh
    if mesh.ndim == 1:
        return mesh
    raise ValueError(f"{mesh} has no axis named 'domain': name it so, or pass the one axis to split over, mesh[name]")

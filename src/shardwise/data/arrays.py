"""Rows straight from a file into a `ShardTensor`: no rank ever has the whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement

from shardwise.errors import InputError
from shardwise.shard_tensor import ShardTensor, ShardTensorSpec


def open_array(path: str | os.PathLike[str], name: str | None = None) -> Any:
    """An array on disk that is read where it is sliced: memory-mapped `.npy`, `.safetensors`, HDF5 (`.h5`, `.hdf5`) or Zarr (`.zarr`).

    name: of the array inside a file that has several. HDF5 needs h5py, Zarr zarr; other objects with `shape` and slices can be
    given to `read_sharded` as they are.
    """
    path = Path(path)
    kind = path.suffix
    if not path.exists():
        raise InputError(given=str(path), why="there is no such file", try_="the path as this rank sees it")
    if kind == ".npy":
        import numpy as np

        return np.load(path, mmap_mode="r")
    if kind == ".safetensors":
        return _SafetensorsArray(path, name)
    if kind in (".h5", ".hdf5"):
        import h5py

        return _member(h5py.File(path, "r"), name, path)
    if kind == ".zarr":
        import zarr

        opened = zarr.open(str(path), mode="r")
        return opened if name is None and hasattr(opened, "shape") else _member(opened, name, path)
    raise InputError(
        given=str(path), why=f"{kind or 'no suffix'} is not a known kind of file", try_=".npy, .safetensors, .h5, .hdf5 or .zarr"
    )


def _member(file: Any, name: str | None, path: Path) -> Any:
    if name is None or name not in file:
        raise InputError(given=f"name={name!r} in {path}", why="the file has no such array", try_=f"one of {sorted(file)}")
    return file[name]


class _SafetensorsArray:
    """A tensor of a safetensors file, read where it is sliced."""

    def __init__(self, path: Path, name: str | None) -> None:
        from safetensors import safe_open

        self._file = safe_open(str(path), framework="pt")
        names = list(self._file.keys())
        if name is None and len(names) == 1:
            name = names[0]
        if name not in names:
            raise InputError(given=f"name={name!r} in {path}", why="the file has no such tensor", try_=f"one of {sorted(names)}")
        self._slice = self._file.get_slice(name)
        self.shape = tuple(self._slice.get_shape())

    def __getitem__(self, index: tuple) -> Tensor:
        return self._slice[index]


def read_sharded(
    array: Any,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    samples: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> ShardTensor:
    """This rank's part of an array on disk, as a `ShardTensor` over `mesh`.

    Args:
        array: anything with `shape` and slices: what `open_array` returns, a NumPy or Zarr array, an HDF5 data set, a tensor.
        placements: one `Shard(dim)` or `Replicate()` for each mesh dim; shards are `torch.chunk` sizes.
        samples: rows of dim 0 to take, in this order: the batch. Dim 0 must then not be sharded.
        dtype: to convert to.

    Communication: none. Only the rows of this rank are read, so files on a shared disk are read once in all.
    """
    if any(isinstance(p, Partial) for p in placements):
        raise InputError(given=f"placements={tuple(placements)}", why="a pending sum cannot be read", try_="Shard(dim) or Replicate()")
    shape = tuple(array.shape) if samples is None else (len(samples), *array.shape[1:])
    spec = ShardTensorSpec.chunked(mesh, placements, shape, dtype or torch.float32)
    box = tuple(slice(start, stop) for start, stop in spec.box())
    if samples is None:
        local = _tensor(array[box])
    elif spec.sizes[0] is not None:
        raise InputError(given=f"placements={tuple(placements)}", why="dim 0 counts the samples of the batch", try_="shard another dim")
    else:
        parts = [_tensor(array[(slice(i, i + 1), *box[1:])]) for i in samples]
        local = torch.cat(parts) if parts else torch.empty(spec.local_shape)
    local = local.to(mesh.device_type, dtype or local.dtype)
    return ShardTensor(local, spec)


def _tensor(values: Any) -> Tensor:
    """A tensor with memory of its own."""
    import numpy as np

    return values.clone() if isinstance(values, Tensor) else torch.from_numpy(np.array(values))

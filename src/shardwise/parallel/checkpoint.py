"""Checkpoints that survive anything: written aside, checked, and renamed into place; read by any layout.

    checkpoints = Checkpoints("runs/a")                              # on every rank
    start = checkpoints.load(model, optimizer, scheduler)            # None when there is none yet
    ...
    checkpoints.save(step, model, optimizer, scheduler, data={"sample": position})

A checkpoint is a folder `step_00000010`: what `torch.distributed.checkpoint` writes (each rank its own shards), one small file
of each rank (random numbers, data position, scheduler) and `checksums.json`, written last. It is written under another name,
flushed to disk and renamed, so a folder of that name is complete; a save that is killed leaves the last one as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardwise.errors import InputError
from shardwise.shard_tensor import ShardTensor

CHECKSUMS = "checksums.json"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter name: other layouts group parameters otherwise


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What `load` found. data: what was saved as `data` on this rank, or on the first rank if the number of ranks is another."""

    step: int
    data: Any


class Checkpoints:
    """The checkpoints of one run in one folder that all ranks see. Its methods are called on every rank, in the same order.

    Args:
        keep: how many complete checkpoints stay; older ones are removed after a save.

    Communication: of objects, over a gloo group of its own. With one process no process group is needed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2) -> None:
        if keep < 1:
            raise InputError(given=f"keep={keep}", why="a run needs its last checkpoint", try_="keep=1 or more")
        self.folder = Path(folder)
        self.keep = keep
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    # ------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> Path:
        """Write the checkpoint of `step`; return its folder.

        data: position of the data on this rank, plain values and tensors. extra: named tensors (`ShardTensor`s too) saved beside the model.
        wait: False copies the state to memory and writes it in the background; the next `save`, `load` or `wait()` waits for it.
        Errors of any rank are raised on all.
        """
        self.wait()
        state = {"model": {}, "optimizer": {}, "extra": dict(extra or {})}
        state["model"], state["optimizer"] = get_state_dict(model, optimizer or (), options=_OPTIONS)
        own = {"data": data, "rng": rng_state(), "scheduler": None if scheduler is None else scheduler.state_dict()}
        if wait:
            return self._write(step, state, own)
        staged = tree_map_only(Tensor, _copy_to_memory, state)
        self._pending = self._worker.submit(self._write, step, staged, own)
        return self._path(step)

    def wait(self) -> None:
        """Wait for the save in the background, if there is one, and raise what went wrong in it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, state: dict, own: dict) -> Path:
        final = self._path(step)
        aside = self.folder / f".{final.name}.partial"
        self._together(lambda: _fresh(aside) if self._rank == 0 else None)
        self._together(lambda: torch.save(own, aside / _own_name(self._rank)))
        self._distributed(dcp.save, state, storage_writer=dcp.FileSystemWriter(aside, sync_files=True))
        mine = (f for f in sorted(aside.iterdir()) if f.name == _own_name(self._rank) or f.name.startswith(f"__{self._rank}_"))
        sums = self._together(lambda: {f.name: _checksum(f, flush=True) for f in mine})
        self._together(lambda: self._finish(aside, final, {k: v for part in sums for k, v in part.items()}) if self._rank == 0 else None)
        return final

    def _finish(self, aside: Path, final: Path, sums: dict[str, list]) -> None:
        sums[".metadata"] = _checksum(aside / ".metadata", flush=True)
        with (aside / CHECKSUMS).open("w") as file:
            json.dump({"ranks": self._size, "files": sums}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _flush(aside)
        if final.exists():
            replaced = _fresh(self.folder / f".{final.name}.replaced")
            final.rename(replaced)
        aside.rename(final)
        _flush(self.folder)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self._path(old))
        for leftover in self.folder.glob(".step_*"):
            shutil.rmtree(leftover)

    # ------------------------------------------------------------------ loading

    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        extra: Mapping[str, Tensor] | None = None,
        step: int | None = None,
    ) -> Restored | None:
        """Read a checkpoint into `model`, `optimizer`, `scheduler`, the tensors of `extra` and the random number generators.

        The layout may differ from the one that saved. By default the newest undamaged checkpoint is read, with a warning that names the
        damaged files of newer ones, and None is returned when there is none. With `step`, damage raises InputError on all ranks.
        """
        self.wait()
        if step is None:
            step = self._newest_good()
            if step is None:
                return None
        else:
            self._refuse_missing(step)
            self._refuse_damaged(step)
        path = self._path(step)
        state: dict[str, Any] = {"extra": dict(extra or {})}
        state["model"], state["optimizer"] = get_state_dict(model, optimizer or (), options=_OPTIONS)
        if optimizer is None:
            del state["optimizer"]
        self._distributed(dcp.load, state, storage_reader=dcp.FileSystemReader(path))
        set_state_dict(
            model,
            optimizer or (),
            model_state_dict=state["model"],
            optim_state_dict=state.get("optimizer", {}),
            options=_OPTIONS,
        )
        same = json.loads((path / CHECKSUMS).read_text())["ranks"] == self._size
        own = torch.load(path / _own_name(self._rank if same else 0), weights_only=True)
        if scheduler is not None and own["scheduler"] is not None:
            scheduler.load_state_dict(own["scheduler"])
        set_rng_state(own["rng"])
        return Restored(step=step, data=own["data"])

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        found = (path.name.removeprefix("step_") for path in self.folder.glob("step_*") if (path / CHECKSUMS).exists())
        return sorted(int(name) for name in found if name.isdigit())

    def damage(self, step: int) -> list[str]:
        """What is wrong with the files of a checkpoint, each named; empty if nothing is. Each rank reads its share of them."""
        path = self._path(step)
        return [problem for part in self._together(lambda: self._damage_of_share(path)) for problem in part]

    def _damage_of_share(self, path: Path) -> list[str]:
        try:
            files = json.loads((path / CHECKSUMS).read_text())["files"]
        except (OSError, ValueError, KeyError):
            return [f"{path / CHECKSUMS}: missing or not readable"] if self._rank == 0 else []
        problems = []
        for name in sorted(files)[self._rank :: self._size]:
            size, digest = files[name]
            file = path / name
            if not file.exists():
                problems.append(f"{file}: missing")
            elif file.stat().st_size != size:
                problems.append(f"{file}: {file.stat().st_size} bytes, saved were {size}")
            elif _checksum(file)[1] != digest:
                problems.append(f"{file}: its checksum is not the one of what was saved")
        return problems

    def _newest_good(self) -> int | None:
        for step in reversed(self._together(self.steps)[0]):
            problems = self.damage(step)
            if not problems:
                return step
            if self._rank == 0:
                warnings.warn(f"checkpoint of step {step} is damaged and not read: " + "; ".join(problems), UserWarning, stacklevel=3)
        return None

    def _refuse_missing(self, step: int) -> None:
        steps = self._together(self.steps)[0]
        if step not in steps:
            raise InputError(given=f"step={step}", why=f"{self.folder} has no such checkpoint", try_=f"one of {steps}" if steps else "")

    def _refuse_damaged(self, step: int) -> None:
        problems = self.damage(step)
        if problems:
            others = [other for other in self._together(self.steps)[0] if other != step]
            raise InputError(
                given="; ".join(problems), why="a damaged checkpoint is not read", try_=f"another step: {others}" if others else ""
            )

    # ------------------------------------------------------------------ all ranks at once

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def _distributed(self, call, state: dict, **options) -> None:
        """`dcp.save` or `dcp.load`; what it raises, on all ranks, as a RuntimeError (its own class is no Exception)."""
        with warnings.catch_warnings():
            if self._group is None:
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
            try:
                call(state, process_group=self._group, no_dist=self._group is None, **options)
            except CheckpointException as error:
                raise RuntimeError(f"checkpoint in {self.folder}: {error}") from error

    def _together(self, work) -> list:
        """`work()` on each rank; the results of all. An error of any rank is raised on all of them."""
        try:
            mine = (work(), None)
        except (OSError, RuntimeError, ValueError) as error:
            mine = (None, f"rank {self._rank}: {type(error).__name__}: {error}")
        everyone: list = [mine]
        if self._group is not None:
            everyone = [None] * self._size
            dist.all_gather_object(everyone, mine, group=self._group)
        problems = [problem for _, problem in everyone if problem]
        if problems:
            raise RuntimeError(f"checkpoint in {self.folder}: " + "; ".join(problems))
        return [result for result, _ in everyone]


def export_model(model: nn.Module, file: str | os.PathLike[str]) -> None:
    """Write all weights and buffers to one file for use on a single device: `.safetensors`, else what `torch.load` reads.

    Call it on every rank; the first writes. Communication: gathers what is sharded.
    """
    file = Path(file)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not dist.is_initialized() or dist.get_rank() == 0:
        aside = file.with_name(f".{file.name}.partial")
        if file.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file({name: t.detach().contiguous().clone() for name, t in state.items()}, aside)
        else:
            torch.save(state, aside)
        _checksum(aside, flush=True)
        aside.rename(file)
    if dist.is_initialized():
        dist.barrier()


# ---------------------------------------------------------------------- random numbers


def rng_state() -> dict[str, Any]:
    """The state of the generators of torch, Python and NumPy, as plain values and tensors."""
    import numpy as np

    name, keys, *rest = np.random.get_state()
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (name, torch.from_numpy(keys.copy()), *rest)}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what `rng_state` returned."""
    import numpy as np

    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# ---------------------------------------------------------------------- files


def _own_name(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _fresh(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _checksum(file: Path, *, flush: bool = False) -> list:
    """Size in bytes and SHA-256 of a file, once it is on the disk."""
    with file.open("rb") as stream:
        if flush:
            os.fsync(stream.fileno())
        return [file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy_to_memory(tensor: Tensor) -> Tensor:
    """A copy that later steps do not change, in host memory; each rank copies its shard."""
    if isinstance(tensor, DTensor):
        return DTensor(_copy_to_memory(tensor.to_local()), tensor._spec, requires_grad=False)
    if isinstance(tensor, ShardTensor):
        return ShardTensor(_copy_to_memory(tensor._local_tensor), tensor._spec)
    copy = torch.empty_like(tensor, device="cpu", requires_grad=False)
    return copy.copy_(tensor.detach())

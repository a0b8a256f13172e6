"""Checkpoints that do not depend on the layout: torch distributed checkpoint, keyed by the names of the whole model.

A rank writes the rectangles of each global tensor that it holds, and reads those that it needs; so a run saved under one layout loads
under any other. `export` makes Hugging Face safetensors of a checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from shardwise.errors import InputError
from shardwise.parallel.build import ParallelModel
from shardwise.parallel.gradients import local
from shardwise.parallel.part import Box, Part
from shardwise.parallel.step_optimizer import StepOptimizer, Updated, fsdp_rows

_LATEST = "latest_checkpointed_iteration.txt"
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class Rectangles(torch.Tensor):
    """A local tensor that stands for a part of a global one, as torch's distributed checkpoint asks for it."""

    part: Part

    @staticmethod
    def of(value: Tensor, part: Part) -> Rectangles:
        result = value.detach().as_subclass(Rectangles)
        result.part = part
        return result

    def size(self, dim: int | None = None) -> Any:
        """Of the global tensor: loading compares it with what was saved."""
        return torch.Size(self.part.shape) if dim is None else self.part.shape[dim]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box), properties=TensorProperties(dtype=self.dtype), size=torch.Size(self.part.shape)
                ),
            )
            for box in self.part.boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.part.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        box = next(box for box in self.part.boxes() if torch.Size(box.offsets) == index.offset)
        view = self.as_subclass(torch.Tensor)
        for dim, (start, size) in enumerate(zip(box.local, box.sizes, strict=True)):
            view = view.narrow(dim, start, size)
        return view


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def weights(model: ParallelModel, optimizer: StepOptimizer | None = None) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this rank, by name. A tied weight appears once, on the rank of the embedding.

    optimizer: takes what it updates instead of the parameters, which may have fewer bits.
    """
    result: dict[str, Tensor] = {}
    if optimizer is not None:
        pieces = [(each.held, local(each.value), each.part) for each in optimizer.updated]
    else:
        pieces = [
            (held, local(parameter), held.part.rows(fsdp_rows(parameter)) if isinstance(parameter, DTensor) else held.part)
            for parameter, held in model.parameters
        ]
    for held, value, part in pieces:
        if held.counted or held.name not in result:
            result[held.name] = Rectangles.of(value, part)
    for stage in model.stages.values():
        persistent = stage.model.state_dict().keys()
        for name, buffer in stage.model.named_buffers():
            if name in persistent:
                result[name] = Rectangles.of(buffer, Part.whole(tuple(buffer.shape)))
    return result


def _moments(optimizer: StepOptimizer) -> Iterator[tuple[str, Updated, Tensor]]:
    for each in optimizer.updated:
        if not each.held.counted and any(other.held.name == each.held.name and other.held.counted for other in optimizer.updated):
            continue
        for name, value in optimizer.optimizer.state.get(each.value, {}).items():
            if name in _MOMENTS and isinstance(value, Tensor):
                yield f"optimizer.{name}.{each.held.name}", each, value


def _state(model: ParallelModel, optimizer: StepOptimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = dict(weights(model, optimizer))
    if optimizer is not None:
        state.update({key: Rectangles.of(local(value), each.part) for key, each, value in _moments(optimizer)})
    return state


def save(folder: Path, step: int, model: ParallelModel, optimizer: StepOptimizer, about: dict[str, Any], keep: int = -1) -> Path:
    """Write a checkpoint of this step. All ranks call it together. keep: how many of the last ones stay (-1: all)."""
    path = folder / f"iter_{step:07d}"
    dcp.save(_state(model, optimizer), checkpoint_id=str(path))
    if dist.get_rank() == 0:
        _write_at_once(path / "run.json", json.dumps({"iteration": step, **about}, indent=2))
        _write_at_once(folder / _LATEST, str(step))
        if keep > 0:
            for old in sorted(folder.glob("iter_*"))[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
    if dist.get_world_size() > 1:
        dist.barrier()
    return path


def _write_at_once(path: Path, text: str) -> None:
    """A process that is killed meanwhile leaves the file as it was."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def latest(folder: Path) -> Path | None:
    """The last whole checkpoint of a folder; the folder itself if it is one; None if there is none."""
    if (folder / "run.json").is_file():
        return folder
    mark = folder / _LATEST
    if not mark.is_file():
        return None
    path = folder / f"iter_{int(mark.read_text()):07d}"
    return path if (path / "run.json").is_file() else None


def load(path: Path, model: ParallelModel, optimizer: StepOptimizer | None) -> dict[str, Any]:
    """Read weights and optimizer state of this rank from a checkpoint of any layout; returns what `about` was. All ranks together.

    Raises `InputError` when the checkpoint is not of this model.
    """
    about = json.loads((path / "run.json").read_text())
    if optimizer is not None:
        _prepare_moments(optimizer, int(about["iteration"]))
    try:
        dcp.load(_state(model, optimizer), checkpoint_id=str(path))
    except CheckpointException as error:
        first = next(iter(error.failures.values()), (error, None))[0]
        raise InputError(
            given=f"checkpoint {path}", why=f"it does not fit the model: {first}", try_="the recipe it was saved with"
        ) from None
    _fill_second_copies(model, optimizer)
    if optimizer is not None:
        optimizer.publish()
    return about


def _prepare_moments(optimizer: StepOptimizer, step: int) -> None:
    """Empty optimizer state of the right shapes, to load into."""
    inner = optimizer.optimizer
    names = ("exp_avg", "exp_avg_sq") if isinstance(inner, (torch.optim.AdamW, torch.optim.Adam)) else ()
    for each in optimizer.updated:
        state = {name: torch.zeros_like(each.value) for name in names}
        inner.state[each.value] = {**({"step": torch.tensor(float(step), device=each.value.device)} if names else {}), **state}


def _fill_second_copies(model: ParallelModel, optimizer: StepOptimizer | None) -> None:
    """On a folded pipeline both copies of a tied weight are on one rank, and only the first was read."""
    first = {held.name: parameter for parameter, held in model.parameters if held.counted}
    with torch.no_grad():
        for parameter, held in model.parameters:
            if not held.counted and held.name in first:
                local(parameter).copy_(local(first[held.name]))
        if optimizer is not None:
            known = {each.held.name: each for each in optimizer.updated if each.held.counted}
            for each in optimizer.updated:
                if not each.held.counted and each.held.name in known:
                    local(each.value).copy_(local(known[each.held.name].value))
                    source = optimizer.optimizer.state[known[each.held.name].value]
                    for name, value in optimizer.optimizer.state[each.value].items():
                        local(value).copy_(local(source[name]))


def read_whole(path: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint, whole, in this process."""
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if not name.startswith("optimizer.")
    }
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


def export(path: Path, folder: Path, fields: dict[str, Any]) -> None:
    """Write a checkpoint as Hugging Face safetensors with its config, which `from_pretrained` loads. One process, no communication."""
    from shardwise.train.model import transformers_config

    from transformers import AutoModelForCausalLM  # isort: skip

    model = AutoModelForCausalLM.from_config(transformers_config(fields))
    missing, unexpected = model.load_state_dict(read_whole(path), strict=False)
    tied = set(model.all_tied_weights_keys) if hasattr(model, "all_tied_weights_keys") else set()
    wrong = [*unexpected, *(name for name in missing if name not in tied)]
    if wrong:
        raise InputError(given=f"checkpoint {path}", why=f"it does not fit the model: {', '.join(wrong[:5])}", try_="its own run.json")
    model.tie_weights()
    model.save_pretrained(folder)


def import_pretrained(folder: Path) -> dict[str, Tensor]:
    """Whole tensors by name of a folder of Hugging Face safetensors. Raises `InputError` when it holds none."""
    if not (folder / "config.json").is_file():
        raise InputError(given=f"checkpoint.pretrained_checkpoint={folder}", why="it holds no config.json", try_="a local model folder")
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())

"""Weights of a model that exists on the meta device only: the same numbers under every layout.

Units (the embedding, each decoder layer, the head, ...) are made whole one at a time, from a seed and their name, and cut to what this
rank holds. So memory never exceeds the local weights and one unit.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.parallel.part import Held
from shardwise.parallel.roles import layer_list
from shardwise.parallel.stage import embedding_name, tied_name


def units(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of every unit: together they hold every parameter and buffer once."""
    base, (path, layers) = model.base_model, layer_list(model)
    prefix = "" if base is model else f"{model.base_model_prefix}."
    for name, child in base.named_children():
        if child is layers:
            yield from ((f"{path}.{index}", layer) for index, layer in enumerate(layers))
        else:
            yield f"{prefix}{name}", child
    if base is not model:
        yield from ((name, child) for name, child in model.named_children() if child is not base)


def initial_unit(whole: PreTrainedModel, path: str, seed: int) -> nn.Module:
    """The unit of a whole meta model with its initial weights, on the CPU. They depend on the seed and the path only."""
    unit = copy.deepcopy(whole.get_submodule(path)).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed((seed * 1_000_003 + zlib.crc32(path.encode())) % 2**63)
        for module in _children_first(unit):
            whole._init_weights(module)
    return unit


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def initial_state(whole: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    """Initial parameters and persistent buffers of the whole model, under their names."""
    tied = tied_name(whole)
    return {
        f"{path}.{name}": value
        for path, _ in units(whole)
        for name, value in initial_unit(whole, path, seed).state_dict().items()
        if f"{path}.{name}" != tied
    }


def materialize(
    model: PreTrainedModel,
    whole: PreTrainedModel,
    held: Mapping[str, Held],
    *,
    seed: int,
    device: torch.device,
    source: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Give the cut and split meta `model` its weights: of `source` (whole tensors by name) where given, else initial ones.

    dtype: of parameters; buffers keep theirs. Gradients of all are added up in float32.
    """
    tied = tied_name(whole)
    tied_to = embedding_name(whole).removesuffix(".weight")
    made: dict[int, nn.Parameter] = {}
    paths = {name for name, _ in model.named_modules()}
    for path, _ in units(whole):
        if path not in paths:
            continue
        unit = model.get_submodule(path)
        if not any(True for _ in unit.parameters()) and not any(True for _ in unit.buffers()):
            continue
        if all(id(parameter) in made for parameter in unit.parameters()) and not any(True for _ in unit.buffers()):
            _tie(unit, made)
            continue
        filled = initial_unit(whole, path, seed)
        if f"{path}.weight" == tied:  # the output weight is the embedding's
            filled.weight = initial_unit(whole, tied_to, seed).weight
        for name, parameter in list(unit.named_parameters(remove_duplicate=False)):
            if id(parameter) not in made:
                info = held[f"{path}.{name}"]
                full = source[info.name] if source is not None and info.name in source else filled.get_parameter(name)
                made[id(parameter)] = trainable(info.part.take(full).to(device, dtype), like=parameter)
            _set(unit, name, made[id(parameter)])
        for name, _ in list(unit.named_buffers()):
            full = source.get(f"{path}.{name}") if source is not None else None
            _set(unit, name, (filled.get_buffer(name) if full is None else full).detach().clone().to(device))


def trainable(value: Tensor, *, like: nn.Parameter) -> nn.Parameter:
    """A parameter whose gradients are added up in float32 where it has fewer bits."""
    made = nn.Parameter(value, requires_grad=like.requires_grad)
    if value.dtype in (torch.bfloat16, torch.float16):
        made.grad_dtype = torch.float32
    return made


def _tie(unit: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    for name, parameter in list(unit.named_parameters(remove_duplicate=False)):
        _set(unit, name, made[id(parameter)])


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    if isinstance(value, nn.Parameter):
        owner._parameters[leaf] = value
    else:
        owner._buffers[leaf] = value

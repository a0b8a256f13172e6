"""A pipeline stage of an unmodified model: the model itself, with what lives on other stages replaced by pass-throughs.

Names of parameters stay those of the whole model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.parallel.attention import SequenceSplit
from shardwise.parallel.roles import layer_list
from shardwise.spec.stages import Stage


class Elsewhere(nn.Module):
    """A module of another stage: returns its input. Keeps the plain attributes of the module it stands for, which models may read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training" and isinstance(value, (int, float, str, bool, tuple, type(None))):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class NoPositions(nn.Module):
    """An additive embedding of another stage."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


def cut(model: PreTrainedModel, stage: Stage) -> None:
    """Remove from `model` what is not on `stage`. The order of the base model's children says what comes before and after the layers."""
    path, layers = layer_list(model)
    name = path.rpartition(".")[2]
    base = model.base_model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for index, layer in enumerate(layers):
        if index not in stage.layers:
            layers[index] = Elsewhere(layer)
    children = list(base.named_children())
    at = [child for child, _ in children].index(name)
    for place, (child, module) in enumerate(children):
        rotary = next(module.parameters(), None) is None and next(module.buffers(), None) is not None
        if place == at or rotary:  # rotary embeddings have tables only, and every stage needs them
            continue
        if place < at and not stage.embedding:
            lookup = isinstance(module, nn.Embedding) and module is not embedding
            setattr(base, child, NoPositions() if lookup else Elsewhere(module))
        elif place > at and not stage.head:
            setattr(base, child, Elsewhere(module))
    if not stage.head:
        for child, module in list(model.named_children()):
            if module is head:
                setattr(model, child, Elsewhere(module))


class StageModule(nn.Module):
    """One stage as the pipeline calls it."""

    def __init__(self, model: PreTrainedModel, stage: Stage) -> None:
        super().__init__()
        self.model, self.stage = model, stage

    def forward(self, x: Tensor, positions: Tensor, split: SequenceSplit) -> Tensor:
        """x: tokens [B, rows] on the first stage, else hidden states. Returns hidden states, on the last stage logits."""
        inputs = {"input_ids": x} if self.stage.embedding else {"inputs_embeds": x}
        options: dict[str, Any] = {"position_ids": positions, "use_cache": False, "sequence_split": split}
        if self.stage.head:
            return self.model(**inputs, **options).logits
        return self.model.base_model(**inputs, **options).last_hidden_state


def tied_name(model: PreTrainedModel) -> str | None:
    """Name of the output weight when it is the input embedding, else None."""
    head = model.get_output_embeddings()
    if head is None or not model.config.tie_word_embeddings:
        return None
    return next((f"{name}.weight" for name, module in model.named_modules() if module is head), None)


def embedding_name(model: PreTrainedModel) -> str:
    embedding = model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is embedding)


def build_meta(config: Any) -> PreTrainedModel:
    """The model of a `transformers` config on the meta device, with a config of its own."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config))

"""The transformers config of a run."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from shardwise.errors import ModelError

_READ_IF_THERE = ("head_dim",)  # by models whose config does not declare it


def trainable_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a published config as `transformers` builds a model from them: its models have no layers that predict further tokens."""
    values = {key: value for key, value in fields.items() if key != "num_nextn_predict_layers"}
    if "kv_lora_rank" in values:
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
    return values


def transformers_config(fields: dict[str, Any]) -> Any:
    """A config object from its fields. Raises `ModelError` for fields the family does not have (its config would keep them unread) and
    for values it does not accept."""
    from transformers import AutoConfig

    values = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **fields}
    kind = values.pop("model_type")
    try:
        plain, config = AutoConfig.for_model(kind), AutoConfig.for_model(kind, **values)
    except Exception as error:  # transformers raises several kinds for values that do not go together
        raise ModelError([f"{kind}: {error}"]) from None
    known = sorted({*plain.to_dict(), *plain.attribute_map, *_READ_IF_THERE})
    unknown = [name for name in values if name not in known and not hasattr(plain, name)]
    if unknown:
        raise ModelError([f"{kind} has no field {name}{_nearest(name, known)}" for name in unknown])
    return config


def _nearest(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=3)
    return f". Try: {' or '.join(near)}" if near else ""

"""The transformers config of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import ModelError


def trainable_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a published config as `transformers` builds a model from them: its models have no layers that predict further tokens."""
    values = {key: value for key, value in fields.items() if key != "num_nextn_predict_layers"}
    if "kv_lora_rank" in values:
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
    return values


def transformers_config(fields: dict[str, Any]) -> Any:
    """A config object from its fields. Raises `ModelError` for fields the family does not accept."""
    from transformers import AutoConfig

    values = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **fields}
    kind = values.pop("model_type")
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:  # transformers raises several kinds for values that do not go together
        raise ModelError([f"{kind}: {error}"]) from None

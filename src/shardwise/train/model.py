"""The transformers config of a run."""

from __future__ import annotations

from typing import Any

from shardwise.errors import ModelError


def transformers_config(fields: dict[str, Any]) -> Any:
    """A config object from its fields. Raises `ModelError` for fields the family does not accept."""
    from transformers import AutoConfig

    values = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **fields}
    kind = values.pop("model_type")
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:  # transformers raises several kinds for values that do not go together
        raise ModelError([f"{kind}: {error}"]) from None

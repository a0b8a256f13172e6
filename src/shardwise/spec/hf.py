"""`ModelSpec` from a Hugging Face `config.json`: same parameter count as the `transformers` model, for the model types known here.

Of a multimodal model the language model is described, not the vision or audio tower.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shardwise.errors import ModelError
from shardwise.spec.hf_config import Config
from shardwise.spec.hf_families import FAMILIES, WRAPPERS
from shardwise.spec.model import ModelSpec


def model_types() -> tuple[str, ...]:
    """Values of `model_type` that can be read."""
    return tuple(sorted((*FAMILIES, *WRAPPERS)))


def from_config(config: Mapping[str, Any], name: str = "") -> ModelSpec:
    """The model of a config dict. Raises `ModelError` with every missing, malformed or unsupported field."""
    if not isinstance(config, Mapping):
        raise ModelError([f"a model config must be a JSON object, got {type(config).__name__}"])
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ModelError(["model_type is missing: the config must say which architecture it describes"])
    c = Config(config)
    if kind in WRAPPERS:
        text = c.section("text_config")
        inherited = {key: config[key] for key in ("tie_word_embeddings",) if key in config and key not in text.values}
        kind, c = str(text.values.get("model_type") or WRAPPERS[kind]), Config({**inherited, **text.values}, c.problems)
    builder = FAMILIES.get(kind)
    if builder is None:
        near = get_close_matches(kind, model_types(), n=3, cutoff=0.6)
        hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(model_types())}"
        raise ModelError(
            [f"model_type {kind!r} is not known: how its layers are built and which parameters they hold is not described ({hint})"]
        )
    model = builder(c, name or str(config.get("_name_or_path") or kind))
    if c.problems:
        raise ModelError(f"{kind}: {problem}" for problem in c.problems)
    return model


def from_file(path: Path) -> ModelSpec:
    """The model of a `config.json`, or of the directory that holds one. Raises `ModelError`."""
    if path.is_dir():
        path = path / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError([f"cannot read {path}: {error}"]) from None
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelError([f"{path} is not JSON: {error}"]) from None
    return from_config(config, name=path.parent.name or path.stem)

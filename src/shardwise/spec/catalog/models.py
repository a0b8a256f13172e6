"""Models by name, from the config facts in `models.toml`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.spec import hf
from shardwise.spec.catalog.tables import table, unknown
from shardwise.spec.model import ModelSpec

_SUFFIX = re.compile(r"-(instruct|chat|base|hf|it|pt|bf16)$")


def _plain(name: str) -> str:
    """A name without publisher, case, and the endings that do not change the architecture."""
    bare = name.strip().lower().rsplit("/", 1)[-1].replace("_", "-").removeprefix("meta-").removeprefix("nvidia-")
    while (shorter := _SUFFIX.sub("", bare)) != bare:
        bare = shorter
    return bare


@cache
def _names() -> dict[str, str]:
    names: dict[str, str] = {}
    for key, entry in table("models").items():
        for name in (key, entry.get("hf_id", key), *entry.get("aliases", ())):
            names.setdefault(_plain(name), key)
    return names


def model_names() -> tuple[str, ...]:
    """Models that are described in full."""
    return tuple(name for name, entry in table("models").items() if "config" in entry)


def model_entry(name: str) -> tuple[str, str | None, str]:
    """Catalog name, Hugging Face id and source of a model."""
    entry = table("models")[name]
    return name, entry.get("hf_id"), entry["source"]


def find_model(name: str) -> str | None:
    """Catalog name of a catalog name, alias or Hugging Face id; None if it is not known."""
    return _names().get(_plain(name))


@cache
def _known(key: str) -> ModelSpec:
    entry = table("models")[key]
    if "config" not in entry:
        raise ShardwiseError(f"model {key!r} needs the path of its config.json: {entry['source']}")
    model = hf.from_config(entry["config"], name=key)
    return model.replace(source=entry["source"])


def _exists(path: Path) -> bool:
    try:
        return path.is_dir() or path.is_file()
    except OSError:  # too long for a name
        return False


def model(name: str) -> ModelSpec:
    """The model called `name`: a catalog name, a Hugging Face id, or a path to a `config.json` or its directory.

    Raises `ShardwiseError` with the nearest names, or with everything that is wrong with the file.
    """
    key = find_model(name)
    if key is not None:
        return _known(key)
    path = Path(name)
    if name.endswith(".json") or (name and _exists(path)):
        return hf.from_file(path)
    raise ShardwiseError(unknown("model", _plain(name) or name, _names(), "shardwise models") + " (the path of a config.json works too)")

"""`a.b=c` words on top of a recipe's configuration. Every problem of every word is reported at once."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardwise.errors import Finding, LayoutError
from shardwise.train.config import RunConfig

# keys of Megatron Bridge that mean another key here
_MOVED = {
    "dataset.seq_length": "model.seq_length",
    "dist.use_torch_fsdp2": "ddp.use_torch_fsdp2",
    "optimizer.use_distributed_optimizer": "ddp.use_distributed_optimizer",
}


def keys(config: Any, prefix: str = "") -> list[str]:
    """All keys of a configuration, dotted."""
    result = []
    for each in fields(config):
        value = getattr(config, each.name)
        path = f"{prefix}{each.name}"
        result += keys(value, f"{path}.") if is_dataclass(value) else [path]
    return result


def apply(config: RunConfig, words: Sequence[str]) -> RunConfig:
    """A copy of `config` with the overrides. Values are read as OmegaConf reads them (`null`, numbers, booleans, [lists]).

    A leading `+` or `++` and the spelling `model.transformer.KEY` are accepted. Raises `LayoutError` with every unknown key (and the
    nearest known ones) and every value of a wrong type.
    """
    result, problems = deepcopy(config), []
    known = keys(config)
    for word in words:
        key, equals, text = word.partition("=")
        path = key.lstrip("+").replace("model.transformer.", "model.")
        path = _MOVED.get(path, path)
        section, _, name = path.rpartition(".")
        if not equals:
            problems.append(_problem(word, "not of the form KEY=VALUE", "words like train.train_iters=3"))
        elif path.startswith("model.hf."):
            value, why = _read(text)
            result.model.hf[path.removeprefix("model.hf.")] = value
            if why:
                problems.append(_problem(word, why, f"{path}=VALUE"))
        elif path not in known:
            problems.append(_problem(word, f"there is no key {path}", _nearest(path, known)))
        else:
            owner = getattr(result, section) if section else result
            value, why = _read(text)
            wanted = get_type_hints(type(owner))[name]
            why = why or _mismatch(value, wanted)
            if why:
                problems.append(_problem(word, why, f"{path}={_example(wanted)}"))
            else:
                setattr(owner, name, _coerced(value, wanted))
    if problems:
        raise LayoutError(problems)
    return result


def _problem(word: str, why: str, try_: str) -> Finding:
    return Finding(rule="O1", severity="error", given=word, why=why, try_=try_, source="shardwise.train.config")


def _nearest(path: str, known: Iterable[str]) -> str:
    leaves = {each.rpartition(".")[2]: each for each in known}
    near = get_close_matches(path, known, n=3, cutoff=0.6)
    near += [leaves[leaf] for leaf in get_close_matches(path.rpartition(".")[2], leaves, n=2, cutoff=0.7) if leaves[leaf] not in near]
    return " or ".join(near) if near else "shardwise recipes --keys lists them"


def _read(text: str) -> tuple[Any, str]:
    try:
        value = OmegaConf.from_dotlist([f"value={text}"])["value"]
    except (OmegaConfBaseException, ValueError) as error:
        return None, f"cannot be read: {str(error).splitlines()[0]}"
    return (OmegaConf.to_container(value) if OmegaConf.is_config(value) else value), ""


def _options(wanted: Any) -> tuple[Any, ...]:
    return get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(each, get_args(kind)[0]) for each in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is type(None):
        return value is None
    return kind is Any or isinstance(value, kind)


def _mismatch(value: Any, wanted: Any) -> str:
    kinds = _options(wanted)
    if any(_fits(value, kind) for kind in kinds) or (isinstance(value, str) and list[str] in kinds):
        return ""
    if value == "None" and type(None) in kinds:
        return "None is a word here, not the empty value"
    return f"{value!r} is not {' or '.join(_name(kind) for kind in kinds)}"


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "null"}
    return words.get(kind, "a list" if get_origin(kind) is list else str(kind))


def _example(wanted: Any) -> str:
    kinds = _options(wanted)
    if type(None) in kinds:
        return "null"
    kind = kinds[0]
    if get_origin(kind) is Literal:
        return str(get_args(kind)[0])
    return {int: "8", float: "0.1", bool: "true"}.get(kind, "VALUE")


def _coerced(value: Any, wanted: Any) -> Any:
    kinds = _options(wanted)
    if list[str] in kinds and isinstance(value, str):
        return [value]
    return float(value) if float in kinds and isinstance(value, int) and not isinstance(value, bool) else value

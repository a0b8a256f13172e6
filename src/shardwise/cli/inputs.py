"""Turns what the user typed into a model, a cluster and a layout. All problems of one input are reported together."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli import options as opt
from shardwise.cli.framework_options import NAMES, option_of, split_options
from shardwise.errors import Finding, InputError, LayoutError, ShardwiseError
from shardwise.planner.space import FRAMEWORK_SHARDING, SHARDING, number_formats
from shardwise.spec import catalog, grammar
from shardwise.spec.layout import Layout
from shardwise.spec.ranks import min_world

if TYPE_CHECKING:
    from shardwise.spec.cluster import Cluster
    from shardwise.spec.model import ModelSpec

# layout fields whose short names no section of a framework's configuration has
_SHORT = ("tp", "cp", "dp", "pp", "ep", "etp", "vpp", "sp", "mbs", "gbs")
FRAMEWORKS = ("megatron-core", "bridge", "torchtitan", "shardwise")
# Keys of a YAML file that are not the layout's.
SETTINGS = ("model", "gpus", "gpu", "gpus_per_node", "interconnect", "seq_len", "framework")
COUNTS = ("gpus", "gpus_per_node", "seq_len")
_LIMIT = 1 << 20  # bytes of a layout file
MOST = {"gpus": 1 << 20, "gpus_per_node": 1 << 12, "seq_len": 1 << 30, "top": 1000}
MOST_SAMPLES = 10**9


@dataclass(frozen=True, kw_only=True)
class Source:
    """A layout as given: words, the settings a file carried, and the whole layout where an exporter's format was read.

    options: of the framework, for rules that read them. problems: what is wrong with it; `read_layout` raises them with those of the words.
    """

    words: tuple[str, ...]
    settings: dict[str, Any]
    layout: Layout | None = None
    options: dict[str, Any] = field(default_factory=dict)
    problems: tuple[ShardwiseError, ...] = ()


def counts_in_range(**counts: int | None) -> None:
    """Refuse counts below 1 or beyond any cluster, all in one message."""
    wrong = {name: value for name, value in counts.items() if value is not None and in_range(name, value) is None}
    if wrong:
        raise InputError(
            given=", ".join(f"--{name.replace('_', '-')} {value}" for name, value in wrong.items()),
            why="counts are whole numbers from 1 to " + " and ".join(f"{MOST.get(name, MOST_SAMPLES):,} ({name})" for name in wrong),
            try_=", ".join(f"--{name.replace('_', '-')} {8 if name == 'gpus' else 1}" for name in wrong),
        )


def in_range(name: str, value: int | None) -> int | None:
    """The count, or None where `counts_in_range` refuses it."""
    return value if value is not None and 1 <= value <= MOST.get(name, MOST_SAMPLES) else None


def can_write(**paths: Path | None) -> None:
    """Refuse paths that no file can be written to, before anything is computed."""
    given = {name: path for name, path in paths.items() if path is not None}
    wrong = {}
    for name, path in given.items():
        if path.is_dir():
            wrong[name] = "is a directory"
        elif not path.parent.is_dir():
            wrong[name] = f"is in {path.parent}, which is no directory"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            wrong[name] = "cannot be written"
        elif any(path == other for earlier, other in given.items() if earlier < name):
            wrong[name] = "is the file of another option"
    if wrong:
        raise InputError(
            given=", ".join(f"--{name} {given[name]}" for name in wrong),
            why="; ".join(f"{given[name]} {why}" for name, why in wrong.items()),
            try_="the path of a file in a folder that exists",
        )


def read_all(*readers: Callable[[], Any]) -> tuple[Any, ...]:
    """The results of all readers, or one error with the problems of all of them."""
    results, problems = [], []
    for read in readers:
        try:
            results.append(read())
        except ShardwiseError as error:
            problems.append(error)
    refuse_all(problems)
    return tuple(results)


def refuse_all(problems: Sequence[ShardwiseError]) -> None:
    """Raise what there is of problems, several as one error."""
    if len(problems) > 1:
        raise Problems(problems)
    if problems:
        raise problems[0]


class Problems(ShardwiseError):
    """Several inputs were refused; `errors` has what each one says."""

    def __init__(self, errors: Sequence[ShardwiseError]) -> None:
        self.errors = tuple(errors)
        self.findings: tuple[Finding, ...] = tuple(finding for error in errors for finding in getattr(error, "findings", ()))
        super().__init__("\n".join(str(error) for error in errors))


def framework_word(name: str) -> str:
    """The usual name of a rule set, known or not."""
    known = {"megatron": "megatron-core", "megatron-lm": "megatron-core", "mcore": "megatron-core", "megatron-bridge": "bridge"}
    return known.get(name.lower(), name.lower())


def framework_name(name: str) -> str:
    word = framework_word(name)
    if word not in FRAMEWORKS:
        near = get_close_matches(word, FRAMEWORKS, n=1, cutoff=0.4) or FRAMEWORKS
        raise InputError(given=f"--framework {name}", why="there is no such rule set", try_=" | ".join(near))
    return word


def read_source(words: Sequence[str], *, world: int | None, options: bool = False) -> Source:
    """Layout words, and files among them. Words after a file change what it says. options: words may name framework options too.

    Raises nothing: what is wrong is in `problems`.
    """
    settings: dict[str, Any] = {}
    layout: Layout | None = None
    from_files: list[str] = []
    words, problems = _joined(words, options)
    for name in (word for word in words if "=" not in word):
        try:
            source = _read_file(name, world)
        except ShardwiseError as error:
            problems.append(error)
            continue
        from_files += source.words
        settings |= source.settings
        problems += source.problems
        layout = source.layout or layout
    own = [word for word in words if "=" in word]
    given: dict[str, Any] = {}
    if options:
        from_files, given, wrong = split_options(from_files)
        own, later, wrong_words = split_options(own)
        given |= later
        if wrong or wrong_words:
            problems.append(LayoutError((*wrong, *wrong_words)))
    changed = {grammar.field_of(word.partition("=")[0]) for word in own}
    kept = [word for word in from_files if grammar.field_of(word.partition("=")[0]) not in changed]
    return Source(words=(*kept, *own), settings=settings, layout=layout, options=given, problems=tuple(problems))


def _joined(words: Sequence[str], options: bool) -> tuple[list[str], list[ShardwiseError]]:
    """Megatron's `--name value` and `--switch` as `name=value` words; names that are nothing are left out and a problem."""
    joined: list[str] = []
    unknown: list[str] = []
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            if grammar.field_of(name) is None and not (options and option_of(name)):
                unknown.append(name)
                continue
            joined.append(word if "=" in word else f"{word}=")
        elif joined and joined[-1].startswith("--") and joined[-1].endswith("=") and "=" not in word:
            joined[-1] += word
        else:
            joined.append(word)
    problems: list[ShardwiseError] = []
    if unknown:
        known = [name.removeprefix("--") for name in opt.names.get()] + [name.replace("_", "-") for name in NAMES if options]
        near = [f"--{match}" for name in unknown for match in get_close_matches(name.removeprefix("--"), known, n=1, cutoff=0.6)]
        why = "this command has no such option, and there is no such layout field"
        problems.append(InputError(given=" ".join(unknown), why=why, try_=" | ".join(near) or "--help lists the options"))
    return [f"{word}true" if word.startswith("--") and word.endswith("=") else word for word in joined], problems


def _read_file(name: str, world: int | None) -> Source:
    from shardwise.planner.exporters import READERS, format_of

    path = Path(name)
    text = _text_of(path, name)
    kind = format_of(text)
    if kind is not None:
        return Source(words=(), settings={}, layout=READERS[kind](text, world))
    flat = _flatten(_yaml(path, text))
    settings, problems = _settings({key: flat.pop(key) for key in SETTINGS if key in flat})
    if any("." in key for key in flat):  # sections of Megatron Bridge
        short = [key for key in flat if key.partition(".")[0] in _SHORT or key.rpartition(".")[2] in _SHORT]
        if short:
            given, why = f"{path}: {', '.join(short)}", "short names are keys of their own, with one value, not parts of a section"
            problems.append(InputError(given=given, why=why, try_=f"{'tp: 4'!r}, or Megatron Bridge's model.tensor_model_parallel_size"))
        elif not problems:
            lines = "\n".join(f"{key}={_quoted(value)}" for key, value in flat.items())
            layout = READERS["megatron-bridge"](lines, world or settings.get("gpus"))
            return Source(words=(), settings=settings, layout=layout)
        return Source(words=(), settings=settings, problems=tuple(problems))
    return Source(words=tuple(f"{key}={_word(value)}" for key, value in flat.items()), settings=settings, problems=tuple(problems))


def _settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[ShardwiseError]]:
    """The settings of a file that have a value, and what is wrong with the others."""
    good: dict[str, Any] = {}
    problems: list[ShardwiseError] = []
    for name, value in given.items():
        if value is None:
            continue
        if name not in COUNTS:
            if isinstance(value, str) and value:
                good[name] = value
            else:
                problems.append(InputError(given=f"{name}: {value!r}", why="it must be a name", try_=f"{name}: NAME"))
        elif isinstance(value, int) and not isinstance(value, bool) and in_range(name, value):
            good[name] = value
        else:
            why = f"it must be a whole number from 1 to {MOST[name]:,}"
            problems.append(InputError(given=f"{name}: {value!r}", why=why, try_=f"{name}: 8"))
    return good, problems


def _text_of(path: Path, name: str) -> str:
    known = "a LAYOUT word like tp=4, or the path of a YAML file, arguments, overrides, TOML or SLURM script"
    try:
        if path.stat().st_size > _LIMIT:
            raise InputError(given=str(path), why="it is larger than a layout file can be (1 MiB)", try_=known)
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(given=repr(name), why=f"it is neither key=value nor a readable file ({why})", try_=known) from None
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise InputError(given=str(path), why="it is a binary file", try_=known) from None
    if "\0" in text:
        raise InputError(given=str(path), why="it is a binary file", try_=known)
    return text


def _yaml(path: Path, text: str) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except (YAMLError, OmegaConfBaseException, ValueError, TypeError, AssertionError, RecursionError) as error:
        first = str(error).strip().splitlines() or ["it has no keys"]
        raise InputError(given=str(path), why=f"it is not YAML of keys and values: {first[0]}", try_="lines like `tp: 4`") from None
    if not isinstance(content, dict) or not content or all(value is None for value in content.values()):
        raise InputError(
            given=str(path), why="it holds no keys with values", try_="lines like `tp: 4`, or a format `shardwise export` writes"
        )
    return {str(key): value for key, value in content.items()}


def _flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            inner = "" if key in ("layout", "parallelism") and not prefix else f"{prefix}{key}."
            flat |= _flatten(value, inner)
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(str(item) for item in value) + "]"
    return "none" if value is None else str(value)


def _quoted(value: Any) -> str:
    """A value of a YAML section as Megatron Bridge's override words have it."""
    return "null" if value is None else shlex.quote(_word(value))


def read_layout(source: Source, *, world: int | None, gbs: int | None, precision: str | None, framework: str) -> Layout:
    """The complete layout. Defaults follow the framework (sharding, sequence parallel, expert tensor size) and what was chosen (number
    formats).

    Raises `LayoutError` or `Problems` with everything that is wrong with the words and with the source.
    """
    words = list(source.words)
    if gbs is not None:
        words.append(f"gbs={gbs}")
    if precision is not None:
        words.append(f"precision={precision}")
    problems = list(source.problems)
    values: dict[str, Any] = {}
    try:
        values = grammar.read_values(words)
    except LayoutError as error:
        problems.append(error)
    refuse_all(problems)
    base = source.layout
    if base is None:
        defaults: dict[str, Any] = number_formats(framework, values.get("precision", "bf16"))
        usual = FRAMEWORK_SHARDING.get(framework, ())
        chosen = values.get("sharding", usual[0] if usual else None)
        if chosen in usual:
            defaults |= SHARDING[chosen]
        if framework == "torchtitan":
            defaults["sp"] = values.get("tp", 1) > 1
        if framework == "megatron-core" and "etp" not in values:
            defaults["etp"] = values.get("tp", 1)
        base = Layout().replace(**defaults)
    layout = grammar.parse(words, world=world, base=base)
    if source.layout is None and "dp" not in values and world is None:
        layout = layout.with_world(min_world(layout))
    if source.layout is None and "gbs" not in values:
        layout = layout.replace(gbs=layout.mbs * layout.dp)
    return layout


def follow_model(layout: Layout, source: Source, model: ModelSpec | None) -> Layout:
    """What was not given, as the model has it: communication of context parallelism that every attention block allows, and no expert
    tensor size without experts."""
    if model is None or source.layout is not None:
        return layout
    given = {grammar.field_of(word.partition("=")[0]) for word in source.words}
    if model.moe is None and "etp" not in given:
        layout = layout.replace(etp=1)
    if layout.cp == 1 or "cp_comm" in given:
        return layout
    from shardwise.planner.rules.alternatives import natural_cp_comm

    return layout.replace(cp_comm=natural_cp_comm(model))


def read_model(name: str | None, settings: Mapping[str, Any]) -> ModelSpec | None:
    name = settings.get("model") if name is None else name
    return None if name is None else catalog.model(name)


def read_cluster(gpu: str, gpus: int, *, gpus_per_node: int | None, interconnect: str | None) -> Cluster:
    return catalog.cluster(gpu, gpus, gpus_per_node=gpus_per_node, interconnect=interconnect)

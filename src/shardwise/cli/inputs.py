"""Turns what the user typed into a model, a cluster and a layout. All problems of one input are reported together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.framework_options import NAMES, option_of, split_options
from shardwise.errors import InputError, LayoutError, ShardwiseError
from shardwise.planner.space import SHARDING, number_formats
from shardwise.spec import catalog, grammar
from shardwise.spec.layout import Layout
from shardwise.spec.ranks import min_world

if TYPE_CHECKING:
    from shardwise.spec.cluster import Cluster
    from shardwise.spec.model import ModelSpec

FRAMEWORKS = ("megatron-core", "bridge", "torchtitan", "shardwise")
# Keys of a YAML file that are not the layout's.
SETTINGS = ("model", "gpus", "gpu", "gpus_per_node", "interconnect", "seq_len", "framework")
OPTIONS = (
    "--model", "--gpus", "--gpu", "--gpus-per-node", "--interconnect", "--seq-len", "--global-batch", "--precision", "--framework",
    "--json", "--html", "--trace", "--top", "--why-not", "--to", "--output",
)  # fmt: skip
_LIMIT = 1 << 20  # bytes of a layout file
MOST = {"gpus": 1 << 20, "gpus_per_node": 1 << 12, "seq_len": 1 << 30, "top": 1000}
MOST_SAMPLES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Source:
    """A layout as given: words, the settings a file carried, and the whole layout where an exporter's format was read.

    options: of the framework, for rules that read them.
    """

    words: tuple[str, ...]
    settings: dict[str, Any]
    layout: Layout | None = None
    options: dict[str, Any] = field(default_factory=dict)


def counts_in_range(**counts: int | None) -> None:
    """Refuse counts below 1 or beyond any cluster, all in one message."""
    wrong = {name: value for name, value in counts.items() if value is not None and not 1 <= value <= MOST.get(name, MOST_SAMPLES)}
    if wrong:
        raise InputError(
            given=", ".join(f"--{name.replace('_', '-')} {value}" for name, value in wrong.items()),
            why="counts are whole numbers from 1 to " + " and ".join(f"{MOST.get(name, MOST_SAMPLES):,} ({name})" for name in wrong),
            try_=", ".join(f"--{name.replace('_', '-')} {8 if name == 'gpus' else 1}" for name in wrong),
        )


def read_all(*readers: Callable[[], Any]) -> tuple[Any, ...]:
    """The results of all readers, or one error with the problems of all of them."""
    results, problems = [], []
    for read in readers:
        try:
            results.append(read())
        except ShardwiseError as error:
            problems.append(error)
    if len(problems) > 1:
        raise Problems(problems)
    if problems:
        raise problems[0]
    return tuple(results)


class Problems(ShardwiseError):
    """Several inputs were refused; `errors` has what each one says."""

    def __init__(self, errors: Sequence[ShardwiseError]) -> None:
        self.errors = tuple(errors)
        self.findings = tuple(finding for error in errors if isinstance(error, LayoutError) for finding in error.findings)
        super().__init__("\n".join(str(error) for error in errors))


def framework_name(name: str) -> str:
    known = {"megatron": "megatron-core", "megatron-lm": "megatron-core", "mcore": "megatron-core", "megatron-bridge": "bridge"}
    word = known.get(name.lower(), name.lower())
    if word not in FRAMEWORKS:
        near = get_close_matches(word, FRAMEWORKS, n=1, cutoff=0.4) or FRAMEWORKS
        raise InputError(given=f"--framework {name}", why="there is no such rule set", try_=" | ".join(near))
    return word


def read_source(words: Sequence[str], *, world: int | None, options: bool = False) -> Source:
    """Layout words, and files among them. Words after a file change what it says. options: words may name framework options too."""
    settings: dict[str, Any] = {}
    layout: Layout | None = None
    from_files: list[str] = []
    words = _joined(words, options)
    for name in (word for word in words if "=" not in word):
        source = _read_file(Path(name), world)
        from_files += source.words
        settings |= source.settings
        layout = source.layout or layout
    own = [word for word in words if "=" in word]
    given: dict[str, Any] = {}
    if options:
        from_files, given = split_options(from_files)
        own, later = split_options(own)
        given |= later
    changed = {grammar.field_of(word.partition("=")[0]) for word in own}
    kept = [word for word in from_files if grammar.field_of(word.partition("=")[0]) not in changed]
    return Source(words=(*kept, *own), settings=settings, layout=layout, options=given)


def _joined(words: Sequence[str], options: bool) -> list[str]:
    """Megatron's `--name value` and `--switch` as `name=value` words."""
    joined: list[str] = []
    unknown: list[str] = []
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            if grammar.field_of(name) is None and not (options and option_of(name)):
                unknown.append(name)
            joined.append(word if "=" in word else f"{word}=")
        elif joined and joined[-1].startswith("--") and joined[-1].endswith("=") and "=" not in word:
            joined[-1] += word
        else:
            joined.append(word)
    if unknown:
        known = (*OPTIONS, *(f"--{name.replace('_', '-')}" for name in NAMES)) if options else OPTIONS
        near = [match for name in unknown for match in get_close_matches(name, known, n=1, cutoff=0.6)]
        raise InputError(given=" ".join(unknown), why="there is no such option or layout field", try_=" | ".join(near or OPTIONS))
    return [f"{word}true" if word.startswith("--") and word.endswith("=") else word for word in joined]


def _read_file(path: Path, world: int | None) -> Source:
    from shardwise.planner.exporters import READERS, format_of

    text = _text_of(path)
    kind = format_of(text)
    if kind is not None:
        return Source(words=(), settings={}, layout=READERS[kind](text, world))
    flat = _flatten(_yaml(path, text))
    settings = {key: flat.pop(key) for key in SETTINGS if key in flat}
    lines = [f"{key}={_word(value)}" for key, value in flat.items()]
    if any("." in key for key in flat):  # sections of Megatron Bridge
        return Source(words=(), settings=settings, layout=READERS["megatron-bridge"]("\n".join(lines), world or settings.get("gpus")))
    return Source(words=tuple(lines), settings=settings)


def _text_of(path: Path) -> str:
    known = "a LAYOUT word like tp=4, or the path of a YAML file, arguments, overrides, TOML or SLURM script"
    try:
        if path.stat().st_size > _LIMIT:
            raise InputError(given=str(path), why="it is larger than a layout file can be (1 MiB)", try_=known)
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(given=repr(str(path)), why=f"it is neither key=value nor a readable file ({why})", try_=known) from None
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
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        first = str(error).strip().splitlines() or ["unreadable"]
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


def read_layout(source: Source, *, world: int | None, gbs: int | None, precision: str | None, framework: str) -> Layout:
    """The complete layout. Defaults follow the framework (expert tensor size) and what was chosen (number formats)."""
    words = list(source.words)
    if gbs is not None:
        words.append(f"gbs={gbs}")
    if precision is not None:
        words.append(f"precision={precision}")
    values = grammar.read_values(words)
    base = source.layout
    if base is None:
        defaults: dict[str, Any] = number_formats(framework, values.get("precision", "bf16"))
        defaults |= SHARDING.get(values.get("sharding", ""), {})
        if framework == "megatron-core" and "etp" not in values:
            defaults["etp"] = values.get("tp", 1)
        base = Layout().replace(**defaults)
    layout = grammar.parse(words, world=world, base=base)
    if source.layout is None and "dp" not in values and world is None:
        layout = layout.with_world(min_world(layout))
    if source.layout is None and "gbs" not in values:
        layout = layout.replace(gbs=layout.mbs * layout.dp)
    return layout


def follow_model(layout: Layout, source: Source, model: ModelSpec) -> Layout:
    """Where no communication of context parallelism was given, the one every attention block of the model allows."""
    given = {grammar.field_of(word.partition("=")[0]) for word in source.words}
    if layout.cp == 1 or source.layout is not None or "cp_comm" in given:
        return layout
    from shardwise.planner.rules.alternatives import natural_cp_comm

    return layout.replace(cp_comm=natural_cp_comm(model))


def read_model(name: str | None, settings: Mapping[str, Any]) -> ModelSpec | None:
    name = name or settings.get("model")
    return catalog.model(str(name)) if name else None


def read_cluster(gpu: str, gpus: int, *, gpus_per_node: int | None, interconnect: str | None) -> Cluster:
    return catalog.cluster(gpu, gpus, gpus_per_node=gpus_per_node, interconnect=interconnect)

"""Command-line arguments of Megatron-LM (`pretrain_gpt.py`), written and read."""

from __future__ import annotations

import re
import shlex
from typing import Any

from shardwise.errors import InputError
from shardwise.planner.exporters.megatron import Names, from_megatron, to_megatron
from shardwise.spec.layout import Layout

# Megatron name: argument, where the argument is not the name with dashes
_ARGUMENTS = {
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "microbatch_group_size_per_vp_stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
}
# Megatron name: argument that turns off what is on by default
_OFF = {"overlap_p2p_comm": "no-overlap-p2p-communication", "torch_fsdp2_reshard_after_forward": "torch-fsdp2-no-reshard-after-forward"}
_LISTS = ("hierarchical_context_parallel_sizes", "recompute_modules", "offload_modules")
_NAME_OF = {argument: name for name, argument in _ARGUMENTS.items()}
_OFF_NAME = {argument: name for name, argument in _OFF.items()}
_WORLD = re.compile(r"on (\d+) GPUs")


def write(layout: Layout) -> str:
    """The arguments, one per line, for a shell."""
    lines = [f"# {describe(layout)}"]
    lines += [" ".join(words) for words in arguments(layout)]
    return lines[0] + "\n" + " \\\n".join(lines[1:]) + "\n"


def describe(layout: Layout) -> str:
    return f"layout on {layout.world} GPUs: DP {layout.dp}, expert DP {layout.edp}, {layout.microbatches} micro batches"


def arguments(layout: Layout) -> list[list[str]]:
    """Each argument with its values, quoted for a shell."""
    words = []
    for name, value in to_megatron(layout).items():
        if value is False:
            if name in _OFF:
                words.append([f"--{_OFF[name]}"])
            continue
        flag = "--" + _ARGUMENTS.get(name, name.replace("_", "-"))
        if value is True:
            words.append([flag])
        elif isinstance(value, list):
            words.append([flag, *(shlex.quote(str(item)) for item in value)])
        else:
            words.append([flag, shlex.quote(str(value))])
    return words


def read(text: str, world: int | None = None) -> Layout:
    """Read arguments back. ``world`` wins over the comment of `write`; arguments of other kinds are left alone."""
    found = _WORLD.search(text)
    if world is None and not found:
        raise InputError(given="Megatron-LM arguments", why="they do not say the number of GPUs", try_="--gpus N beside them")
    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    try:
        words = shlex.split(body.replace("\\\n", " "))
    except ValueError as error:
        raise InputError(given="Megatron-LM arguments", why=f"the quoting is broken: {error}", try_="balanced quotes") from None
    return from_megatron(parse(words), world if world is not None else int(found[1]) if found else 1)


def parse(words: list[str]) -> Names:
    """Megatron names from ``--argument value ...`` words."""
    names: Names = {}
    current: str | None = None
    for word in words:
        if word.startswith("--"):
            argument, _, value = word[2:].partition("=")
            if argument in _OFF_NAME:
                names[_OFF_NAME[argument]] = False
                current = None
                continue
            current = _NAME_OF.get(argument, argument.replace("-", "_"))
            names[current] = [] if current in _LISTS else True
            if value:
                _set(names, current, value)
        elif current:
            _set(names, current, word)
    return names


def _set(names: Names, name: str, word: str) -> None:
    value: Any = word
    if re.fullmatch(r"[-+]?[0-9]{1,18}", word):
        value = int(word)
    elif re.fullmatch(r"[-+]?[0-9]*\.[0-9]+(e[-+]?[0-9]+)?", word):
        value = float(word)
    if isinstance(names[name], list):
        names[name].append(value)
    else:
        names[name] = value

"""`shardwise export`: a layout as the input of a framework."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli import FINDING, OK
from shardwise.cli import options as opt
from shardwise.cli.inputs import can_write, counts_in_range, framework_name, framework_word, in_range, read_all, read_layout, read_source
from shardwise.cli.render import note, print_json
from shardwise.errors import InputError
from shardwise.planner.exporters import READERS, WRITERS, slurm

To = Annotated[str, typer.Option("--to", help=" | ".join(WRITERS))]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="write a file in place of printing", show_default=False)]


def export(
    to: To,
    layout: opt.Words = None,
    gpus: opt.Gpus = None,
    gpus_per_node: opt.PerNode = None,
    global_batch: opt.GlobalBatch = None,
    precision: opt.Precision = None,
    framework: opt.Framework = "bridge",
    output: Output = None,
    as_json: opt.Json = False,
) -> int:
    """Write LAYOUT for Megatron-LM, Megatron Bridge, torchtitan or SLURM. `shardwise check` reads the result back."""
    if not layout:
        raise InputError(
            given="export without LAYOUT", why="there is nothing to write", try_="shardwise export tp=4 pp=2 gbs=64 --to slurm"
        )
    source = read_source(layout, world=in_range("gpus", gpus))
    world, samples = in_range("gpus", gpus) or source.settings.get("gpus"), in_range("global_batch", global_batch)
    name = "torchtitan" if to.lower() in ("titan", "torchtitan") else framework_word(source.settings.get("framework", framework))
    target, _, _, _, chosen = read_all(
        lambda: _target(to),
        lambda: counts_in_range(gpus=gpus, gpus_per_node=gpus_per_node, global_batch=global_batch),
        lambda: can_write(output=output),
        lambda: framework_name(source.settings.get("framework", framework)),
        lambda: read_layout(source, world=world, gbs=samples, precision=precision, framework=name),
    )
    if world is not None and chosen.world != world:
        given, size = f"{world} GPUs, tp={chosen.tp} cp={chosen.cp} pp={chosen.pp} dp={chosen.dp}", chosen.tp * chosen.cp * chosen.pp
        raise InputError(given=given, why=f"TP*CP*PP*DP is {chosen.world}", try_=f"--gpus with a multiple of {size}, and no dp=")
    text = slurm.write(chosen, gpus_per_node=gpus_per_node or 8) if target == "slurm" else WRITERS[target](chosen)
    same = READERS[target](text, None) == chosen
    if output:
        output.write_text(text)
        note(f"written to {output}")
    if as_json:
        from shardwise.cli.present import layout_json

        print_json({"to": target, "layout": layout_json(chosen), "text": text, "reads_back": same})
    elif not output:
        print(text, end="")
    if not same:
        note(f"{target} has no setting for some of: " + ", ".join(_lost(chosen, READERS[target](text, None))))
    return OK if same else FINDING


def _target(to: str) -> str:
    target = {"megatron": "megatron-lm", "bridge": "megatron-bridge", "titan": "torchtitan"}.get(to.lower(), to.lower())
    if target not in WRITERS:
        near = get_close_matches(target, WRITERS, n=2, cutoff=0.4) or list(WRITERS)
        raise InputError(given=f"--to {to}", why="there is no such exporter", try_=" | ".join(near))
    return target


def _lost(before: object, after: object) -> list[str]:
    from dataclasses import fields

    return [field.name for field in fields(before) if getattr(before, field.name) != getattr(after, field.name)]  # type: ignore[arg-type]

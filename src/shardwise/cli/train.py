"""`shardwise train`: a recipe and overrides, judged first, then run on torchrun's ranks or on ones started here."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import FINDING, OK
from shardwise.cli import options as opt
from shardwise.cli.launch import call
from shardwise.cli.run import refused
from shardwise.errors import InputError, LayoutError

if TYPE_CHECKING:
    from shardwise.train.plan import RunPlan

RecipeName = Annotated[str, typer.Option("--recipe", help="name of a recipe (shardwise recipes lists them)", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", show_default=False, help="overrides with Megatron Bridge's keys, like train.train_iters=3"),
]


def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    nproc: Annotated[int | None, typer.Option("--nproc", help="ranks to start here [default: smallest world of the layout]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the last checkpoint in checkpoint.save, if there is one")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="judge the configuration and print it, start nothing")] = False,
    as_json: opt.Json = False,
) -> int:
    """Train RECIPE. The layout is judged before any process group starts: all findings at once, exit code 1.

    Not under torchrun, `--nproc` ranks are started on this machine.
    """
    from shardwise.recipes.pretrain import recipe as named
    from shardwise.spec.ranks import min_world
    from shardwise.train.overrides import apply
    from shardwise.train.plan import layout_of, plan

    config = apply(named(recipe), overrides or [])
    if resume:
        folders = config.checkpoint
        if folders.save is None or folders.load not in (None, folders.save):
            given = f"--resume, checkpoint.save={folders.save}, checkpoint.load={folders.load}"
            raise InputError(
                given=given, why="it continues from checkpoint.save and no other folder", try_="--resume checkpoint.save=FOLDER"
            )
        folders.load = folders.save
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched:
        if nproc is not None:
            raise InputError(given=f"--nproc {nproc}", why="the ranks are already started", try_="leave --nproc out under torchrun")
        world = int(os.environ["WORLD_SIZE"])
    else:
        world = nproc or min_world(layout_of(config, 1))
    try:
        chosen = plan(config, world)
    except LayoutError as error:
        if os.environ.get("RANK", "0") != "0":  # the first rank says it for all
            return FINDING
        return refused(error, as_json=as_json)
    if dry_run:
        _show(chosen, as_json)
        return OK
    if not launched:
        _fits_here(chosen, world)
    if launched or world == 1:
        from shardwise.train.loop import run

        return run(chosen)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m", "shardwise.train"]
    options = ["--recipe", recipe, *(["--resume"] if resume else [])]
    return call([*command, *options, *(overrides or [])])


def _fits_here(chosen: RunPlan, world: int) -> None:
    """Refuse to start ranks that this machine cannot hold: more than its GPUs, or on a CPU more than 8 or more state than memory."""
    import torch

    gpus = torch.cuda.device_count()
    if world > (gpus or 8):
        raise InputError(
            given=f"{chosen.layout_line}, {gpus} GPUs here" if gpus else f"{chosen.layout_line} on a CPU",
            why=f"at most {gpus or 8} ranks are started on this machine",
            try_="torchrun on enough nodes, smaller degrees, or shardwise verify, which scales the recipe down",
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    state = 16 * chosen.spec.total_params if chosen.spec else 0  # fp32 weights, gradients and two moments
    if not gpus and state > memory:
        raise InputError(
            given=f"{chosen.spec.total_params if chosen.spec else 0:,} parameters on a CPU",
            why=f"weights, gradients and moments take {state / 2**30:.0f} GiB, this machine has {memory / 2**30:.0f}",
            try_="a _tiny recipe (shardwise recipes tiny), or shardwise verify, which scales the recipe down",
        )


def _show(chosen: RunPlan, as_json: bool) -> None:
    from dataclasses import asdict

    from omegaconf import OmegaConf

    from shardwise.cli.render import print_findings, print_json
    from shardwise.spec import grammar

    settings = asdict(chosen.config)
    if as_json:
        findings = [finding.to_dict() for finding in chosen.findings]
        print_json(
            {
                "layout": grammar.words(chosen.layout),
                "parameters": chosen.spec.total_params if chosen.spec else None,
                "config": settings,
                "findings": findings,
            }
        )
        return
    print(OmegaConf.to_yaml(OmegaConf.create(settings)))
    print(chosen.layout_line)
    print_findings(chosen.findings)


def export_weights(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="a checkpoint folder")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="where the safetensors go")],
    as_json: opt.Json = False,
) -> int:
    """Write the weights of a checkpoint as Hugging Face safetensors."""
    import json
    from pathlib import Path

    from shardwise.train.dist_checkpoint import export, latest

    path = latest(Path(checkpoint))
    if path is None:
        raise InputError(given=checkpoint, why="there is no checkpoint", try_="the folder given as checkpoint.save")
    export(path, Path(folder), json.loads((path / "run.json").read_text())["model"])
    print(json.dumps({"written": folder}) if as_json else f"written to {folder}")
    return OK

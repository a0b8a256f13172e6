"""The command line. ``main`` imports only the module of the command that was asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# command: (module that defines it, its function, one line for the overview)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "plan": ("shardwise.cli.plan", "plan", "rank the layouts of a model on given GPUs"),
    "check": ("shardwise.cli.check", "check", "judge one layout: findings, memory, step time"),
    "min-gpus": ("shardwise.cli.min_gpus", "min_gpus", "smallest world of a layout, or of a model"),
    "diff": ("shardwise.cli.diff", "diff", "what changed between two configs, and what a log says about it"),
    "export": ("shardwise.cli.export", "export", "write a layout for Megatron-LM, Megatron Bridge, torchtitan or SLURM"),
    "validate": ("shardwise.cli.validate", "validate", "predict the runs of a table and report the error"),
    "train": ("shardwise.cli.train", "train", "train a recipe under a layout"),
    "verify": ("shardwise.cli.verify", "verify", "a recipe under a layout and in one process, compared"),
    "rehearse": ("shardwise.cli.rehearse", "rehearse", "the real training step on a fake cluster: memory and messages of every stage"),
    "export-weights": ("shardwise.cli.train", "export_weights", "write the weights of a checkpoint as Hugging Face safetensors"),
    "recipes": ("shardwise.cli.recipes", "recipes", "the recipes, and the keys of overrides"),
    "demo": ("shardwise.cli.demo", "demo", "plan, train two plain models on local CPU ranks, compare with one process"),
    "models": ("shardwise.cli.catalogs", "models", "the models the catalog knows"),
    "hardware": ("shardwise.cli.catalogs", "hardware", "the GPUs and links the catalog knows"),
}

OK, FINDING, BAD_USAGE = 0, 1, 2


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, _, text) in COMMANDS.items()]
    return "\n".join(
        [
            "Usage: shardwise COMMAND [OPTIONS] ...",
            "",
            "Plan, run and prove the split of a PyTorch model over devices.",
            "",
            "Commands:",
            *lines,
            "",
            "Every command takes --help and --json. Exit codes: 0 ok, 1 finding / does not fit / differs, 2 bad usage.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        sys.exit(OK if words else BAD_USAGE)
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"shardwise {version('shardwise')}")
        sys.exit(OK)
    name, arguments = words[0], words[1:]
    if name not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(name, COMMANDS, n=3, cutoff=0.4) or list(COMMANDS)
        print(f"given: command {name!r}\nwhy: there is no such command\ntry: shardwise {' | '.join(near)}", file=sys.stderr)
        sys.exit(BAD_USAGE)
    module, function, _ = COMMANDS[name]
    from importlib import import_module

    from shardwise.cli.run import run

    run(name, getattr(import_module(module), function), arguments)

"""`shardwise demo`: plan, then a small real run of both hearts on local CPU ranks, then the parity table."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli import FINDING, OK
from shardwise.cli.launch import call, started
from shardwise.cli.render import console
from shardwise.errors import InputError

RANKS = (1, 2, 3, 4)
TOLERANCE = {"float32": 1e-6, "float64": 1e-10}
# Saved bytes per rank may exceed an equal share by this factor: rows do not divide evenly and neighbours' rows are kept too.
SHARE = 1.15


def demo(
    steps: Annotated[int, typer.Option(help="training steps of each run")] = 5,
    dtype: Annotated[str, typer.Option(help="float32 or float64")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="print the results as JSON")] = False,
) -> int:
    """Plan a model on this machine, train two plain models split over 2, 3 and 4 local ranks, and compare with one process."""
    if dtype not in TOLERANCE:
        raise InputError(given=f"--dtype {dtype}", why="the demo knows float32 and float64", try_="--dtype float64")
    if steps < 1:
        raise InputError(given=f"--steps {steps}", why="at least one step is needed", try_="--steps 5")
    if not as_json:
        _plan()
    runs = [run for ranks in RANKS for run in _train(ranks, steps, dtype, quiet=as_json)]
    rows = [_compare(run, next(r for r in runs if r["model"] == run["model"] and r["ranks"] == 1)) for run in runs]
    passed = all(row["equal"] and row["memory_ok"] for row in rows)
    if as_json:
        print(json.dumps({"runs": rows, "passed": passed}, indent=2))
    else:
        _show(rows, dtype, passed)
    return OK if passed else FINDING


def _plan() -> None:
    """What the planner says about a model that does not fit one GPU."""
    command = [
        "plan",
        "--model",
        "llama-3.1-70b",
        "--gpus",
        "64",
        "--gpu",
        "h100-sxm",
        "--seq-len",
        "8192",
        "--global-batch",
        "512",
        "--top",
        "3",
    ]
    print("$ shardwise " + " ".join(command), flush=True)
    call([sys.executable, "-m", "shardwise", *command])


def _train(ranks: int, steps: int, dtype: str, *, quiet: bool) -> list[dict[str, Any]]:
    """Run both models on `ranks` local processes; their results."""
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.jsonl"
        command = [
            sys.executable,
            *launcher,
            "-m",
            "shardwise.recipes.elevation",
            "--steps",
            str(steps),
            "--dtype",
            dtype,
            "--out",
            str(out),
        ]
        if not quiet:
            print(
                f"\ntraining a UNet and a vision transformer for {steps} steps on {ranks} process{'es' if ranks > 1 else ''} ...",
                flush=True,
            )
        with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            _, errors = process.communicate()
        if process.returncode:
            raise InputError(
                given=f"the run on {ranks} ranks (exit code {process.returncode})",
                why=errors[-2000:] or "it printed nothing",
                try_=" ".join(command),
            )
        return [json.loads(line) for line in out.read_text().splitlines()]


def _compare(run: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    pairs = list(zip(run["losses"], whole["losses"], strict=True))
    difference = max(abs(a - b) / abs(b) for a, b in pairs)
    return {
        **run,
        "loss_difference": difference,
        "equal": difference <= TOLERANCE[run["dtype"]],
        "saved_share": run["saved_bytes"] / whole["saved_bytes"],
        "memory_ok": run["saved_bytes"] * run["ranks"] <= SHARE * whole["saved_bytes"],
    }


def _show(rows: list[dict[str, Any]], dtype: str, passed: bool) -> None:
    from rich.table import Table

    table = Table(title=f"one process against rows split over ranks, {dtype}, plain SGD")
    for name in ("model", "ranks", "first\nloss", "last\nloss", "differs\nby", "kept\nMiB", "share", "sent\nMiB", "s per\nstep"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["model"],
            str(row["ranks"]),
            f"{row['losses'][0]:.5f}",
            f"{row['losses'][-1]:.5f}",
            f"{row['loss_difference']:.0e}" + ("" if row["equal"] else "!"),
            f"{row['saved_bytes'] / 2**20:.1f}",
            f"{row['saved_share']:.2f}" + ("" if row["memory_ok"] else "!"),
            f"{row['sent_bytes'] / 2**20:.2f}",
            f"{row['seconds']:.2f}",
        )
    out = console()
    out.print(table)
    out.print("kept: for backward, on the fullest rank, parameters apart; sent: by a rank in one step; ! marks what exceeds the bound")
    out.print(
        f"losses agree to {TOLERANCE[dtype]:.0e} relative and each rank keeps at most {SHARE} / ranks of the bytes: "
        + ("[green]yes[/green]" if passed else "[red]no[/red]")
    )

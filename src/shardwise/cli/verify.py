"""`shardwise verify`: a recipe under a layout and in one process, compared."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from shardwise.cli import FINDING, OK
from shardwise.cli import options as opt
from shardwise.cli.launch import call
from shardwise.cli.train import Overrides, RecipeName
from shardwise.errors import InputError

REASON = "float32; sums are taken in another order when they are split over ranks"


def verify(
    recipe: RecipeName,
    overrides: Overrides = None,
    nproc: Annotated[int | None, typer.Option("--nproc", help="local ranks [default: smallest world of the layout]")] = None,
    steps: Annotated[int, typer.Option("--steps", help="training steps")] = 5,
    as_json: opt.Json = False,
) -> int:
    """Train RECIPE, scaled down to a CPU, under its layout and in one process; compare losses, gradients and weights.

    Exit code 1 when they differ by more than rounding. Layers, heads, experts and widths stay divisible as the layout needs.
    """
    from shardwise.recipes.pretrain import recipe as named
    from shardwise.spec.ranks import min_world
    from shardwise.train.overrides import apply
    from shardwise.train.plan import layout_of, plan
    from shardwise.train.scale import RANKS, scaled_down

    if steps < 1:
        raise InputError(given=f"--steps {steps}", why="at least one step is needed", try_="--steps 5")
    if nproc is not None and not 1 <= nproc <= RANKS:
        raise InputError(given=f"--nproc {nproc}", why=f"1 to {RANKS} local ranks are started", try_=f"--nproc {RANKS}")
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    given = int(os.environ["WORLD_SIZE"]) if launched else nproc
    config = scaled_down(apply(named(recipe), overrides or []), given)
    world = given or min_world(layout_of(config, 1))
    chosen = plan(config, world)
    if launched or world == 1:
        return _compare(chosen, steps, as_json)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m", "shardwise", "verify"]
    words = ["--recipe", recipe, "--steps", str(steps), *(["--json"] if as_json else []), *(overrides or [])]
    return call([*command, *words])


def _compare(chosen: object, steps: int, as_json: bool) -> int:
    import torch.distributed as dist

    from shardwise.mesh.process import DistributedManager
    from shardwise.train.data import open_dataset
    from shardwise.train.loop import balance_of
    from shardwise.train.model import transformers_config
    from shardwise.train.plan import RunPlan
    from shardwise.train.verify import Rules, compare, reference

    assert isinstance(chosen, RunPlan)
    DistributedManager.initialize()
    device = DistributedManager().device
    config, layout = chosen.config, chosen.layout
    model = transformers_config(chosen.hf_fields)
    o = config.optimizer
    rules = Rules(
        mbs=layout.mbs, lr=o.lr, decay=o.weight_decay, clip=o.clip_grad, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps,
        seed=config.rng.seed, balance=balance_of(config),
    )  # fmt: skip
    data = open_dataset(config, model.get_text_config().vocab_size)
    batches = [data.train(step * layout.gbs, layout.gbs, device) for step in range(steps)]
    expected = reference(model, batches, rules) if dist.get_rank() == 0 else None
    parity = compare(model, layout, batches, rules, expected)
    if dist.get_rank() == 0:
        _print(chosen.layout_line, parity, as_json)
    DistributedManager.cleanup()
    # one finding, one exit code: the launcher reports ranks that end with another one as failures
    return OK if parity.equal else FINDING


def _print(layout_line: str, parity: object, as_json: bool) -> None:
    from dataclasses import asdict

    from shardwise.cli.render import print_json, print_lines, print_table
    from shardwise.train.verify import TOLERANCE, Parity

    assert isinstance(parity, Parity)
    if as_json:
        print_json({"layout": layout_line, "equal": parity.equal, "tolerance": TOLERANCE, "reason": REASON, **asdict(parity)})
        return
    print(layout_line, flush=True)
    rows = [
        (step, f"{a:.6E}", f"{b:.6E}", f"{abs(a - b) / abs(b):.1e}")
        for step, (a, b) in enumerate(zip(parity.losses, parity.expected, strict=True), 1)
    ]
    print_table("loss per step", ["step", "layout", "one process", "relative difference"], rows, text=())
    print_table(
        f"largest relative difference (expected below {TOLERANCE:.0e}: {REASON})",
        ["of", "difference"],
        [
            ("loss", f"{parity.loss:.1e}"),
            ("gradient norm", f"{parity.norm:.1e}"),
            ("gradients of the first step", f"{parity.gradient:.1e}"),
            (f"weights after {len(parity.losses)} steps ({parity.worst})", f"{parity.weight:.1e}"),
        ],
    )
    where = f"; the first gradient that differs is that of {parity.first}" if parity.first else ""
    print_lines(["equal" if parity.equal else f"DIFFERS{where}"])

"""`shardwise plan` for a traced module: the ddp x domain split."""

from __future__ import annotations

import re
from typing import Any

from shardwise.cli import FINDING, OK
from shardwise.cli.inputs import read_cluster
from shardwise.cli.render import gib, print_json, print_lines, print_table, seconds
from shardwise.errors import InputError
from shardwise.planner.domain_plan import DomainPlan, plan_domain, smallest_domain
from shardwise.spec.model import GridModel


def plan_module(
    gpu: str,
    gpus: int | None,
    gpus_per_node: int | None,
    interconnect: str | None,
    gbs: int | None,
    parameters: float | None,
    activation_gib: float | None,
    grid: str | None,
    flops: float | None,
    spatial_params: bool,
    *,
    as_json: bool,
) -> int:
    """Print every split; exit code 1 when none fits."""
    needed = {"--gpus": gpus, "--global-batch": gbs, "--parameters": parameters, "--activation-gib": activation_gib, "--grid": grid}
    missing = [name for name, value in needed.items() if value is None]
    if missing or gpus is None or gbs is None or parameters is None or activation_gib is None or grid is None:
        raise InputError(
            given="plan of a traced module without " + ", ".join(missing),
            why="its size, saved activations, extents, GPUs and batch decide the split",
            try_="--parameters 31e6 --activation-gib 200 --grid 2048x2048 --gpus 8 --global-batch 8",
        )
    if not re.fullmatch(r"[1-9]\d{0,6}(x[1-9]\d{0,6}){0,4}", grid):
        raise InputError(given=f"--grid {grid}", why="it must be extents of at least 1 joined by x", try_="--grid 2048x2048")
    sizes = {"--parameters": (parameters, 1, 1e15), "--activation-gib": (activation_gib, 0, 1e9), "--flops": (flops or 0.0, 0, 1e24)}
    wrong = {name: given for name, given in sizes.items() if not given[1] <= given[0] <= given[2]}
    if wrong:
        raise InputError(
            given=" ".join(f"{name} {value:g}" for name, (value, _, _) in wrong.items()),
            why="sizes must not be negative, and finite",
            try_=", ".join(f"{name} from {least:g} to {most:g}" for name, (_, least, most) in wrong.items()),
        )
    model = GridModel(
        name="traced module",
        grid=tuple(int(extent) for extent in grid.split("x")),
        params=int(parameters),
        saved_bytes_per_sample=int(activation_gib * 2**30),
        flops_per_sample=flops or 0.0,
    )
    cluster = read_cluster(gpu, gpus, gpus_per_node=gpus_per_node, interconnect=interconnect)
    plans = plan_domain(model, cluster, gbs=gbs, spatial_params=spatial_params)
    least = smallest_domain(model, cluster, spatial_params=spatial_params)
    if as_json:
        print_json(
            {
                "fits": plans[0].fits,
                "smallest_domain": least.domain if least else None,
                "min_gpus": least.domain if least else None,
                "plans": [_json(plan) for plan in plans],
            }
        )
        return OK if plans[0].fits else FINDING
    rows = [
        (
            plan.ddp,
            plan.domain,
            plan.wrapper,
            gib(plan.allocated_gib),
            "yes" if plan.fits else "no",
            plan.accumulate,
            seconds(plan.seconds) if flops else "",
        )
        for plan in plans
    ]
    print_table("ddp x domain", ("ddp", "domain", "wrapper", "GiB", "fits", "samples each", "step"), rows, text=(2, 4))
    best = plans[0]
    terms = ", ".join(f"{name} {gib(value)}" for name, value in best.terms.items() if value >= 0.005)
    print_lines(
        [
            f"best: {best.ddp} x {best.domain}, wrapper {best.wrapper}: {best.why}",
            f"memory of the heaviest rank: {terms} GiB of {gib(best.capacity_gib)}",
            f"smallest domain that holds one sample: {least.domain if least else f'none up to {gpus}'}",
        ]
    )
    return OK if best.fits else FINDING


def _json(plan: DomainPlan) -> dict[str, Any]:
    return {
        "ddp": plan.ddp,
        "domain": plan.domain,
        "wrapper": plan.wrapper,
        "why": plan.why,
        "rows": list(plan.rows),
        "accumulate": plan.accumulate,
        "fits": plan.fits,
        "memory": {"allocated_gib": plan.allocated_gib, "capacity_gib": plan.capacity_gib, "terms": plan.terms},
        "step_time": {"seconds": plan.seconds},
    }

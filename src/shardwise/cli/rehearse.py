"""`shardwise rehearse`: the real training step of a recipe and layout on a fake cluster of any size."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from shardwise.cli import FINDING, OK
from shardwise.cli import options as opt
from shardwise.cli.inputs import counts_in_range, in_range, read_all, read_cluster
from shardwise.cli.render import gib, note, print_json, print_lines, print_table
from shardwise.cli.run import refused
from shardwise.cli.train import Overrides, RecipeName
from shardwise.errors import LayoutError

if TYPE_CHECKING:
    from shardwise.rehearse.compare import Comparison, Sent
    from shardwise.rehearse.step import RankRehearsal, Traffic
    from shardwise.train.plan import RunPlan

GIB = 2.0**30
NOTES = (
    "Bytes are those that tensors ask for at the highest point of a step after the first, with balanced routing: no allocator rounding, "
    "no workspace inside a kernel, no CUDA context. Terms are those of the forward and backward passes, which the planner predicts too.",
)


def rehearse(
    recipe: RecipeName,
    overrides: Overrides = None,
    gpus: opt.Gpus = None,
    gpu: opt.GpuType = "h100-sxm",
    as_json: opt.Json = False,
) -> int:
    """Run one training step of RECIPE on a fake cluster, without data: memory by category and messages of every pipeline rank.

    Modules, groups, schedule and optimizer are those that `shardwise train` runs, at full size. Exit code 1 when the layout is refused.
    """
    from shardwise.recipes.pretrain import recipe as named
    from shardwise.spec.ranks import min_world
    from shardwise.train.overrides import apply
    from shardwise.train.plan import layout_of, plan

    _, config, cluster = read_all(
        lambda: counts_in_range(gpus=gpus),
        lambda: apply(named(recipe), overrides or []),
        lambda: read_cluster(gpu, in_range("gpus", gpus) or 1, gpus_per_node=None, interconnect=None),
    )
    config.mixed_precision = config.mixed_precision or "bf16_mixed"  # what a GPU run takes
    world = gpus or min_world(layout_of(config, 1))
    cluster = replace(cluster, gpus=world)
    try:
        chosen = plan(config, world)
    except LayoutError as error:
        return refused(error, as_json=as_json)
    from shardwise.rehearse.compare import Comparer
    from shardwise.rehearse.step import rehearse as rehearse_all

    comparer = None if chosen.spec is None else Comparer(chosen, cluster)
    results: list[tuple[RankRehearsal, Comparison | None]] = []
    for found in rehearse_all(chosen):
        note(f"rank {found.rank} (pipeline rank {found.pp_rank}): {gib(found.peak.total / GIB)} GiB")
        results.append((found, None if comparer is None else comparer.compare(found)))
    if as_json:
        print_json(_json(chosen, results))
    else:
        _print(chosen, results)
    return OK if all(compared is None or compared.same_parameters for _, compared in results) else FINDING


def _json(chosen: RunPlan, results: list[tuple[RankRehearsal, Comparison | None]]) -> dict[str, Any]:
    from shardwise.cli.present import layout_json

    return {
        "layout": layout_json(chosen.layout),
        "seq_len": chosen.config.model.seq_length,
        "ranks": [
            {
                "rank": found.rank,
                "pp_rank": found.pp_rank,
                "layers": found.layers,
                "parameters": found.parameters,
                "expected_parameters": compared.parameters if compared else None,
                "microbatches_rehearsed": found.microbatches,
                "peak_gib": found.peak.total / GIB,
                "peaks": {
                    phase: {"total_gib": peak.total / GIB, **{name: size / GIB for name, size in peak.categories.items()}}
                    for phase, peak in found.peaks.items()
                },
                "terms": [
                    {"term": term.name, "rehearsed_gib": _in_gib(term.rehearsed), "predicted_gib": _in_gib(term.predicted)}
                    for term in (compared.terms if compared else ())
                ],
                "messages": [_message(each) for each in (compared.sent if compared else found.traffic)],
            }
            for found, compared in results
        ],
    }


def _message(each: Sent | Traffic) -> dict[str, Any]:
    fields = asdict(each)
    fields["predicted_bytes"] = fields.pop("predicted", None)
    return fields


def _in_gib(size: float | None) -> float | None:
    return None if size is None else size / GIB


def _print(chosen: RunPlan, results: list[tuple[RankRehearsal, Comparison | None]]) -> None:
    from shardwise.rehearse.step import PHASES

    print_lines([chosen.layout_line, ""])
    print_table(
        "Highest memory of each pipeline rank, GiB",
        ["rank", "pp", "layers", "parameters", "described", *PHASES],
        [
            (
                found.rank,
                found.pp_rank,
                found.layers,
                f"{found.parameters:,}",
                "-" if compared is None else f"{compared.parameters:,}",
                *(gib(found.peaks[phase].total / GIB) for phase in PHASES),
            )
            for found, compared in results
        ],
        text=(),
    )
    heaviest, compared = max(results, key=lambda each: each[0].pass_peak.total)
    title = f"Forward and backward of rank {heaviest.rank}, GiB"
    if compared is not None:
        rows = [(term.name, _cell(term.rehearsed), _cell(term.predicted)) for term in compared.terms]
        rows.append(("all", gib(heaviest.pass_peak.total / GIB), gib(compared.predicted / GIB)))
        print_table(title, ["term", "rehearsed", "predicted"], rows)
    else:
        print_table(title, ["term", "rehearsed"], [(name, _cell(size)) for name, size in heaviest.pass_peak.categories.items()])
    print_table(
        f"What rank {heaviest.rank} sends in a step",
        ["collective", "axis", "calls", "MiB", "predicted"],
        [
            (each.collective, each.axis, each.calls, _mib(each.bytes), _mib(getattr(each, "predicted", None)))
            for each in (compared.sent if compared else heaviest.traffic)
        ],
        text=(0, 1),
    )
    wrong = [found.rank for found, compared in results if compared is not None and not compared.same_parameters]
    if wrong:
        print_lines([f"differs: the description of the model has other parameters for ranks {', '.join(map(str, wrong))}"])
    print_lines(NOTES)


def _mib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f}"


def _cell(size: float | None) -> str:
    return "-" if size is None else gib(size / GIB)

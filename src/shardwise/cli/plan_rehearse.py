"""`shardwise plan --rehearse K`: the best layouts once more, by running their training step on a fake cluster."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.present import short
from shardwise.cli.render import gib, note, print_lines, print_table
from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from shardwise.planner.search import Plan
    from shardwise.rehearse.compare import Comparison
    from shardwise.spec.cluster import Cluster

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """A plan and the rehearsal of the rank that the planner takes for the heaviest, or why there is none."""

    plan: Plan
    comparison: Comparison | None
    why: str = ""


def config_fields(name: str) -> dict[str, Any]:
    """Fields of the `transformers` config of a catalog name or a config.json."""
    from shardwise.spec.catalog.models import find_model
    from shardwise.spec.catalog.tables import table
    from shardwise.train.model import trainable_fields

    key = find_model(name)
    if key is not None:
        return trainable_fields(table("models")[key]["config"])
    path = Path(name)
    return trainable_fields(json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8")))


def rehearse_plans(model: str, plans: list[Plan], cluster: Cluster, seq_len: int) -> list[Rehearsed]:
    from shardwise.rehearse.compare import Comparer
    from shardwise.rehearse.layouts import run_of
    from shardwise.rehearse.step import distinct_ranks, rehearse_rank

    fields, results = config_fields(model), []
    for plan in plans:
        try:
            run = run_of(fields, plan.layout, seq_len)
            note(f"rehearsing {short(plan.layout)} ...")
            found = rehearse_rank(run, distinct_ranks(run.layout)[plan.memory.stage])
            results.append(Rehearsed(plan=plan, comparison=Comparer(run, cluster).compare(found)))
        except ShardwiseError as error:
            results.append(Rehearsed(plan=plan, comparison=None, why=str(error)))
    return results


def as_json(each: Rehearsed) -> dict[str, Any]:
    if each.comparison is None:
        return {"why_not": each.why}
    found = each.comparison
    return {
        "rank": found.rank.rank,
        "pp_rank": found.rank.pp_rank,
        "peak_gib": found.rank.pass_peak.total / GIB,
        "predicted_gib": found.predicted / GIB,
        "terms": [asdict(term) for term in found.terms],
        "messages": [asdict(sent) for sent in found.sent],
    }


def print_rehearsed(results: list[Rehearsed]) -> None:
    rows = []
    for number, each in enumerate(results, 1):
        found = each.comparison
        memory = ("-", "-") if found is None else (gib(found.predicted / GIB), gib(found.rank.pass_peak.total / GIB))
        rows.append((number, short(each.plan.layout), gib(each.plan.memory.allocated_gib), *memory))
    head = ("#", "layout", "planned", "this runtime, predicted", "rehearsed")
    print_table("Forward and backward of the heaviest rank, GiB", head, rows, text=(1,), wrap=(1,))
    rows = [
        (number, sent.collective, sent.axis, *("-" if size is None else f"{size / 2**20:,.0f}" for size in (sent.predicted, sent.bytes)))
        for number, each in enumerate(results, 1)
        for sent in (each.comparison.sent if each.comparison else ())
    ]
    print_table("What that rank sends in a step, MiB", ("#", "collective", "axis", "predicted", "rehearsed"), rows, text=(1, 2))
    print_lines([f"plan {number} is not rehearsed: {each.why}" for number, each in enumerate(results, 1) if each.why])

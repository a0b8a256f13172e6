"""The model half of `shardwise min-gpus`: the smallest world, with its certificate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.cli import FINDING, OK
from shardwise.cli.judging import refuse_hopeless
from shardwise.cli.render import gib, note, print_json, print_lines, print_table

if TYPE_CHECKING:
    from shardwise.planner.certificate import Certificate
    from shardwise.spec.cluster import Cluster
    from shardwise.spec.layout import Layout
    from shardwise.spec.model import ModelSpec

LIMIT = 16384  # GPUs tried when no limit is given


def report(
    spec: ModelSpec,
    cluster: Cluster,
    seq_len: int,
    base: Layout,
    framework: str,
    *,
    limit: int | None,
    as_json: bool,
) -> int:
    """Find the smallest world of ``spec`` on GPUs like those of ``cluster`` and print it; exit code 1 when none up to the limit fits."""
    from shardwise.cli.judging import judge_of, stack_of
    from shardwise.cli.present import print_memory, short
    from shardwise.planner.certificate import certify

    refuse_hopeless(judge_of(spec, cluster, seq_len=seq_len, framework=framework)(base))
    certificate = certify(
        spec,
        lambda size: replace(cluster, gpus=size),
        base,
        seq_len=seq_len,
        framework=framework,
        stack=stack_of(framework),
        judge_of=lambda on: judge_of(spec, on, seq_len=seq_len, framework=framework),
        limit=limit or LIMIT,
        progress=None if as_json else lambda size: note(f"trying {size} GPUs ..."),
    )
    plan = certificate.plan
    if as_json:
        print_json(certificate_json(certificate))
        return OK if plan else FINDING
    print_lines([f"{spec.name} on {cluster.gpu.name}, sequence {seq_len}", *certificate_lines(certificate)])
    if plan:
        print_lines([f"layout: {short(plan.layout)}", ""])
        print_memory(plan.memory)
    rows = [(world.gpus, gib(world.least_gib), "yes" if world.fits else "no", world.constraint) for world in certificate.worlds[-12:]]
    title = "Least memory any layout needs (above one node: whole nodes)"
    print_table(title, ("GPUs", "GiB/GPU", "fits", "what binds"), rows, text=(2, 3), wrap=(3,))
    return OK if plan else FINDING


def certificate_json(certificate: Certificate) -> dict[str, Any]:
    from shardwise.cli.present import prediction_json

    plan = certificate.plan
    return {
        "min_gpus": certificate.min_gpus,
        "dp": plan.layout.dp if plan else None,
        "edp": plan.layout.edp if plan else None,
        "capacity_gib": certificate.capacity_gib,
        "plan": prediction_json(plan.layout, plan.memory, plan.time, plan.findings) if plan else None,
        "worlds": [
            {"gpus": world.gpus, "fits": world.fits, "least_gib": world.least_gib, "constraint": world.constraint}
            for world in certificate.worlds
        ],
    }


def certificate_lines(certificate: Certificate) -> list[str]:
    """Two sentences: the minimum, and why one fewer does not do."""
    below = [world for world in certificate.worlds if not world.fits]
    reason = ""
    if below:
        last = below[-1]
        reason = f"{last.gpus} do not: {last.least_gib:.1f} GiB needed of {certificate.capacity_gib:.1f} ({last.constraint})"
    if certificate.min_gpus is None:
        return [f"minimum GPUs: more than {certificate.worlds[-1].gpus}", reason]
    return [f"minimum GPUs: {certificate.min_gpus}", *([reason] if reason else [])]

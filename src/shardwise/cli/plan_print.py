"""What `shardwise plan` shows: tables, or one JSON object."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from shardwise.cli.inputs import read_cluster
from shardwise.cli.judging import judge_of, sizing, stack_of
from shardwise.cli.min_gpus_model import certificate_json, certificate_lines
from shardwise.cli.present import prediction_json, print_memory, print_time, short
from shardwise.cli.render import gib, note, print_findings, print_lines, print_table, seconds
from shardwise.errors import InputError
from shardwise.planner.certificate import certify
from shardwise.spec import grammar

if TYPE_CHECKING:
    from shardwise.planner.certificate import Certificate
    from shardwise.planner.search import Plan, SearchResult
    from shardwise.planner.space import Space
    from shardwise.planner.why_not import WhyNot
    from shardwise.spec.cluster import Cluster
    from shardwise.spec.layout import Layout
    from shardwise.spec.model import ModelSpec


def fixed(space: Space, words: tuple[str, ...]) -> Space:
    """The space with the fields that layout words name held to their value."""
    values = grammar.read_values(words)
    if "dp" in values:
        raise InputError(given=f"dp={values['dp']}", why="the data parallel size follows from the GPUs and the other degrees", try_="no dp")
    names = {field.name for field in fields(space)}
    return replace(space, **{name: (value,) for name, value in values.items() if name in names})


def certificate_of(
    spec: ModelSpec,
    cluster: Cluster,
    base: Layout,
    seq_len: int,
    rules: str,
    gpu: str,
    gpus_per_node: int | None,
    interconnect: str | None,
    *,
    quiet: bool,
) -> Certificate:
    return certify(
        spec,
        lambda size: read_cluster(gpu, size, gpus_per_node=gpus_per_node, interconnect=interconnect),
        base,
        seq_len=seq_len,
        framework=rules,
        stack=stack_of(rules),
        judge_of=lambda on: judge_of(spec, on, seq_len=seq_len, framework=rules),
        limit=cluster.gpus,
        progress=None if quiet else lambda size: note(f"minimum GPUs: trying {size} ..."),
    )


def as_json(
    spec: ModelSpec,
    cluster: Cluster,
    seq_len: int,
    rules: str,
    result: SearchResult,
    certificate: Certificate,
    reason: WhyNot | None,
    fewer: list[Plan],
) -> dict[str, Any]:
    def entry(plan: Plan) -> dict[str, Any]:
        return prediction_json(plan.layout, plan.memory, plan.time, plan.findings)

    best = result.plans[0] if result.plans else None
    return {
        "model": spec.name,
        "parameters": spec.total_params,
        "gpus": cluster.gpus,
        "gpu": cluster.gpu.name,
        "seq_len": seq_len,
        "framework": rules,
        "fits": bool(result.plans),
        "plans": [entry(plan) for plan in result.plans],
        "pareto": [entry(plan) for plan in result.front],
        "fewer_gpus": [entry(plan) for plan in fewer],
        "nearest": entry(result.nearest) if result.nearest else None,
        "why_not": {**prediction_json(reason.layout, reason.memory, reason.time, reason.findings), "reasons": list(reason.reasons)}
        if reason
        else None,
        "min_gpus": certificate.min_gpus,
        "certificate": certificate_json(certificate),
        "sizing": [finding.to_dict() for finding in sizing(spec, cluster, seq_len, best.layout if best else None)],
        "considered": result.considered,
        "evaluated": result.evaluated,
        "rejected": [{"reason": reason, "layouts": count} for reason, count in result.rejected.most_common()],
    }


def print_plan(
    spec: ModelSpec,
    cluster: Cluster,
    seq_len: int,
    rules: str,
    base: Layout,
    result: SearchResult,
    certificate: Certificate,
    reason: WhyNot | None,
    fewer: list[Plan],
) -> None:
    print_lines(
        [
            f"{spec.name}: {spec.total_params / 1e9:.1f} B parameters, {spec.active_params / 1e9:.1f} B active",
            f"{cluster.gpus} x {cluster.gpu.name} ({cluster.nodes} nodes), sequence {seq_len}, global batch {base.gbs}, {base.precision}, "
            f"rules of {rules}",
            "",
        ]
    )
    if result.plans:
        first = result.plans[0].time.seconds
        rows = [
            (
                number,
                short(plan.layout),
                gib(plan.memory.needed_gib),
                seconds(plan.time.seconds),
                f"{plan.time.tokens_per_s_per_gpu:,.0f}",
                f"+{plan.time.seconds / first - 1:.1%}" if number > 1 else "",
            )
            for number, plan in enumerate(result.plans, 1)
        ]
        print_table("Plans, fastest first", ("#", "layout", "GiB", "step", "tok/s/GPU", "slower"), rows, text=(1,), wrap=(1,))
        best = result.plans[0]
        print_lines([f"best: {' '.join(grammar.words(best.layout))}", ""])
        print_memory(best.memory)
        print_time(best.time)
        front = [plan for plan in result.front if plan not in result.plans]
        if front:
            rows = [(short(plan.layout), gib(plan.memory.needed_gib), seconds(plan.time.seconds)) for plan in front]
            print_table("Less memory, slower (Pareto front)", ("layout", "GiB", "step"), rows, wrap=(0,))
        rows = [
            (
                plan.layout.world,
                short(plan.layout),
                gib(plan.memory.needed_gib),
                seconds(plan.time.seconds),
                f"{plan.time.tokens_per_s_per_gpu:,.0f}",
            )
            for plan in (best, *fewer)
        ]
        if fewer:
            print_table("Fewer GPUs", ("GPUs", "layout", "GiB", "step", "tok/s/GPU"), rows, text=(1,), wrap=(1,))
        print_findings(best.findings)
    else:
        print_lines(["no layout fits"])
        if result.nearest:
            need = result.nearest.memory
            print_lines([f"least memory: {short(result.nearest.layout)}: {need.needed_gib:.1f} GiB of {need.capacity_gib:.1f}", ""])
            print_memory(need)

    print_lines([*certificate_lines(certificate), ""])
    print_findings(sizing(spec, cluster, seq_len, result.plans[0].layout if result.plans else None))
    if reason:
        print_lines(
            [f"why not {short(reason.layout)}:", *(f"- {text}" for text in reason.reasons or ("it is as good as the best plan",)), ""]
        )
    rejected = [(f"{count:,}", reason) for reason, count in result.rejected.most_common(8)]
    title = f"Not chosen, of {result.considered:,} layouts ({result.evaluated:,} evaluated in full)"
    print_table(title, ("layouts", "why"), rejected, text=(1,), wrap=(1,))

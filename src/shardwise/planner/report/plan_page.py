"""The HTML report of a search, and of one layout."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.errors import Finding
from shardwise.planner.certificate import Certificate
from shardwise.planner.memory import GIB, MemoryEstimate
from shardwise.planner.report.page import heading, page, paragraph, table
from shardwise.planner.report.svg import Bar, Point, scatter, stacked_bars, timeline
from shardwise.planner.report.trace import shortened, spans
from shardwise.planner.search import Plan, SearchResult
from shardwise.planner.step_time import StepTimeEstimate
from shardwise.spec import grammar
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec

_STAGES = 16  # bars drawn for the stages of a long pipeline: the first, the last and the heaviest ones


def plan_page(model: ModelSpec, cluster: Cluster, seq_len: int, result: SearchResult, certificate: Certificate | None = None) -> str:
    """Ranking, memory and time of the best plans, Pareto front, timeline, minimum GPUs, what was rejected."""
    blocks = [paragraph(f"{result.considered:,} layouts considered, {result.evaluated:,} evaluated in full.")]
    plans = result.plans or ([result.nearest] if result.nearest else [])
    if not result.plans:
        blocks.append(paragraph("No layout fits. Below is the one with the least memory.", "bad"))
    if plans:
        blocks += [heading("Plans"), _ranking(plans), heading("Where the step goes"), _time_bars(plans)]
    everything = [*result.plans, *(plan for plan in result.front if plan not in result.plans)]
    if len(everything) > 1:
        points = [
            Point(label=" ".join(grammar.words(plan.layout)), x=plan.time.seconds, y=plan.memory.needed_gib, marked=plan in result.front)
            for plan in everything
        ]
        blocks += [heading("Time against memory"), scatter(points, x_title="step, s", y_title="needed, GiB", title="Pareto front")]
    if plans:
        blocks += _details(plans[0])
    if certificate:
        blocks += [heading("Minimum GPUs"), _certificate(certificate)]
    if result.rejected:
        rows = [(reason, f"{count:,}") for reason, count in result.rejected.most_common()]
        blocks += [heading("Not chosen"), table(("why", "layouts"), rows)]
    return page(f"Plan for {model.name}", _subtitle(model, cluster, seq_len), blocks)


def layout_page(model: ModelSpec, cluster: Cluster, seq_len: int, plan: Plan) -> str:
    """One layout: findings, memory, time, timeline."""
    return page(f"{model.name}: {' '.join(grammar.words(plan.layout))}", _subtitle(model, cluster, seq_len), _details(plan))


def _subtitle(model: ModelSpec, cluster: Cluster, seq_len: int) -> str:
    return f"{model.total_params / 1e9:.1f} B parameters, {cluster.gpus} x {cluster.gpu.name}, sequence {seq_len}"


def _ranking(plans: Sequence[Plan]) -> str:
    rows = [
        (
            " ".join(grammar.words(plan.layout)),
            f"{plan.memory.needed_gib:.1f}",
            f"{plan.time.seconds:.3g}",
            f"{plan.time.tokens_per_s_per_gpu:,.0f}",
            f"{plan.time.mfu:.1%}",
        )
        for plan in plans
    ]
    return table(("layout", "GiB needed", "step, s", "tokens/s/GPU", "MFU"), rows)


def _time_bars(plans: Sequence[Plan]) -> str:
    bars = [Bar(label=f"plan {i}", parts=_parts(plan.time)) for i, plan in enumerate(plans, 1)]
    return stacked_bars(bars, unit="s", title="step time by term")


def _parts(time: StepTimeEstimate) -> tuple[tuple[str, float], ...]:
    return tuple((name.replace("_", " "), value) for name, value in time.terms.items())


def _details(plan: Plan) -> list[str]:
    memory, layout = plan.memory, plan.layout
    blocks = [heading("Memory by pipeline rank"), _memory_bars(memory)]
    if layout.pp == 1:
        blocks += [heading("Step time"), stacked_bars([Bar(label="step", parts=_parts(plan.time))], unit="s", title="step time by term")]
    else:
        blocks += _timeline(layout, plan.time)
    if plan.findings:
        blocks += [heading("Findings"), _findings(plan.findings)]
    return blocks


def _memory_bars(memory: MemoryEstimate) -> str:
    ranks = list(range(len(memory.stages)))
    if len(ranks) > _STAGES:
        heavy = sorted(ranks, key=lambda rank: -sum(memory.stages[rank].values()))[: _STAGES - 2]
        ranks = sorted({0, ranks[-1], *heavy})
    bars = [
        Bar(label=f"rank {rank}", parts=tuple((name.replace("_", " "), value / GIB) for name, value in memory.stages[rank].items()))
        for rank in ranks
    ]
    return stacked_bars(bars, unit="GiB", title="allocated memory by term", limit=("GPU", memory.capacity_gib))


def _timeline(layout: Layout, time: StepTimeEstimate) -> list[str]:
    shown = shortened(layout)
    text = f"{layout.microbatches} micro batches"
    if shown.microbatches != layout.microbatches:
        text += f", drawn with {shown.microbatches}"
    return [heading("Pipeline"), paragraph(text, "soft"), timeline(spans(shown, time), layout.pp, title="schedule", row_label="rank")]


def _findings(findings: Sequence[Finding]) -> str:
    rows = [(finding.severity, finding.rule, finding.given, finding.why, finding.try_, finding.source) for finding in findings]
    return table(("", "rule", "given", "why", "try", "source"), rows, text_columns=range(6))


def _certificate(certificate: Certificate) -> str:
    rows = [(world.gpus, f"{world.least_gib:.1f}", "yes" if world.fits else "no", world.constraint) for world in certificate.worlds]
    return table(("GPUs", "least GiB per GPU", "fits", "what binds"), rows, text_columns=(3,))

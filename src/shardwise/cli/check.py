"""`shardwise check`: everything about one layout at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwise.cli import FINDING, OK
from shardwise.cli import options as opt
from shardwise.cli.inputs import (
    can_write,
    counts_in_range,
    follow_model,
    framework_name,
    framework_word,
    in_range,
    read_all,
    read_cluster,
    read_layout,
    read_model,
    read_source,
)
from shardwise.cli.render import note, print_findings, print_json, print_lines
from shardwise.errors import InputError, LayoutError
from shardwise.spec import grammar

if TYPE_CHECKING:
    from shardwise.errors import Finding
    from shardwise.planner.memory import MemoryEstimate
    from shardwise.planner.step_time import StepTimeEstimate
    from shardwise.spec.cluster import Cluster
    from shardwise.spec.layout import Layout
    from shardwise.spec.model import ModelSpec

MOST_STAGES = 1 << 14  # more pipeline stages than any model has layers are not laid out


def check(
    layout: opt.Words = None,
    model: opt.Model = None,
    gpus: opt.Gpus = None,
    gpu: opt.GpuType = "h100-sxm",
    gpus_per_node: opt.PerNode = None,
    interconnect: opt.Interconnect = None,
    seq_len: opt.SeqLen = 4096,
    global_batch: opt.GlobalBatch = None,
    precision: opt.Precision = None,
    framework: opt.Framework = "bridge",
    html: opt.Html = None,
    trace: opt.Trace = None,
    as_json: opt.Json = False,
) -> int:
    """Judge LAYOUT: all findings at once, memory of the heaviest rank and step time.

    Exit code 1 when a rule refuses the layout or it does not fit.
    """
    if not layout:
        raise InputError(
            given="check without LAYOUT", why="there is nothing to judge", try_="words like tp=4 pp=2 mbs=1 gbs=512, or a file"
        )
    source = read_source(layout, world=in_range("gpus", gpus), options=True)
    settings = source.settings
    world = in_range("gpus", gpus) or settings.get("gpus")
    per_node = in_range("gpus_per_node", gpus_per_node) or settings.get("gpus_per_node")
    kind, network = settings.get("gpu", gpu), settings.get("interconnect") if interconnect is None else interconnect
    name, samples = settings.get("framework", framework), in_range("global_batch", global_batch)
    _, _, rules, chosen, spec, cluster = read_all(
        lambda: counts_in_range(gpus=gpus, gpus_per_node=gpus_per_node, seq_len=seq_len, global_batch=global_batch),
        lambda: can_write(html=html, trace=trace),
        lambda: framework_name(name),
        lambda: read_layout(source, world=world, gbs=samples, precision=precision, framework=framework_word(name)),
        lambda: _model(model, settings),
        lambda: read_cluster(kind, world or 1, gpus_per_node=per_node, interconnect=network),
    )
    seq_len = settings.get("seq_len", seq_len)
    chosen = follow_model(chosen, source, spec)
    if world is None:
        cluster = read_cluster(kind, chosen.world, gpus_per_node=per_node, interconnect=network)
    findings, memory, time = judge_layout(spec, cluster, chosen, seq_len=seq_len, framework=rules, options=source.options)
    for path, what in ((html, "report"), (trace, "trace")):
        if path and memory and time:
            path.write_text(_document(what, spec, cluster, seq_len, chosen, memory, time, findings))
            note(f"{what} written to {path}")
    bad = any(finding.severity == "error" for finding in findings) or not (memory and memory.fits)
    if as_json:
        print_json(_json(spec, cluster, seq_len, rules, chosen, findings, memory, time))
    else:
        _print(spec, cluster, seq_len, rules, chosen, findings, memory, time)
    return FINDING if bad else OK


def _model(name: str | None, settings: Mapping[str, Any]) -> ModelSpec:
    spec = read_model(name, settings)
    if spec is None:
        raise InputError(given="check without --model", why="heads, layers and memory depend on it", try_="--model llama-3.1-70b")
    return spec


def judge_layout(
    spec: ModelSpec, cluster: Cluster, layout: Layout, *, seq_len: int, framework: str, options: Mapping[str, Any] | None = None
) -> tuple[tuple[Finding, ...], MemoryEstimate | None, StepTimeEstimate | None]:
    """Findings, and the predictions where the layout can be laid out at all."""
    from shardwise.cli.judging import judge_of, stack_of
    from shardwise.planner.estimator import Estimator
    from shardwise.planner.stage_advice import stage_advice

    findings = tuple(judge_of(spec, cluster, seq_len=seq_len, framework=framework, options=options)(layout))
    estimator = Estimator(spec, cluster, seq_len=seq_len, stack=stack_of(framework))
    if layout.stages > MOST_STAGES or any(finding.rule == "W4" for finding in findings):
        return findings, None, None
    try:
        return (*findings, *stage_advice(spec, layout)), estimator.memory(layout), estimator.step_time(layout)
    except LayoutError as error:
        seen = {(finding.rule, finding.given) for finding in findings}
        return (*findings, *(finding for finding in error.findings if (finding.rule, finding.given) not in seen)), None, None


def _json(
    spec: ModelSpec,
    cluster: Cluster,
    seq_len: int,
    rules: str,
    layout: Layout,
    findings: tuple[Finding, ...],
    memory: MemoryEstimate | None,
    time: StepTimeEstimate | None,
) -> dict[str, Any]:
    from shardwise.cli.present import prediction_json
    from shardwise.planner.stage_advice import stage_load

    legal = not any(finding.severity == "error" for finding in findings)
    answer = prediction_json(layout, memory, time, findings)
    answer["legal"] = legal
    load = stage_load(spec, layout) if memory else None
    answer["stages"] = {"layers": load.layers, "parameters": load.parameters} if load else None
    return {"model": spec.name, "gpus": cluster.gpus, "gpu": cluster.gpu.name, "seq_len": seq_len, "framework": rules, **answer}


def _print(
    spec: ModelSpec,
    cluster: Cluster,
    seq_len: int,
    rules: str,
    layout: Layout,
    findings: tuple[Finding, ...],
    memory: MemoryEstimate | None,
    time: StepTimeEstimate | None,
) -> None:
    from shardwise.cli.present import print_memory, print_time
    from shardwise.planner.stage_advice import stage_load

    errors = sum(finding.severity == "error" for finding in findings)
    verdict = f"refused: {errors} error(s)" if errors else "legal"
    if memory:
        need = f"{memory.needed_gib:.1f} GiB needed of {memory.capacity_gib:.1f}"
        verdict += f", {'fits' if memory.fits else 'does not fit'} ({need})"
    print_lines(
        [
            f"{spec.name} on {cluster.gpus} x {cluster.gpu.name}, sequence {seq_len}, rules of {rules}",
            " ".join(grammar.words(layout)),
            f"DP {layout.dp}, expert DP {layout.edp}, {layout.microbatches} micro batches",
            verdict,
            "",
        ]
    )
    print_findings(findings)
    if memory:
        if layout.pp > 1:
            print_lines([f"layers by pipeline rank: {list(stage_load(spec, layout).layers)}", ""])
        print_memory(memory)
    if time:
        print_time(time)


def _document(
    what: str,
    spec: ModelSpec,
    cluster: Cluster,
    seq_len: int,
    layout: Layout,
    memory: MemoryEstimate,
    time: StepTimeEstimate,
    findings: tuple[Finding, ...],
) -> str:
    if what == "trace":
        from shardwise.planner.report.trace import chrome_trace

        return chrome_trace(layout, time)
    from shardwise.planner.report.plan_page import layout_page
    from shardwise.planner.search import Plan

    return layout_page(spec, cluster, seq_len, Plan(layout=layout, memory=memory, time=time, findings=findings))

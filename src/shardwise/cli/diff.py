"""`shardwise diff`: what changed between two configs, what it costs, and what a log says about it."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli import FINDING, OK
from shardwise.cli import options as opt
from shardwise.cli.inputs import (
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
from shardwise.cli.render import print_json, print_lines, print_table, seconds
from shardwise.errors import LayoutError
from shardwise.planner.diff import COMMUNICATION, Delta, changes, memory_deltas, time_deltas

if TYPE_CHECKING:
    from shardwise.cli.inputs import Source
    from shardwise.planner.estimator import Estimator
    from shardwise.planner.logs import TrainingLog
    from shardwise.planner.memory import MemoryEstimate
    from shardwise.planner.search import Judge
    from shardwise.planner.step_time import StepTimeEstimate
    from shardwise.planner.symptoms import Cause
    from shardwise.spec.layout import Layout

ConfigA = Annotated[str, typer.Argument(metavar="A", help='a file, or quoted words: "tp=4 pp=2"')]
ConfigB = Annotated[str, typer.Argument(metavar="B", help="the config to compare with; the log is of this one")]
Log = Annotated[Path | None, typer.Option("--log", help="training log: CUDA out-of-memory text, iteration lines", show_default=False)]


def diff(
    a: ConfigA,
    b: ConfigB,
    log: Log = None,
    model: opt.Model = None,
    gpus: opt.Gpus = None,
    gpu: opt.GpuType = "h100-sxm",
    gpus_per_node: opt.PerNode = None,
    interconnect: opt.Interconnect = None,
    seq_len: opt.SeqLen = 4096,
    global_batch: opt.GlobalBatch = None,
    framework: opt.Framework = "bridge",
    as_json: opt.Json = False,
) -> int:
    """Compare two configs: fields, and with --model the memory, communication and time they lead to.

    With --log: the likely causes of a failure or slowdown, and the cheapest remedies in order. Exit code 1 when they differ.
    """
    from shardwise.planner.logs import read_log

    sources = [read_source(_words(config), world=in_range("gpus", gpus)) for config in (a, b)]
    settings = sources[0].settings | sources[1].settings
    name, samples = settings.get("framework", framework), in_range("global_batch", global_batch)
    kind, network = settings.get("gpu", gpu), settings.get("interconnect") if interconnect is None else interconnect
    per_node = in_range("gpus_per_node", gpus_per_node) or settings.get("gpus_per_node")
    seq_len = settings.get("seq_len", seq_len)

    def read(source: Source) -> Layout:
        world = in_range("gpus", gpus) or source.settings.get("gpus")
        return read_layout(source, world=world, gbs=samples, precision=None, framework=framework_word(name))

    _, rules, record, before, after, spec, _ = read_all(
        lambda: counts_in_range(gpus=gpus, gpus_per_node=gpus_per_node, seq_len=seq_len, global_batch=global_batch),
        lambda: framework_name(name),
        lambda: read_log(log) if log else None,
        lambda: read(sources[0]),
        lambda: read(sources[1]),
        lambda: read_model(model, settings),
        lambda: read_cluster(kind, 1, gpus_per_node=per_node, interconnect=network),
    )
    before, after = layouts = [follow_model(layout, source, spec) for layout, source in zip((before, after), sources)]
    changed = changes(before, after)
    answer: dict[str, Any] = {"changes": [vars(change) for change in changed]}
    estimators: list[Estimator] = []
    judge: Judge | None = None
    if spec:
        from shardwise.cli.judging import judge_of, stack_of
        from shardwise.planner.estimator import Estimator

        for layout in layouts:
            cluster = read_cluster(kind, gpus or layout.world, gpus_per_node=per_node, interconnect=network)
            estimators.append(Estimator(spec, cluster, seq_len=seq_len, stack=stack_of(rules)))
        judge = judge_of(spec, estimators[1].cluster, seq_len=seq_len, framework=rules)
    predicted = [_predict(estimator, layout) for estimator, layout in zip(estimators, layouts)]
    pair = predicted if len(predicted) == 2 and all(each is not None for each in predicted) else []
    answer |= _numbers(pair, layouts, seq_len)
    causes = _causes(before, after, record, estimators, pair, judge)
    answer["causes"] = [_cause_json(cause) for cause in causes]
    if record:
        answer["log"] = {"out_of_memory": [vars(fault) for fault in record.out_of_memory], "step_seconds": record.step_seconds}
        answer["log"]["iterations"] = len(record.iterations)
    if as_json:
        print_json(answer)
    else:
        _print(answer, pair, layouts, seq_len)
        if record:
            _print_log(record, pair)
        _print_causes(causes)
    return FINDING if changed or (record and record.out_of_memory) else OK


def _words(config: str) -> list[str]:
    return [config] if "=" not in config or not config.strip() else config.split()


def _predict(estimator: Estimator, layout: Layout) -> tuple[MemoryEstimate, StepTimeEstimate] | None:
    try:
        return estimator.memory(layout), estimator.step_time(layout)
    except LayoutError:
        return None


def _causes(before: Layout, after: Layout, record: Any, estimators: list[Estimator], pair: list[Any], judge: Judge | None) -> list[Cause]:
    from shardwise.planner.symptoms import Evidence, diagnose

    evidence = Evidence(
        layout=after,
        before=before,
        log=record,
        estimator=estimators[1] if pair else None,
        memory=pair[1][0] if pair else None,
    )
    return diagnose(evidence, judge)


def _numbers(pair: list[Any], layouts: list[Layout], seq_len: int) -> dict[str, Any]:
    if not pair:
        return {"memory": None, "communication": None, "step_time": None}
    (memory_a, time_a), (memory_b, time_b) = pair
    times = _times(pair, layouts, seq_len)
    return {
        "memory": {
            "before_gib": memory_a.allocated_gib,
            "after_gib": memory_b.allocated_gib,
            "fits": [memory_a.fits, memory_b.fits],
            "terms": [_delta_json(delta) for delta in memory_deltas(memory_a, memory_b)],
        },
        "communication": {"terms": [_delta_json(delta) for delta in times if delta.name in COMMUNICATION]},
        "step_time": {
            "before_seconds": time_a.seconds,
            "after_seconds": time_b.seconds,
            "before_tokens_per_s_per_gpu": time_a.tokens_per_s_per_gpu,
            "after_tokens_per_s_per_gpu": time_b.tokens_per_s_per_gpu,
            "unit": "seconds per million tokens",
            "terms": [_delta_json(delta) for delta in times],
        },
    }


def _times(pair: list[Any], layouts: list[Layout], seq_len: int) -> list[Delta]:
    tokens = (float(layouts[0].gbs * seq_len), float(layouts[1].gbs * seq_len))
    return time_deltas(pair[0][1], pair[1][1], tokens=tokens)


def _delta_json(delta: Delta) -> dict[str, Any]:
    return {"term": delta.name, "before": delta.before, "after": delta.after, "change": delta.change}


def _cause_json(cause: Cause) -> dict[str, Any]:
    from shardwise.spec import grammar

    return {
        "symptom": cause.symptom,
        "cause": cause.cause,
        "score": cause.score,
        "evidence": cause.evidence,
        "remedies": [
            {
                "text": cure.text,
                "layout": " ".join(grammar.words(cure.layout)) if cure.layout else None,
                "saves_gib": cure.saves_gib,
                "costs": cure.costs,
                "fits": cure.fits,
            }
            for cure in cause.cures
        ],
    }


def _print(answer: dict[str, Any], pair: list[Any], layouts: list[Layout], seq_len: int) -> None:
    rows = [
        (change["name"] + (" (follows)" if change["derived"] else ""), change["before"], change["after"]) for change in answer["changes"]
    ]
    if rows:
        print_table("Changed", ("field", "A", "B"), rows, text=(0, 1, 2), wrap=(1, 2))
    else:
        print_lines(["the two layouts are the same"])
    if pair:
        (memory_a, time_a), (memory_b, time_b) = pair
        lines = [
            (delta.name.replace("_", " "), f"{delta.before:.2f}", f"{delta.after:.2f}", f"{delta.change:+.2f}")
            for delta in memory_deltas(memory_a, memory_b)
            if abs(delta.before) + abs(delta.after) > 0.01
        ]
        lines.append(("allocated", f"{memory_a.allocated_gib:.2f}", f"{memory_b.allocated_gib:.2f}"))
        lines[-1] += (f"{memory_b.allocated_gib - memory_a.allocated_gib:+.2f}",)
        print_table("Memory of the heaviest rank, GiB", ("term", "A", "B", "change"), lines)
        lines = [
            (delta.name.replace("_", " "), seconds(delta.before), seconds(delta.after), f"{delta.change * 1000:+.1f} ms")
            for delta in _times(pair, layouts, seq_len)
        ]
        print_table("Time per million tokens", ("term", "A", "B", "change"), lines)
        faster = time_b.tokens_per_s_per_gpu / time_a.tokens_per_s_per_gpu - 1
        print_lines(
            [
                f"step {seconds(time_a.seconds)} -> {seconds(time_b.seconds)}; tokens/s/GPU {time_a.tokens_per_s_per_gpu:,.0f} -> "
                f"{time_b.tokens_per_s_per_gpu:,.0f} ({faster:+.1%})",
                "",
            ]
        )


def _print_log(log: TrainingLog, pair: list[Any]) -> None:
    """What was read from the log, beside what is predicted for B."""
    lines = []
    if log.step_seconds is not None:
        beside = f"; B is predicted at {seconds(pair[1][1].seconds)} ({pair[1][1].seconds / log.step_seconds - 1:+.0%})" if pair else ""
        lines.append(f"{len(log.iterations)} iteration line(s), {seconds(log.step_seconds)} per step{beside}")
    elif log.iterations:
        lines.append(f"{len(log.iterations)} iteration line(s), without step times")
    lost = next((step.number for step in log.iterations if step.loss is not None and not isfinite(step.loss)), None)
    if lost is not None:
        lines.append(f"the loss is no number from iteration {lost} on")
    if log.memory:
        heaviest = max(log.memory, key=lambda line: line.allocated_gib)
        beside = f"; B is predicted at {pair[1][0].allocated_gib:.1f} GiB on its heaviest rank" if pair else ""
        lines.append(f"peak of rank {heaviest.rank}: {heaviest.allocated_gib:.1f} GiB allocated{beside}")
    for fault in log.out_of_memory[:1]:
        sizes = (
            ("asked for", fault.tried_gib), ("allocated", fault.allocated_gib), ("reserved and unused", fault.unallocated_gib),
            ("free", fault.free_gib), ("on the device", fault.capacity_gib),
        )  # fmt: skip
        told = ", ".join(f"{size:.2f} GiB {name}" for name, size in sizes if size is not None)
        ranks = sorted({other.rank for other in log.out_of_memory if other.rank is not None})
        where = f" on rank(s) {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}" if ranks else ""
        lines.append(f"{len(log.out_of_memory)} out-of-memory text(s){where}" + (f"; the first: {told}" if told else ""))
    print_lines([f"log: {line}" for line in lines] + [""])


def _print_causes(causes: list[Cause]) -> None:
    for number, cause in enumerate(causes, 1):
        print_lines([f"{number}. {cause.cause}: {cause.symptom}", f"   {cause.evidence}"])
        for cure in cause.cures:
            effect = ""
            if cure.saves_gib is not None and cure.costs is not None:
                verdict = "fits" if cure.fits else "does not fit"
                effect = f" ({-cure.saves_gib:+.1f} GiB, {cure.costs:+.1%} step time, {verdict})"
            print_lines([f"   - {cure.text}{effect}"])

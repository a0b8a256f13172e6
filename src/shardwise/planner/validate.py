"""Predictions against published runs: per row, and in summary by source, GPU type and architecture.

Errors are signed and relative, ``predicted / measured - 1``.  Memory is compared in the meaning of the source: allocated or reserved
peak of the heaviest rank, allocated peak of the last pipeline stage, or what the device tool shows.  Runs whose source says that
their step time is not meaningful (continuous-integration models) are predicted but stay out of the step-time summary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardwise.errors import ShardwiseError
from shardwise.planner.estimator import Estimator
from shardwise.planner.memory import CONTEXT, GIB, MemoryEstimate
from shardwise.planner.run_models import Row
from shardwise.planner.runs import Run, read_runs


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """One row of the table: prediction and error, or the reason it has none."""

    id: str
    source: str
    gpu: str
    arch: str
    reason: str | None = None
    measured_s: float | None = None
    predicted_s: float | None = None
    time_error: float | None = None
    comparable: bool = True
    measured_gib: float | None = None
    predicted_gib: float | None = None
    memory_error: float | None = None
    memory_meaning: str = ""
    sweep: str = ""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Errors of a group of rows: ``quantity`` is step_time or memory."""

    by: str
    name: str
    quantity: str
    rows: int
    covered: int
    median: float | None
    p90: float | None
    bias: float | None
    worst_under: float | None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Several layouts of one model on one cluster: how well the prediction ranks them."""

    name: str
    layouts: int
    regret: float  # measured time of the predicted best over the measured best, minus 1
    tau: float  # Kendall rank correlation


@dataclass(frozen=True, kw_only=True)
class Validation:
    rows: tuple[RowResult, ...]
    summary: tuple[Summary, ...]
    sweeps: tuple[Sweep, ...]


def predicted_memory(estimate: MemoryEstimate, meaning: str) -> float:
    """GiB in the meaning a source reports."""
    if meaning == "last":
        return sum(estimate.stages[-1].values()) / GIB
    if meaning == "reserved":
        return min(estimate.reserved_gib, max(estimate.capacity_gib, estimate.allocated_gib))
    if meaning == "device":
        return min(estimate.reserved_gib + CONTEXT / GIB, max(estimate.capacity_gib, estimate.allocated_gib))
    return estimate.allocated_gib


def judge(run: Run) -> RowResult:
    """Prediction of one run."""
    estimator = Estimator(run.model, run.cluster, seq_len=run.seq_len, stack=run.profile, document=run.document)
    predicted = estimator.step_time(run.layout).seconds if run.seconds else None
    memory = predicted_memory(estimator.memory(run.layout), run.memory_meaning)
    return RowResult(
        id=run.id,
        source=run.source,
        gpu=run.gpu_type,
        arch=run.arch,
        measured_s=run.seconds,
        predicted_s=predicted,
        time_error=predicted / run.seconds - 1 if predicted and run.seconds else None,
        comparable=run.comparable,
        measured_gib=run.memory_gib,
        predicted_gib=memory,
        memory_error=memory / run.memory_gib - 1 if run.memory_gib else None,
        memory_meaning=run.memory_meaning if run.memory_gib else "",
        sweep=sweep_key(run),
    )


def sweep_key(run: Run) -> str:
    """Runs with the same key differ in the layout only: one model, sequence length, batch, precision, stack and set of GPUs."""
    layout, model = run.layout, run.model
    shape = (model.name, model.num_layers, model.hidden, [getattr(each, "heads", 0) for each in model.attentions])
    key = (*shape, run.seq_len, layout.gbs, layout.precision, run.profile, run.gpu_type, layout.world, layout.peft)
    return "|".join(str(part) for part in key)


def _layout_key(run: Run) -> tuple[object, ...]:
    layout = run.layout
    degrees = (layout.tp, layout.cp, layout.pp, layout.vpp, layout.ep, layout.etp, layout.mbs)
    return (*degrees, layout.sharding, str(layout.recompute), layout.schedule, layout.overlap_moe)


def validate(rows: Iterable[Row]) -> Validation:
    """Judge every row of a table of runs. No row raises; a row that cannot be predicted has a reason."""
    table = list(rows)
    runs, reasons = read_runs(table)
    results: list[RowResult] = []
    judged: list[Run] = []
    for run in runs:
        try:
            results.append(judge(run))
            judged.append(run)
        except ShardwiseError as error:
            reasons[run.id] = str(error).replace("\n", "; ")
    done = {result.id for result in results}
    for index, row in enumerate(table):
        name = row.get("id") or f"row {index + 1}"
        if name not in done:
            source = name.split("-")[0]
            gpu, arch = row.get("gpu_type", ""), row.get("arch", "")
            results.append(RowResult(id=name, source=source, gpu=gpu, arch=arch, reason=reasons.get(name, "not expressed")))
    return Validation(rows=tuple(results), summary=tuple(summarise(results)), sweeps=tuple(sweeps(judged, results)))


def summarise(results: Sequence[RowResult]) -> list[Summary]:
    """Error statistics of all rows, and by source, GPU type, architecture and (memory) by what is reported."""
    groups: list[tuple[str, Callable[[RowResult], str]]] = [
        ("all", lambda result: "all"),
        ("source", lambda result: result.source),
        ("gpu", lambda result: result.gpu),
        ("arch", lambda result: result.arch or "not stated"),
        ("family", lambda result: "moe" if "moe" in result.arch else "dense"),
    ]
    out: list[Summary] = []
    for by, key in groups:
        names = sorted({key(result) for result in results})
        for name in names:
            members = [result for result in results if key(result) == name]
            errors = [result.time_error for result in members if result.time_error is not None and result.comparable]
            out.append(_statistics(by, name, "step_time", len(members), errors))
            errors = [result.memory_error for result in members if result.memory_error is not None]
            out.append(_statistics(by, name, "memory", len(members), errors))
    for meaning in sorted({result.memory_meaning for result in results if result.memory_meaning}):
        members = [result for result in results if result.memory_meaning == meaning]
        out.append(
            _statistics(
                "memory_meaning",
                meaning,
                "memory",
                len(members),
                [result.memory_error for result in members if result.memory_error is not None],
            )
        )
    return out


def _statistics(by: str, name: str, quantity: str, rows: int, errors: Sequence[float]) -> Summary:
    if not errors:
        return Summary(by=by, name=name, quantity=quantity, rows=rows, covered=0, median=None, p90=None, bias=None, worst_under=None)
    size = sorted(abs(error) for error in errors)
    signed = sorted(errors)
    return Summary(
        by=by,
        name=name,
        quantity=quantity,
        rows=rows,
        covered=len(errors),
        median=quantile(size, 0.5),
        p90=quantile(size, 0.9),
        bias=quantile(signed, 0.5),
        worst_under=min(0.0, signed[0]),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Quantile of a sorted sequence, between neighbours by linear interpolation."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float:
    """Kendall's tau-b of two sequences (ties counted as neither)."""
    concordant = discordant = left_ties = right_ties = 0
    for i in range(len(left)):
        for j in range(i):
            a, b = left[i] - left[j], right[i] - right[j]
            if a == 0:
                left_ties += 1
            if b == 0:
                right_ties += 1
            if a * b > 0:
                concordant += 1
            elif a * b < 0:
                discordant += 1
    pairs = len(left) * (len(left) - 1) // 2
    scale = ((pairs - left_ties) * (pairs - right_ties)) ** 0.5
    return (concordant - discordant) / scale if scale else 0.0


def sweeps(runs: Sequence[Run], results: Sequence[RowResult]) -> list[Sweep]:
    """Sets of at least three different layouts of one model on one cluster. Repeats of a layout count once, with their mean."""
    by_id = {result.id: result for result in results}
    found: dict[str, dict[tuple[object, ...], list[RowResult]]] = {}
    for run in runs:
        result = by_id[run.id]
        if result.predicted_s and result.measured_s and result.comparable:
            found.setdefault(result.sweep, {}).setdefault(_layout_key(run), []).append(result)
    out = []
    for name, layouts in sorted(found.items()):
        if len(layouts) < 3:
            continue
        measured = [sum(result.measured_s or 0 for result in same) / len(same) for same in layouts.values()]
        predicted = [sum(result.predicted_s or 0 for result in same) / len(same) for same in layouts.values()]
        chosen = predicted.index(min(predicted))
        out.append(
            Sweep(name=name, layouts=len(layouts), regret=measured[chosen] / min(measured) - 1, tau=kendall_tau(measured, predicted))
        )
    return out

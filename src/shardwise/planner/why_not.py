"""Why a layout the user names was not chosen: the rules against it, what it lacks in memory, what it loses in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import Finding, LayoutError
from shardwise.planner.estimator import Estimator
from shardwise.planner.memory import GIB, MemoryEstimate
from shardwise.planner.search import Judge, Plan
from shardwise.planner.step_time import StepTimeEstimate
from shardwise.spec.layout import Layout


@dataclass(frozen=True, kw_only=True)
class WhyNot:
    """``reasons`` are ordered: illegal, does not fit, slower. Empty when it is as good as the best plan."""

    layout: Layout
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]
    memory: MemoryEstimate | None = None
    time: StepTimeEstimate | None = None


def why_not(estimator: Estimator, layout: Layout, best: Plan | None, *, judge: Judge) -> WhyNot:
    """Everything that speaks against ``layout``, measured against ``best`` where there is one."""
    findings = tuple(judge(layout))
    reasons = [f"rule {each.rule}: {each.given}: {each.why}" for each in findings if each.severity == "error"]
    try:
        memory, time = estimator.memory(layout), estimator.step_time(layout)
    except LayoutError as error:
        extra = [f"rule {each.rule}: {each.given}: {each.why}" for each in error.findings]
        return WhyNot(layout=layout, reasons=tuple(dict.fromkeys((*reasons, *extra))), findings=findings)
    if not memory.fits:
        reasons.append(_too_big(memory))
    if best and time.seconds > best.time.seconds:
        reasons.append(_slower(time, best.time))
    return WhyNot(layout=layout, reasons=tuple(reasons), findings=findings, memory=memory, time=time)


def _too_big(memory: MemoryEstimate) -> str:
    over = memory.needed_gib - memory.capacity_gib
    terms = _largest(list(memory.terms.items()))
    where = f" on pipeline rank {memory.stage}" if len(memory.stages) > 1 else ""
    return f"does not fit by {over:.1f} GiB{where}: " + ", ".join(
        f"{name.replace('_', ' ')} {value / GIB:.1f} GiB" for name, value in terms
    )


def _slower(time: StepTimeEstimate, best: StepTimeEstimate) -> str:
    lost = [(name, value - best.terms.get(name, 0.0)) for name, value in time.terms.items()]
    terms = [(name, value) for name, value in _largest(lost) if value > 0]
    loss = time.seconds - best.seconds
    text = ", ".join(f"{name.replace('_', ' ')} +{value:.3g} s" for name, value in terms)
    return f"slower by {loss:.3g} s ({loss / best.seconds:.1%}): {text}"


def _largest(terms: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(terms, key=lambda item: -item[1])[:3]

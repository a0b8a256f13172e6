"""Sizing tables of Megatron Bridge's guide to parallelism strategies: by model size, for experts, by topology, by sequence length.

They are starting points, not rules: `suggestions` says what the tables advise, `departures` where a layout differs from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log

from shardwise.errors import Finding
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec
from shardwise.spec.ranks import min_world

Range = tuple[int, int]
_SOURCE = "Megatron Bridge, guide to parallelism strategies, "


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """What one table advises. ranges: lowest and highest value of each layout field it speaks of."""

    rule: str
    title: str
    advice: str
    ranges: dict[str, Range]
    source: str


# below this many parameters: GPUs, tp, pp, cp
DENSE: tuple[tuple[float, str, Range, Range, Range, Range], ...] = (
    (1e9, "< 1B", (1, 8), (1, 1), (1, 1), (1, 1)),
    (10e9, "1-10B", (8, 16), (2, 4), (1, 1), (1, 1)),
    (70e9, "10-70B", (16, 64), (4, 8), (2, 4), (1, 1)),
    (175e9, "70-175B", (64, 256), (8, 8), (4, 8), (1, 1)),
    (inf, "175-500B", (256, 1024), (8, 8), (8, 16), (2, 2)),
)
# name, billions of parameters in all and active, tp, pp, ep, cp
MOE: tuple[tuple[str, float, float, int, int, int, int], ...] = (
    ("OLMoE 7B", 7, 1, 1, 1, 8, 1),
    ("Moonlight 16B", 16, 3, 2, 1, 8, 1),
    ("DeepSeek-V2 236B", 236, 21, 1, 4, 32, 1),
    ("GLM-4.5 Air 106B", 106, 12, 1, 4, 8, 1),
    ("Qwen3 30B-A3B", 30, 3, 4, 2, 4, 1),
    ("GLM-4.5 355B", 355, 32, 2, 8, 16, 1),
    ("Qwen3 235B-A22B", 235, 22, 4, 16, 8, 2),
    ("DeepSeek-V3 671B", 671, 37, 2, 16, 64, 1),
    ("Kimi-K2 1T", 1000, 32, 2, 16, 32, 1),
)
# tokens from, to (excluded): what to add, cp
SEQUENCE: tuple[tuple[int, float, str, bool, Range], ...] = (
    (0, 2048, "standard TP + PP + DP", False, (1, 1)),
    (2048, 8192, "add sequence parallelism", True, (1, 1)),
    (8192, 32768, "add sequence parallelism and CP=2", True, (2, 2)),
    (32768, inf, "add sequence parallelism and CP=4-8, consider a2a+p2p for a large CP", True, (4, 8)),
)


def _span(name: str, values: Range) -> str:
    low, high = values
    return f"{name.upper()}={low}" if low == high else f"{name.upper()}={low}-{high}"


def _by_size(model: ModelSpec) -> Suggestion:
    size = model.total_params
    _, title, gpus, tp, pp, cp = next(row for row in DENSE if size < row[0])
    ranges = {"tp": tp, "pp": pp, "cp": cp}
    parts = [_span(name, values) for name, values in ranges.items() if values != (1, 1)]
    advice = f"{' + '.join([*parts, 'DP']) if parts else 'DP only'} on {gpus[0]}-{gpus[1]} GPUs"
    title = f"dense model of {size / 1e9:.1f}B parameters ({title})"
    return Suggestion(rule="S1", title=title, advice=advice, ranges=ranges, source=_SOURCE + "dense models")


def _by_experts(model: ModelSpec, gpus: int) -> Suggestion:
    total, active = model.total_params / 1e9, model.active_params / 1e9
    row = min(MOE, key=lambda row: abs(log(total / row[1])) + abs(log(active / row[2])))
    name, _, _, tp, pp, ep, cp = row
    layout = Layout(tp=tp, pp=pp, ep=ep, cp=cp)
    needed = min_world(layout)
    advice = f"as {name}: TP={tp} PP={pp} EP={ep}" + (f" CP={cp}" if cp > 1 else "") + f", ETP=1; needs {needed} GPUs"
    if gpus % needed:
        advice += f", which {gpus} GPUs do not give"
    ranges = {"tp": (tp, tp), "pp": (pp, pp), "ep": (ep, ep), "etp": (1, 1)}
    title = f"mixture of experts, {total:.0f}B parameters, {active:.1f}B active: TP follows the active ones"
    return Suggestion(rule="S2", title=title, advice=advice, ranges=ranges, source=_SOURCE + "MoE models")


def _by_topology(cluster: Cluster) -> Suggestion:
    most = 8
    if cluster.gpus <= cluster.domain:
        where, advice = f"one {cluster.intra.name} domain", "TP inside the domain"
    elif "ethernet" in cluster.inter.name:
        most, where = 4, f"domains of {cluster.domain} joined by {cluster.inter.name}"
        advice = "TP=4 at most, PP or DP across the network"
    else:
        where, advice = f"domains of {cluster.domain} joined by {cluster.inter.name}", "TP inside a domain, PP or DP across"
    most = min(most, cluster.domain)
    return Suggestion(rule="S3", title=where, advice=advice, ranges={"tp": (1, most)}, source=_SOURCE + "hardware topology")


def _by_sequence(seq_len: int) -> Suggestion:
    _, _, advice, sp, cp = next(row for row in SEQUENCE if row[0] <= seq_len < row[1])
    ranges: dict[str, Range] = {"cp": cp}
    if sp:
        ranges["sp"] = (1, 1)
    return Suggestion(rule="S4", title=f"sequences of {seq_len} tokens", advice=advice, ranges=ranges, source=_SOURCE + "sequence length")


def suggestions(model: ModelSpec, cluster: Cluster, *, seq_len: int) -> tuple[Suggestion, ...]:
    """What the tables advise for this model, cluster and sequence length."""
    size = _by_experts(model, cluster.gpus) if model.moe else _by_size(model)
    return (size, _by_topology(cluster), _by_sequence(seq_len))


def departures(layout: Layout, advised: tuple[Suggestion, ...]) -> tuple[Finding, ...]:
    """Where a layout differs from the tables, one finding of severity `info` for each field."""
    findings = []
    for suggestion in advised:
        for name, (low, high) in suggestion.ranges.items():
            value = int(getattr(layout, name))
            if low <= value <= high or (name == "sp" and layout.tp == 1):
                continue
            shown = f"{name}={str(bool(value)).lower()}" if name == "sp" else f"{name}={value}"
            instead = f"{name}=true" if name == "sp" else f"{name}={low if value < low else high}"
            why = f"{suggestion.title}: {suggestion.advice}"
            findings.append(Finding(rule=suggestion.rule, severity="info", given=shown, why=why, try_=instead, source=suggestion.source))
    return tuple(findings)


def table_findings(model: ModelSpec, cluster: Cluster, *, seq_len: int, layout: Layout | None = None) -> tuple[Finding, ...]:
    """One `info` finding per table: what it advises, and where `layout` differs from it."""
    findings = []
    for suggestion in suggestions(model, cluster, seq_len=seq_len):
        differs = departures(layout, (suggestion,)) if layout else ()
        given = f"{suggestion.title}; the layout has {', '.join(each.given for each in differs)}" if differs else suggestion.title
        findings.append(
            Finding(
                rule=suggestion.rule,
                severity="info",
                given=given,
                why=f"the table advises {suggestion.advice}",
                try_=", ".join(each.try_ for each in differs),
                source=suggestion.source,
            )
        )
    return tuple(findings)

"""Layout rules of each framework. `check_layout` gives every finding at once.

A rule is a small named function with an id, a severity per framework and a source; `RULES` lists them all. Rules of a framework's
options that are not part of a layout read `settings`, keyed by Megatron names and environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import Finding, ShardwiseError
from shardwise.planner.rules import context_parallel, experts, pipeline, precision, sharding, tensor, training, world
from shardwise.planner.rules.rule import FRAMEWORKS, Case, Rule
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec

_MODULES = (world, training, tensor, pipeline, context_parallel, experts, sharding, precision)
RULES: tuple[Rule, ...] = tuple(each for module in _MODULES for each in vars(module).values() if isinstance(each, Rule))
_RANK = {"error": 0, "warning": 1, "info": 2}
# rules about the degrees alone: neither the world, the batch nor the sequence is known
_DEGREES = (
    "W4",
    "T1",
    "T2",
    "T3",
    "T4",
    "T8",
    "T14",
    "T16",
    "T17",
    "P2",
    "P3",
    "P9",
    "P10",
    "P13",
    "C5",
    "C6",
    "E1",
    "E2",
    "E4",
    "E5",
    "E10",
)


def _case(layout: Layout, framework: str, **known: Any) -> Case:
    if framework not in FRAMEWORKS:
        raise ShardwiseError(f"unknown framework {framework!r}; known: {', '.join(FRAMEWORKS)}")
    return Case(layout=layout, framework=framework, **known)


def _judge(case: Case, rules: tuple[Rule, ...]) -> tuple[Finding, ...]:
    positive = tuple(finding for finding in world.degrees_are_positive(case))
    if positive:  # nothing else can be divided
        return positive
    findings = [finding for each in rules for finding in each(case)]
    return tuple(sorted(findings, key=lambda finding: _RANK[finding.severity]))


def check_layout(
    model: ModelSpec | None,
    layout: Layout,
    cluster: Cluster | None,
    *,
    seq_len: int | None,
    framework: str = "shardwise",
    settings: Mapping[str, Any] | None = None,
) -> tuple[Finding, ...]:
    """Every finding of `framework`'s rules, errors first. What is None is not judged; a layout without errors is legal.

    Raises `ShardwiseError` for an unknown framework.
    """
    return _judge(_case(layout, framework, model=model, cluster=cluster, seq_len=seq_len, settings=settings or {}), RULES)


def check_degrees(layout: Layout, *, model: ModelSpec | None = None, framework: str = "shardwise") -> tuple[Finding, ...]:
    """Findings about the degrees of a layout whose world, batch and sequence are not chosen yet."""
    chosen = tuple(each for each in RULES if each.id in _DEGREES or (each.id == "TT2" and layout.etp > 1))
    return _judge(_case(layout, framework, model=model), chosen)


def is_legal(findings: tuple[Finding, ...]) -> bool:
    return not any(finding.severity == "error" for finding in findings)

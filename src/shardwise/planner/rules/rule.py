"""What a rule is: a small named function that looks at a case and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwise.errors import Finding, Severity
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec

MEGATRON, BRIDGE, TITAN, SHARDWISE = "megatron-core", "bridge", "torchtitan", "shardwise"
FRAMEWORKS = (MEGATRON, BRIDGE, TITAN, SHARDWISE)
MEGATRONS = (MEGATRON, BRIDGE)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is judged. What is None is not known, and rules about it keep silent.

    settings: options of the framework that are not part of a layout, by their Megatron name without section (`train_iters`,
    `nccl_ub`), environment variables included.
    """

    layout: Layout
    framework: str
    model: ModelSpec | None = None
    cluster: Cluster | None = None
    seq_len: int | None = None  # tokens of one sample
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.cluster.gpus if self.cluster else self.layout.world

    def count(self, name: str) -> int | None:
        """A setting that counts something; None if it is absent or no whole number above 0."""
        value = self.settings.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


class Problem(NamedTuple):
    """One thing a rule objects to. severity: None = that of the rule."""

    given: str
    why: str
    try_: str
    severity: Severity | None = None


Check = Callable[[Case], Iterable[Problem]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule with its id, the frameworks that have it with their severity, and its source."""

    id: str
    name: str
    severity: Mapping[str, Severity]
    source: str
    check: Check

    def __call__(self, case: Case) -> Iterator[Finding]:
        severity = self.severity.get(case.framework)
        if severity is None:
            return
        for problem in self.check(case):
            yield Finding(
                rule=self.id,
                severity=problem.severity or severity,
                given=problem.given,
                why=problem.why,
                try_=problem.try_,
                source=self.source,
            )


def rule(
    id: str, source: str, *, severity: Severity = "error", only: Iterable[str] = FRAMEWORKS, **by_framework: Severity | None
) -> Callable[[Check], Rule]:
    """Make a rule of a function. `only`: frameworks that have it; keywords `megatron`, `bridge`, `titan`, `shardwise` change one."""
    names = {"megatron": MEGATRON, "bridge": BRIDGE, "titan": TITAN, "shardwise": SHARDWISE}
    levels: dict[str, Severity | None] = {framework: severity for framework in only}
    levels |= {names[name]: level for name, level in by_framework.items()}

    def make(check: Check) -> Rule:
        name = getattr(check, "__name__", id)
        return Rule(id=id, name=name, severity={name: level for name, level in levels.items() if level}, source=source, check=check)

    return make

"""The rule set and the software profile of a framework, ready to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.errors import LayoutError
from shardwise.planner.rules import check_layout
from shardwise.planner.rules.sizing import table_findings

if TYPE_CHECKING:
    from shardwise.errors import Finding
    from shardwise.spec.cluster import Cluster
    from shardwise.spec.layout import Layout
    from shardwise.spec.model import ModelSpec

# framework whose rules apply: software profile whose measured efficiencies are used
_STACKS = {"megatron-core": "megatron-lm", "bridge": "megatron-bridge", "torchtitan": "torchtitan", "shardwise": "torchtitan"}


_ANY_LAYOUT = ("C16", "R1", "R11")  # rules about sequence length, number format and GPU, which no layout changes


def refuse_hopeless(findings: Sequence[Finding]) -> None:
    """Raise `LayoutError` with the errors that every layout has."""
    hopeless = [finding for finding in findings if finding.severity == "error" and finding.rule in _ANY_LAYOUT]
    if hopeless:
        raise LayoutError(hopeless)


def stack_of(framework: str) -> str:
    return _STACKS[framework]


def judge_of(
    model: ModelSpec, cluster: Cluster, *, seq_len: int, framework: str, options: Mapping[str, Any] | None = None
) -> Callable[[Layout], Sequence[Finding]]:
    """Findings of a layout of ``model`` on ``cluster`` under these options of the framework."""

    def judge(layout: Layout) -> Sequence[Finding]:
        return check_layout(model, layout, cluster, seq_len=seq_len, framework=framework, settings=options)

    return judge


def sizing(model: ModelSpec, cluster: Cluster, seq_len: int, layout: Layout | None) -> Sequence[Finding]:
    """What the sizing tables suggest, and where ``layout`` departs from them."""
    return table_findings(model, cluster, seq_len=seq_len, layout=layout)

"""What a rehearsal found, beside what the planner predicts for the same rank, term by term."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planner.estimator import Estimator
from shardwise.rehearse.step import RankRehearsal
from shardwise.rehearse.traffic import Volumes, predicted_volumes
from shardwise.spec.cluster import Cluster
from shardwise.spec.stages import rank_params
from shardwise.train.plan import RunPlan

# term: (categories of the ledger, terms of the planner)
_TERMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "weights": (("weights",), ("weights", "low_precision_weights")),
    "gradients": (("gradients",), ("gradients",)),
    "optimizer state": (("optimizer",), ("optimizer",)),
    "activations": (("activations",), ("activations",)),
    "loss and temporaries": (("loss", "temporaries"), ("loss", "working_set", "gathered", "weight_gradient_buffers")),
    "kernel workspace": ((), ("framework",)),
}


@dataclass(frozen=True, kw_only=True)
class Term:
    """Bytes at the peak of a rank. None: the side that has no such term."""

    name: str
    rehearsed: int | None
    predicted: float | None


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a rank sends in a step by one collective over one axis. predicted: bytes; None where the planner counts nothing."""

    collective: str
    axis: str
    calls: int
    bytes: int
    predicted: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """parameters: exact count of the planner's description for this rank. terms: sum to the totals."""

    rank: RankRehearsal
    parameters: int
    terms: tuple[Term, ...]
    sent: tuple[Sent, ...]

    @property
    def same_parameters(self) -> bool:
        return self.parameters == self.rank.parameters

    @property
    def predicted(self) -> float:
        return sum(term.predicted or 0.0 for term in self.terms)


class Comparer:
    """Compares ranks of one plan with what the planner says of this runtime. The planner's description must exist (`plan.spec`)."""

    def __init__(self, plan: RunPlan, cluster: Cluster) -> None:
        assert plan.spec is not None
        model = plan.spec.replace(vocab_divisor=1)  # the runtime does not pad the vocabulary
        self._params = rank_params(model, plan.layout)
        self._layout = plan.layout
        self._estimator = Estimator(model, cluster, seq_len=plan.config.model.seq_length, stack="shardwise")
        self._memory = self._estimator.memory(plan.layout)

    def compare(self, rank: RankRehearsal) -> Comparison:
        """Terms at the peak of the passes: the planner does not model the update."""
        found, predicted = rank.pass_peak.categories, self._memory.stages[rank.pp_rank]
        terms = []
        for name, (ours, theirs) in _TERMS.items():
            terms.append(
                Term(
                    name=name,
                    rehearsed=sum(found[each] for each in ours) if ours else None,
                    predicted=sum(predicted.get(each, 0.0) for each in theirs) if theirs else None,
                )
            )
        sent = _sent(rank, predicted_volumes(self._estimator, self._layout, rank.pp_rank))
        return Comparison(rank=rank, parameters=self._params[rank.pp_rank].total, terms=tuple(terms), sent=sent)


def _sent(rank: RankRehearsal, expected: Volumes) -> tuple[Sent, ...]:
    """Messages beside their prediction. Axes of equal members share a group, so a prediction belongs to the row that names its axis."""
    left = dict(expected)
    rows = []
    for each in rank.traffic:
        keys = [(each.collective, axis) for axis in each.axis.split("/") if (each.collective, axis) in left]
        size = sum(left.pop(key) for key in keys) if keys else None
        rows.append(Sent(collective=each.collective, axis=each.axis, calls=each.calls, bytes=each.bytes, predicted=size))
    rows += [Sent(collective=name, axis=axis, calls=0, bytes=0, predicted=size) for (name, axis), size in left.items()]
    return tuple(sorted(rows, key=lambda row: (row.axis, row.collective)))

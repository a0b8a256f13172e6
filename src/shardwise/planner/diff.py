"""What differs between two layouts, and what that does to memory and time, term by term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shardwise.planner.memory import GIB, MemoryEstimate
from shardwise.planner.step_time import StepTimeEstimate
from shardwise.spec.layout import Layout

COMMUNICATION = ("tp", "cp", "ep", "fsdp", "pp", "dp")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A field, or something derived from fields (world, expert data parallel size, micro batches)."""

    name: str
    before: str
    after: str
    derived: bool = False


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A term before and after, in one unit."""

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


def changes(before: Layout, after: Layout) -> list[Change]:
    """Fields that differ, then what follows from them."""
    found = [
        Change(name=field.name, before=str(getattr(before, field.name)), after=str(getattr(after, field.name)))
        for field in fields(Layout)
        if getattr(before, field.name) != getattr(after, field.name)
    ]
    for name in ("world", "edp", "microbatches", "shard_size", "expert_shard_size"):
        values = (getattr(before, name), getattr(after, name))
        if values[0] != values[1]:
            found.append(Change(name=name, before=str(values[0]), after=str(values[1]), derived=True))
    return found


def deltas(before: Mapping[str, float], after: Mapping[str, float]) -> list[Delta]:
    """Terms of two predictions, the largest change first."""
    names = dict.fromkeys((*before, *after))
    found = [Delta(name=name, before=before.get(name, 0.0), after=after.get(name, 0.0)) for name in names]
    return sorted((delta for delta in found if delta.before or delta.after), key=lambda delta: -abs(delta.change))


def memory_deltas(before: MemoryEstimate, after: MemoryEstimate) -> list[Delta]:
    """GiB of the heaviest rank of each (it may be another rank)."""
    return deltas(*({name: value / GIB for name, value in each.terms.items()} for each in (before, after)))


def time_deltas(before: StepTimeEstimate, after: StepTimeEstimate, *, tokens: tuple[float, float]) -> list[Delta]:
    """Seconds per million tokens of the global batch, so that steps of different batches compare."""
    scales = [1e6 / count for count in tokens]
    return deltas(*({name: value * scale for name, value in each.terms.items()} for each, scale in zip((before, after), scales)))

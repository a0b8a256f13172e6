"""Predictions as JSON values and as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.cli.render import gib, print_lines, print_table, seconds
from shardwise.spec import grammar

if TYPE_CHECKING:
    from shardwise.errors import Finding
    from shardwise.planner.memory import MemoryEstimate
    from shardwise.planner.step_time import StepTimeEstimate
    from shardwise.spec.layout import Layout

GIB = 2.0**30


def layout_json(layout: Layout) -> dict[str, Any]:
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "vpp": layout.vpp,
        "cp": layout.cp,
        "ep": layout.ep,
        "etp": layout.etp,
        "sp": layout.sp,
        "dp": layout.dp,
        "edp": layout.edp,
        "mbs": layout.mbs,
        "gbs": layout.gbs,
        "recompute": str(layout.recompute),
        "world": layout.world,
        "microbatches": layout.microbatches,
        "sharding": layout.sharding,
        "precision": layout.precision,
        "words": " ".join(grammar.words(layout)),
    }


def memory_json(memory: MemoryEstimate) -> dict[str, Any]:
    """Terms are GiB of the heaviest pipeline rank, `stages` the same for every rank."""
    return {
        "allocated_gib": memory.allocated_gib,
        "reserved_gib": memory.reserved_gib,
        "needed_gib": memory.needed_gib,
        "capacity_gib": memory.capacity_gib,
        "stage": memory.stage,
        "terms": {name: value / GIB for name, value in memory.terms.items()},
        "stages": [{name: value / GIB for name, value in terms.items()} for terms in memory.stages],
    }


def time_json(time: StepTimeEstimate) -> dict[str, Any]:
    return {"seconds": time.seconds, "terms": dict(time.terms), "mfu": time.mfu, "tflops_per_gpu": time.tflops_per_gpu}


def prediction_json(
    layout: Layout, memory: MemoryEstimate | None, time: StepTimeEstimate | None, findings: Iterable[Finding]
) -> dict[str, Any]:
    """The keys `check` and every entry of `plan` have."""
    return {
        "layout": layout_json(layout),
        "fits": memory.fits if memory else None,
        "memory": memory_json(memory) if memory else None,
        "step_time": time_json(time) if time else None,
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu if time else None,
        "findings": [finding.to_dict() for finding in findings],
    }


def short(layout: Layout) -> str:
    """A layout in a few words: degrees above 1, micro batch, and what differs from the plain choice."""
    words = [f"{name}{getattr(layout, name)}" for name in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp") if getattr(layout, name) > 1]
    words = words or ["dp1"]
    words.append(f"mbs{layout.mbs}")
    if layout.recompute.granularity != "none":
        words.append(str(layout.recompute))
    if layout.sharding != "distributed_optimizer":
        words.append(layout.sharding)
    if layout.cp > 1 and layout.cp_comm != "p2p":
        words.append(layout.cp_comm)
    if layout.pipeline_layout:
        words.append(stage_text(layout))
    elif layout.account_for_embedding or layout.account_for_loss:
        words.append("ends-1" if layout.account_for_embedding and layout.account_for_loss else "last-1")
    return " ".join(words)


def stage_text(layout: Layout) -> str:
    """Layers per stage of an explicit pipeline layout, runs of equal stages joined: `[7,9x2,7]`."""
    runs: list[list[int]] = []
    for word in layout.pipeline_layout or ():
        count = word.count("t")
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return "[" + ",".join(f"{count}x{times}" if times > 1 else f"{count}" for count, times in runs) + "]"


def print_memory(memory: MemoryEstimate, *, stages: bool = True) -> None:
    """Terms of the heaviest rank, and the total of every pipeline rank."""
    head = f"Memory of the heaviest rank (pipeline rank {memory.stage}), GiB"
    rows: list[Sequence[object]] = [
        (name.replace("_", " "), gib(value / GIB)) for name, value in memory.terms.items() if value / GIB >= 0.005
    ]
    rows += [
        ("allocated", gib(memory.allocated_gib)),
        ("needed on the device", gib(memory.needed_gib)),
        ("device", gib(memory.capacity_gib)),
    ]
    print_table(head, ("term", "GiB"), rows)
    if stages and len(memory.stages) > 1:
        totals = [sum(terms.values()) / GIB for terms in memory.stages]
        print_lines(["allocated by pipeline rank: " + _runs([gib(total) for total in totals]), ""])


def _runs(values: Sequence[str]) -> str:
    out: list[list[Any]] = []
    for index, value in enumerate(values):
        if out and out[-1][2] == value:
            out[-1][1] = index
        else:
            out.append([index, index, value])
    return ", ".join(f"{a}: {value}" if a == b else f"{a}-{b}: {value}" for a, b, value in out)


def print_time(time: StepTimeEstimate) -> None:
    rows = [
        (name.replace("_", " "), seconds(value), f"{value / time.seconds:.1%}")
        for name, value in sorted(time.terms.items(), key=lambda item: -item[1])
        if value > 0.0005 * time.seconds
    ]
    rows.append(("step", seconds(time.seconds), ""))
    print_table("Step time", ("term", "time", "share"), rows)
    print_lines([f"{time.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {time.tflops_per_gpu:.0f} model TFLOP/s/GPU, MFU {time.mfu:.1%}", ""])

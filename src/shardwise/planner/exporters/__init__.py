"""Exporters: a layout as the input of a framework, and back to the same layout."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.planner.exporters import bridge, megatron_lm, slurm, torchtitan
from shardwise.spec.layout import Layout

WRITERS: dict[str, Callable[[Layout], str]] = {
    "megatron-lm": megatron_lm.write,
    "megatron-bridge": bridge.write,
    "torchtitan": torchtitan.write,
    "slurm": slurm.write,
}
READERS: dict[str, Callable[[str, int | None], Layout]] = {
    "megatron-lm": megatron_lm.read,
    "megatron-bridge": bridge.read,
    "torchtitan": torchtitan.read,
    "slurm": slurm.read,
}


def format_of(text: str) -> str | None:
    """Which exporter's format a text has; None when it is none of them."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if "OVERRIDES=(" in lines:
        return "slurm"
    if any(line == "[parallelism]" for line in lines):
        return "torchtitan"
    if any("--" + name in text for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size")):
        return "megatron-lm"
    if lines and all("=" in line and ":" not in line.split("=")[0] for line in lines):
        return "megatron-bridge"
    return None

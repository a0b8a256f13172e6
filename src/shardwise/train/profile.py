"""Switches for torch's profiler and memory history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shardwise.train.config import ProfilingConfig


@contextmanager
def profiled(config: ProfilingConfig, rank: int, device: torch.device) -> Iterator[Callable[[int], None]]:
    """Yields a function to call after every step. Profiled ranks write `trace_rank-N.json`, and a memory snapshot on a GPU."""
    chosen = rank in config.profile_ranks
    profiler = torch.profiler.profile() if config.use_pytorch_profiler and chosen else None
    history = config.record_memory_history and chosen and device.type == "cuda"
    if history:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    running = False

    def mark(step: int) -> None:
        nonlocal running
        if profiler is None:
            return
        if step + 1 == config.profile_step_start:
            profiler.start()
            running = True
        elif step + 1 == config.profile_step_end and running:
            profiler.stop()
            running = False
            profiler.export_chrome_trace(f"trace_rank-{rank}.json")

    mark(0)
    try:
        yield mark
    finally:
        if running and profiler is not None:
            profiler.stop()
        if history:
            torch.cuda.memory._dump_snapshot(config.memory_snapshot_path)
            torch.cuda.memory._record_memory_history(enabled=None)

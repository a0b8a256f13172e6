"""Training logs: CUDA out-of-memory texts, iteration lines, memory lines.

Formats read: PyTorch's two out-of-memory texts (before and since 2.1), those of NCCL and cuBLAS, the iteration and memory lines of
Megatron-LM and Megatron Bridge, and torchtitan's step line. Sizes are GiB, times seconds. Everything else in the log is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from shardwise.errors import InputError

_UNIT_GIB = {"bytes": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0, "TiB": 2.0**10}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
_RANK = re.compile(r"\[?\b[Rr]ank[ :=]?\s*(\d+)\b")
_OOM = re.compile(r"CUDA out of memory|OutOfMemoryError")
_OUTSIDE = re.compile(r"Cuda failure (?:\d+ )?'out of memory'|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED")
_PHASES = (
    ("optimizer", re.compile(r"optimizer\.(?:step|_init|init_state)|in (?:step|adam|adamw|_multi_tensor_adam|init_state_fn)\b|exp_avg")),
    ("loss", re.compile(r"cross_entropy|lm_loss|compute_loss|output_layer|logits|lm_head")),
    ("experts", re.compile(r"experts\.py|moe_layer|token_dispatcher|grouped_gemm|GroupedMLP|group_experts")),
    ("backward", re.compile(r"\.backward\(|_engine_run_backward|backward_step|in backward\b")),
    ("forward", re.compile(r"forward_step|in forward\b|_call_impl")),
    ("build", re.compile(r"build_model|get_model|model_provider|setup_model|init_device_mesh|\.to\(.*device|reset_parameters")),
)


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """One CUDA out-of-memory text. ``None`` where the text does not say."""

    rank: int | None = None
    gpu: int | None = None
    tried_gib: float | None = None
    capacity_gib: float | None = None
    free_gib: float | None = None
    in_use_gib: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    phase: str | None = None
    after_iteration: int = 0
    library: str | None = None  # that asked for memory beside PyTorch's allocator

    @property
    def unallocated_gib(self) -> float | None:
        """Reserved by the allocator and not in use: what fragmentation holds back."""
        if self.reserved_gib is None or self.allocated_gib is None:
            return None
        return self.reserved_gib - self.allocated_gib


@dataclass(frozen=True, kw_only=True)
class Iteration:
    number: int
    seconds: float | None = None
    loss: float | None = None
    tflops: float | None = None
    global_batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """Peak memory a rank printed, after ``iteration`` steps."""

    rank: int
    iteration: int
    allocated_gib: float
    reserved_gib: float


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    out_of_memory: tuple[OutOfMemory, ...]
    iterations: tuple[Iteration, ...]
    memory: tuple[MemoryLine, ...]

    @property
    def step_seconds(self) -> float | None:
        """Median step time, the first step left out when there are more (it carries the warm-up)."""
        times = [step.seconds for step in self.iterations if step.seconds is not None]
        return median(times[1:] or times) if times else None


def read_log(path: Path) -> TrainingLog:
    """Read a log file; raises ``InputError`` when it is missing, not text, or holds nothing this reader knows."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(given=f"log {path}", why=error.strerror or str(error), try_="the path of a readable text file") from None
    if b"\0" in raw[:65536]:
        raise InputError(given=f"log {path}", why="it is a binary file, not text", try_="the text output of the training run")
    log = parse_log(raw.decode("utf-8", errors="replace"))
    if not (log.out_of_memory or log.iterations or log.memory):
        raise InputError(
            given=f"log {path}",
            why="it has no CUDA out-of-memory text, iteration line or memory line",
            try_="the output of a Megatron, Megatron Bridge or torchtitan run",
        )
    return log


def parse_log(text: str) -> TrainingLog:
    """Parse the text of a log. Lines of several ranks may be interleaved."""
    lines = text.splitlines()
    iterations: list[Iteration] = []
    memory: list[MemoryLine] = []
    faults: list[OutOfMemory] = []
    for number, line in enumerate(lines):
        step = _iteration(line)
        if step:
            iterations.append(step)
        elif "mem-max-allocated-" in line:
            memory.extend(_memory_line(line))
        elif "| max allocated:" in line:
            memory.extend(_memory_report(line))
        elif _OUTSIDE.search(line) or (_OOM.search(line) and "Tried to allocate" in line):
            done = iterations[-1].number if iterations else 0
            faults.append(_out_of_memory(line, lines[max(0, number - 60) : number], done))
    return TrainingLog(out_of_memory=tuple(faults), iterations=tuple(iterations), memory=tuple(memory))


def _gib(pattern: str, line: str) -> float | None:
    found = re.search(pattern.replace("SIZE", _SIZE), line)
    return float(found[1]) * _UNIT_GIB[found[2]] if found else None


def _integer(pattern: str, line: str) -> int | None:
    found = re.search(pattern, line)
    return int(found[1]) if found else None


def _number(pattern: str, line: str) -> float | None:
    found = re.search(pattern, line)
    try:
        return float(found[1].replace(",", "")) if found else None
    except ValueError:
        return None


def _out_of_memory(line: str, before: list[str], done: int) -> OutOfMemory:
    allocated = _gib(r"Of the allocated memory SIZE is allocated by PyTorch", line)
    if allocated is not None:
        unallocated = _gib(r"SIZE is reserved by PyTorch but unallocated", line) or 0.0
        reserved: float | None = allocated + unallocated
        capacity, free = _gib(r"total capacity of SIZE", line), _gib(r"of which SIZE is free", line)
    else:
        allocated, reserved = _gib(r"SIZE already allocated", line), _gib(r"SIZE reserved in total", line)
        capacity, free = _gib(r"SIZE total capacity", line), _gib(r"SIZE free", line)
    rank = _RANK.search(line)
    own = [text for text in before if not rank or not _RANK.search(text) or _RANK.search(text)[1] == rank[1]]  # type: ignore[index]
    trace = own[max((i for i, text in enumerate(own) if "Traceback" in text), default=len(own)) :]
    phase = next((name for name, pattern in _PHASES if any(pattern.search(text) for text in trace)), None)
    return OutOfMemory(
        rank=int(rank[1]) if rank else None,
        gpu=_integer(r"GPU (\d+)", line),
        tried_gib=_gib(r"Tried to allocate SIZE", line),
        capacity_gib=capacity,
        free_gib=free,
        in_use_gib=_gib(r"this process has SIZE memory in use", line),
        allocated_gib=allocated,
        reserved_gib=reserved,
        phase=phase,
        after_iteration=done,
        library=_library(line),
    )


def _library(line: str) -> str | None:
    found = _OUTSIDE.search(line)
    return None if found is None else "cuBLAS" if "CUBLAS" in found[0] else "cuDNN" if "CUDNN" in found[0] else "NCCL"


def _iteration(line: str) -> Iteration | None:
    megatron = re.search(r"iteration\s+(\d+)/\s*\d+ \|", line)
    if megatron:
        milliseconds = _number(r"elapsed time per iteration \(ms\): ([\d.]+)", line)
        return Iteration(
            number=int(megatron[1]),
            seconds=milliseconds / 1000 if milliseconds is not None else None,
            loss=_number(r"lm loss: ([-+\w.]+)", line),
            tflops=_number(r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)", line),
            global_batch=_integer(r"global batch size:\s*(\d+)", line),
        )
    titan = re.search(r"\bstep:\s*(\d+)\b.*\bloss:", line)
    if titan:
        return Iteration(number=int(titan[1]), loss=_number(r"\bloss:\s*([-+\w.]+)", line), tflops=_number(r"tflops:\s*([\d.,]+)", line))
    return None


def _memory_line(line: str) -> Iterator[MemoryLine]:
    found = re.search(r"\[Rank (\d+)\] \(after (\d+) iterations\)", line)
    scale = {"gigabytes": 1e9 / 2**30, "bytes": 2.0**-30}
    allocated = re.search(r"mem-max-allocated-(gigabytes|bytes): ([\d.]+)", line)
    reserved = re.search(r"mem-max-reserved-(gigabytes|bytes): ([\d.]+)", line)
    if found and allocated and reserved:
        yield MemoryLine(
            rank=int(found[1]),
            iteration=int(found[2]),
            allocated_gib=float(allocated[2]) * scale[allocated[1]],
            reserved_gib=float(reserved[2]) * scale[reserved[1]],
        )


def _memory_report(line: str) -> Iterator[MemoryLine]:
    """Megatron-LM's `report_memory`, in units of 2**20 bytes."""
    found = re.search(r"\[Rank (\d+)\] \(after (\d+) iterations\)", line)
    allocated, reserved = _number(r"max allocated:\s*([\d.]+)", line), _number(r"max reserved:\s*([\d.]+)", line)
    if found and allocated is not None and reserved is not None:
        yield MemoryLine(rank=int(found[1]), iteration=int(found[2]), allocated_gib=allocated / 1024, reserved_gib=reserved / 1024)

"""Logs: both out-of-memory texts, Megatron and torchtitan lines, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import InputError
from shardwise.planner.logs import TrainingLog, parse_log, read_log
from shardwise.planner.symptoms import Evidence, diagnose
from shardwise.spec.layout import Layout

NEW_TEXT = (
    "[rank12]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 4 has a total capacity of 79.11 GiB of which "
    "1.25 GiB is free. Including non-PyTorch memory, this process has 77.85 GiB memory in use. Of the allocated memory 62.30 GiB is "
    "allocated by PyTorch, and 11.20 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLD_TEXT = (
    "RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 39.59 GiB total capacity; 37.00 GiB already allocated; "
    "14.19 MiB free; 37.50 GiB reserved in total by PyTorch)"
)
ITERATION = (
    " [2026-08-22 10:11:12] iteration {0:8d}/      10 | consumed samples:           24 | elapsed time per iteration (ms): {1:.1f} | "
    "throughput per GPU (TFLOP/s/GPU): 45.6 | learning rate: 3.000000E-04 | global batch size:     8 | lm loss: 1.003808E+01 | "
    "loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
MEMORY = (
    "[Rank 3] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 1.0 | mem-max-allocated-gigabytes: 40.0 | "
    "mem-reserved-gigabytes: 2.0 | mem-max-reserved-gigabytes: 50.0 | mem-alloc-retires: 0"
)


def test_current_out_of_memory_text() -> None:
    (fault,) = parse_log(NEW_TEXT).out_of_memory
    assert (fault.rank, fault.gpu, fault.tried_gib, fault.capacity_gib) == (12, 4, 2.0, 79.11)
    assert fault.allocated_gib == 62.30 and fault.reserved_gib == pytest.approx(73.5)
    assert fault.unallocated_gib == pytest.approx(11.2)


def test_older_out_of_memory_text() -> None:
    (fault,) = parse_log(OLD_TEXT).out_of_memory
    assert fault.rank is None and fault.tried_gib == 0.5
    assert (fault.capacity_gib, fault.allocated_gib, fault.reserved_gib) == (39.59, 37.0, 37.5)


def test_iterations_and_the_phase_of_a_failure() -> None:
    text = "\n".join(
        [
            ITERATION.format(1, 4000.0),
            ITERATION.format(2, 1500.0),
            ITERATION.format(3, 1700.0),
            "[rank0]: Traceback (most recent call last):",
            '[rank0]:   File "training.py", line 1, in train_step',
            "[rank0]:     self.optimizer.step()",
            NEW_TEXT.replace("rank12", "rank0"),
        ]
    )
    log = parse_log(text)
    assert [step.number for step in log.iterations] == [1, 2, 3]
    assert log.step_seconds == pytest.approx(1.6)  # the first step is the warm-up
    assert log.iterations[0].loss == pytest.approx(10.03808) and log.iterations[0].global_batch == 8
    assert log.out_of_memory[0].phase == "optimizer" and log.out_of_memory[0].after_iteration == 3


def test_memory_lines_are_decimal_gigabytes() -> None:
    (line,) = parse_log(MEMORY).memory
    assert (line.rank, line.iteration) == (3, 2)
    assert line.allocated_gib == pytest.approx(40e9 / 2**30) and line.reserved_gib == pytest.approx(50e9 / 2**30)


def test_memory_report_of_megatron_in_binary_megabytes() -> None:
    text = "[Rank 5] (after 2 iterations) memory (MB) | allocated: 1024.5 | max allocated: 40960.0 | reserved: 2e3 | max reserved: 51200.0"
    (line,) = parse_log(text).memory
    assert (line.rank, line.iteration, line.allocated_gib, line.reserved_gib) == (5, 2, 40.0, 50.0)


@pytest.mark.parametrize(
    ("text", "library"),
    [
        ("node1:411:982 [3] enqueue.cc:1234 NCCL WARN Cuda failure 2 'out of memory'", "NCCL"),
        ("node1:411:982 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'", "NCCL"),
        ("[rank3]: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuBLAS"),
    ],
)
def test_libraries_out_of_memory(text: str, library: str) -> None:
    log = parse_log(text)
    (fault,) = log.out_of_memory
    assert (fault.library, fault.allocated_gib, fault.unallocated_gib) == (library, None, None)
    (cause, *_) = diagnose(Evidence(layout=Layout(), log=log))
    assert cause.symptom == "out of memory in a library" and library in cause.evidence


@pytest.mark.parametrize("word", ["NAN", "nan", "NaN"])
def test_lost_losses_as_megatron_prints_them(word: str) -> None:
    (step,) = parse_log(ITERATION.format(1, 2.0).replace("1.003808E+01", word)).iterations
    assert step.loss != step.loss
    found = diagnose(Evidence(layout=Layout(cp=2, dp=1), log=TrainingLog(out_of_memory=(), iterations=(step,), memory=())))
    assert "NaN with CP" in [cause.symptom for cause in found]


def test_torchtitan_step_line() -> None:
    text = "[rank0]:step: 10  loss:  7.8163  grad_norm: 1.5  memory: 47.92GiB(60.53%)  tps: 7,142  tflops: 413.60  mfu: 41.82%"
    (step,) = parse_log(text).iterations
    assert (step.number, step.loss, step.tflops) == (10, 7.8163, 413.6)


def test_a_binary_file_a_missing_file_and_other_text_are_refused(tmp_path: Path) -> None:
    binary, prose = tmp_path / "core", tmp_path / "notes.txt"
    binary.write_bytes(bytes(range(256)))
    prose.write_text("nothing went wrong today\n")
    cases = ((binary, "binary"), (prose, "no CUDA out-of-memory text"), (tmp_path / "none", "No such file"), (tmp_path, "directory"))
    for path, words in cases:
        with pytest.raises(InputError, match=words):
            read_log(path)


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, len(NEW_TEXT)), noise=st.text(max_size=40))
def test_torn_lines_never_crash(cut: int, noise: str) -> None:
    for text in (NEW_TEXT[:cut] + noise, ITERATION.format(1, 2.0)[:cut] + noise, MEMORY[:cut] + noise, noise + OLD_TEXT[cut:]):
        parse_log(text)

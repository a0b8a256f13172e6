"""Rank tests on the world of a launcher: what is run, what is left out, and how failures end."""

import os
import subprocess
import sys

import pytest

TESTS = """
import pytest, torch
import torch.distributed as dist
from shardwise.testing import ranks

pytestmark = pytest.mark.multigpu_static

@ranks(2)
def test_both_take_part(world):
    x = torch.ones(1, device=world.device)
    dist.all_reduce(x)
    assert x.item() == 2

@ranks(2)
def test_rank_1_fails(world):
    if world.rank == 1:
        raise ValueError("this rank has had enough")

@ranks(2)
def test_the_next_one_works(world):
    dist.all_reduce(torch.ones(1, device=world.device))

@ranks(3)
def test_of_three_ranks(world):
    pass

def test_plain():
    assert dist.get_world_size() == 2

@ranks(2, timeout=2)
def test_rank_0_is_left_waiting(world):
    if world.rank == 1:
        raise ValueError("too much")
    dist.barrier()

@ranks(2)
def test_after_the_end(world):
    pass
"""


def run(folder, *command):
    (folder / "test_them.py").write_text(TESTS)
    arguments = [*command, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--multigpu-static", "test_them.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_launched_world_runs_marked_tests_and_stops_when_ranks_part(tmp_path):
    result = run(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = result.stdout + result.stderr
    assert result.returncode == 1
    for name in ("test_both_take_part", "test_the_next_one_works", "test_plain"):
        assert f"PASSED test_them.py::{name}" in output
    assert "FAILED test_them.py::test_rank_1_fails" in output
    assert "raised by rank 1 of 2" in output
    assert "needs 3 ranks, launched with 2" in output
    assert "rank 0 of 2 did not end the test within 2 s; the run stops" in output
    assert "PASSED test_them.py::test_after_the_end" not in output


def test_option_without_a_launcher_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    result = run(tmp_path)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--multigpu-static needs a launcher: torchrun" in result.stderr

"""Whole runs on local ranks: the smoke command, resume, SIGTERM, a rank that dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TINY = "llama32_1b_tiny_pretrain_config"
QUICK = ["model.num_layers=2", "model.seq_length=16", "model.vocab_size=64", "scheduler.lr_warmup_iters=0", "logger.log_interval=1"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def launch(*words: str, ranks: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "shardwise.train", *words]


def losses(path: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["iteration"]: row["lm loss"] for row in rows if row["kind"] == "iteration"}


def test_the_smoke_command_of_megatron_bridge_runs():
    words = [
        "--recipe", TINY, "model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2", "model.sequence_parallel=True",
        "train.train_iters=3", "train.global_batch_size=8", "train.micro_batch_size=1", "scheduler.lr_warmup_iters=0",
        "validation.eval_iters=0", "validation.eval_interval=0", "checkpoint.save_interval=0", "logger.log_interval=1",
    ]  # fmt: skip
    done = subprocess.run(launch(*words, ranks=4), capture_output=True, text=True, env=ENV, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "TP=2 PP=2 CP=1 EP=1 ETP=1 DP=1 (4 ranks)" in done.stdout
    predicted = re.search(
        r"step time \(seconds\): ([\d.]+) predicted, ([\d.]+) measured .* ([\d.]+) predicted, ([\d.]+) measured", done.stdout
    )
    assert predicted and all(float(each) > 0 for each in predicted.groups())
    found = re.findall(r"iteration +(\d+)/ +3 .*\| lm loss: (\d\.\d{6}E[+-]\d\d) \|", done.stdout)
    assert [int(step) for step, _ in found] == [1, 2, 3] and 9.5 < float(found[-1][1]) < 10.6


def test_a_resumed_run_under_another_layout_continues_with_equal_losses(tmp_path):
    common = ["--recipe", TINY, *QUICK, "train.train_iters=4", "validation.eval_iters=1", "validation.eval_interval=4"]

    def run(name: str, *words: str, ranks: int) -> dict[int, float]:
        log = tmp_path / f"{name}.jsonl"
        command = launch(*common, f"logger.jsonl={log}", *words, ranks=ranks)
        done = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "validation loss at iteration 4" in done.stdout or "exit_interval" in " ".join(words)
        return losses(log)

    whole = run("whole", ranks=1)
    first = run("first", "train.exit_interval=2", f"checkpoint.save={tmp_path / 'saved'}", ranks=1)
    rest = run("rest", "--resume", f"checkpoint.save={tmp_path / 'saved'}", "model.tensor_model_parallel_size=2", ranks=2)
    assert sorted(first) == [1, 2] and sorted(rest) == [3, 4]
    assert {**first, **rest} == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_and_ends(tmp_path, ranks):
    command = [sys.executable, "-m", "shardwise", "train", "--nproc", str(ranks), "--recipe", TINY, *QUICK]
    command += ["train.train_iters=100000", f"checkpoint.save={tmp_path}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENV)
    assert process.stdout is not None
    for line in process.stdout:
        if "iteration" in line:
            break
    launchers = _children(process.pid)
    started = [*launchers, *(child for launcher in launchers for child in _children(launcher))]
    assert ranks == 1 or len(started) > ranks
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 143
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    step = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert step >= 1 and (tmp_path / f"iter_{step:07d}" / "run.json").is_file()


def test_a_killed_rank_ends_the_run(tmp_path):
    words = ["--recipe", TINY, *QUICK, "train.train_iters=100000", f"logger.jsonl={tmp_path / 'log'}"]
    process = subprocess.Popen(launch(*words, ranks=2), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENV)
    until = time.monotonic() + 200
    while not (tmp_path / "log").exists() and time.monotonic() < until:
        time.sleep(0.5)
    (victim, *_) = _children(process.pid)
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0 and re.search(r"rank +: \d", errors) and "SIGKILL" in errors


def test_a_restarted_run_continues_from_its_last_checkpoint_with_equal_losses(tmp_path):
    common = ["--recipe", TINY, *QUICK, "train.train_iters=10", "validation.eval_iters=0"]
    saving = ["--resume", f"checkpoint.save={tmp_path / 'saved'}", "checkpoint.save_interval=1"]
    command = launch(*common, *saving, f"logger.jsonl={tmp_path / 'log'}", ranks=2)
    command.insert(command.index("--standalone"), "--max-restarts=1")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENV)
    until = time.monotonic() + 400
    while not (tmp_path / "saved" / "iter_0000003" / "run.json").exists() and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(_children(process.pid)[0], signal.SIGKILL)
    try:
        said, _ = process.communicate(timeout=600)
    finally:
        process.terminate()
    assert process.returncode == 0 and "yet: starting at iteration 0" in said and "resumed from" in said, said[-3000:]
    command = launch(*common, f"logger.jsonl={tmp_path / 'whole'}", ranks=1)
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "log") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_wrong_layout_is_refused_before_anything_starts():
    words = ["--recipe", TINY, "--nproc", "6", "model.tensor_model_parallel_size=3", "model.pipeline_model_parallel_size=4"]
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", *words], capture_output=True, text=True, env=ENV, timeout=60, check=False
    )
    assert done.returncode == 1 and "W1" in done.stderr and "T1" in done.stderr and "Traceback" not in done.stderr


def test_resume_needs_a_folder():
    command = [sys.executable, "-m", "shardwise", "train", "--recipe", TINY, "--resume"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=60, check=False)
    assert done.returncode == 2 and "--resume checkpoint.save=FOLDER" in done.stderr


def test_verify_reports_equality(tmp_path):
    command = [sys.executable, "-m", "shardwise", "verify", "--recipe", "qwen3_600m_pretrain_config", "--json", "--steps", "2"]
    done = subprocess.run(
        [*command, "model.pipeline_model_parallel_size=2"], capture_output=True, text=True, env=ENV, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    assert answer["equal"] and answer["layout"].startswith("TP=1 PP=2") and len(answer["losses"]) == 2

"""Every example runs on two ranks, is exact, and tells what it measured; started plainly it compares sizes of world."""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise import DistributedManager
from shardwise.testing import ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
EXACT = {"vector_add": 0.0, "dot_product": 1e-12, "convolution": 1e-12, "vae_decode": 1e-10, "video_decode": 1e-10, "ring_attention": 1e-5}
TRAINING = [
    ["--model", "vit", "--amp"],
    ["--model", "vit", "--ddp", "2", "--fsdp"],
    ["--model", "convnet", "--dims", "3", "--size", "12", "--batch", "2"],
    ["--model", "convnet", "--inference"],
    ["--model", "neighbourhood", "--dims", "3", "--size", "16", "--batch", "2", "--steps", "2"],
]


def _load(name):
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


def _run(name, words=()):
    module = _load(name)
    options: argparse.ArgumentParser = module.options()
    return module.run(options.parse_args(list(words)))


@pytest.mark.parametrize("name", sorted(EXACT))
@ranks(2, processes=True, timeout=120)
def test_example_is_exact(world, name):
    row = _run(name)
    assert row["error"] <= EXACT[name] and row["seconds"] > 0
    if name == "vector_add":
        assert row["bytes_sent"] == 0


@ranks(2, processes=True)
def test_neighbours_are_those_of_one_process(world):
    assert _run("knn")["wrong"] == 0


def _alone(name, words):
    """The losses of the same example in one process: run on one rank of the pool."""
    return [float(loss) for loss in _run(name, words)["losses"].split()]


@ranks(1, processes=True, timeout=120)
def _save_alone(world, path, name, words):
    Path(path).write_text(" ".join(map(str, _alone(name, words))))


@ranks(2, processes=True, timeout=120)
def _compare_split(world, path, name, words, tolerance):
    expected = [float(loss) for loss in Path(path).read_text().split()]
    assert _alone(name, words) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_training_loop_has_the_losses_of_one_process(tmp_path, words):
    path = str(tmp_path / "losses")
    _save_alone(path, "training_loop", words)
    _compare_split(path, "training_loop", words, 2e-2 if "--amp" in words else 1e-5)


def test_darcy_flow_has_the_losses_of_one_process(tmp_path):
    path = str(tmp_path / "losses")
    _save_alone(path, "darcy_fno", [])
    _compare_split(path, "darcy_fno", [], 1e-6)


@ranks(1, processes=True, timeout=120)
def _dies(world, words):
    assert _run("unet3d_memory", words)["losses"] == "out of memory"


@ranks(4, processes=True, timeout=120)
def _trains(world, words):
    assert float(_run("unet3d_memory", words)["losses"]) > 0


def test_volume_too_large_for_one_rank_trains_on_four():
    _dies([])
    _trains([])


def test_elevation_scripts_differ_in_few_lines_and_agree(tmp_path):
    one, split = ((EXAMPLES / "elevation" / f"{name}.py").read_text().splitlines()[1:] for name in ("single", "split"))
    assert [line for line in one if line not in split] == []
    assert len([line for line in split if line not in one]) <= 10
    alone = subprocess.run([sys.executable, str(EXAMPLES / "elevation" / "single.py")], capture_output=True, text=True, timeout=240)
    assert alone.returncode == 0, alone.stderr
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--redirects=1",
        f"--log-dir={tmp_path}",
    ]
    result = subprocess.run([*launcher, str(EXAMPLES / "elevation" / "split.py")], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    losses = [float(line) for line in alone.stdout.split()]
    of_ranks = [[float(line) for line in path.read_text().split()] for path in tmp_path.rglob("stdout.log")]
    assert len(losses) == 2 and len(of_ranks) == 2
    assert all(of_rank == pytest.approx(losses, rel=2e-5) for of_rank in of_ranks)


def test_scaling_table_and_plot(tmp_path):
    command = [sys.executable, str(EXAMPLES / "vector_add.py"), "--size", "101", "--ranks", "1", "2", "--plot", str(tmp_path / "plot.png")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    head, *rows = result.stdout.splitlines()
    assert head.split() == ["ranks", "seconds", "bytes_sent", "error", "speed-up"]
    assert [row.split()[0] for row in rows] == ["1", "2"]
    assert (tmp_path / "plot.png").stat().st_size > 0
    assert not DistributedManager.is_initialized()

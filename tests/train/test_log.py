"""The progress bar, and the planner's prediction beside the measured step."""

from __future__ import annotations

import io
import sys

import pytest

from shardwise.train.config import LoggerConfig
from shardwise.train.log import Log
from shardwise.train.predict import Cost, beside, catalog_name

VALUES = {
    "iteration": 2, "train_iters": 5, "consumed_samples": 16, "elapsed_ms": 1.0, "learning_rate": 1e-3, "global_batch_size": 8,
    "lm loss": 1.5, "grad_norm": 1.0,
}  # fmt: skip


class Terminal(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_drawn_on_terminals_only(monkeypatch, terminal):
    out = Terminal(terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    log = Log(LoggerConfig(), active=True, settings={}, steps=5)
    log.iteration(VALUES)
    log.step(2)
    log.close()
    assert "lm loss: 1.500000E+00 | loss scale: 1.0" in out.getvalue()
    assert ("2/5" in out.getvalue()) == terminal and ("\x1b[" in out.getvalue()) == terminal


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("Tesla K80", None),
    ],
)
def test_devices_are_known_by_their_own_name(device, name):
    assert catalog_name(device) == name


def test_prediction_and_measurement_stand_side_by_side():
    line = beside(Cost(seconds=1.5, memory=2**30), Cost(seconds=2.0, memory=2**29))
    assert "1.500 predicted, 2.000 measured" in line and "1.00 predicted, 0.50 measured" in line

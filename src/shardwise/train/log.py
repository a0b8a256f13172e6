"""What a run prints and writes: Megatron Bridge's lines on the console, one JSON object a line, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.train.config import LoggerConfig

if TYPE_CHECKING:
    from rich.progress import Progress


def iteration_line(values: Mapping[str, Any]) -> str:
    """The line of one logged iteration, in the format of Megatron Bridge."""
    parts = [
        f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {values['iteration']:8d}/{values['train_iters']:8d}",
        f"consumed samples: {values['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {values['elapsed_ms']:.1f}",
    ]
    if "tflops" in values:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {values['tflops']:.1f}")
    parts += [f"learning rate: {values['learning_rate']:.6E}", f"global batch size: {values['global_batch_size']:5d}"]
    parts += [f"lm loss: {values['lm loss']:.6E}"]
    parts += [f"{name}: {value:.6E}" for name, value in values.get("routers", {}).items()]
    nan = int(values["lm loss"] != values["lm loss"])
    parts += ["loss scale: 1.0", f"grad norm: {values['grad_norm']:.3f}"]
    parts += [f"number of skipped iterations: {0:3d}", f"number of nan iterations: {nan:3d} |"]
    return " | ".join(parts)


def validation_line(iteration: int, loss: float) -> str:
    return (
        f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {2.718281828459045 ** min(loss, 50):.6E} | "
    )


class Log:
    """Writes on one rank only; `active` says whether this is it. steps: of the whole run, for the progress bar on a terminal."""

    def __init__(self, config: LoggerConfig, *, active: bool, settings: Mapping[str, Any], steps: int = 0) -> None:
        self.active = active
        self._file = self._board = self._wandb = None
        self._bar = _progress_bar(steps) if active and steps and sys.stdout.isatty() else None
        if not active:
            return
        if config.jsonl:
            Path(config.jsonl).parent.mkdir(parents=True, exist_ok=True)
            self._file = Path(config.jsonl).open("a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        if config.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(config.tensorboard_dir)
        if config.wandb_project:
            import wandb

            self._wandb = wandb.init(project=config.wandb_project, config=dict(settings))

    def iteration(self, values: Mapping[str, Any]) -> None:
        if not self.active:
            return
        self._print(iteration_line(values))
        self._write({"kind": "iteration", **values})

    def validation(self, iteration: int, loss: float) -> None:
        if not self.active:
            return
        self._print(validation_line(iteration, loss))
        self._write({"kind": "validation", "iteration": iteration, "validation loss": loss})

    def line(self, text: str, values: dict[str, Any]) -> None:
        """One line on the console; `values` where lines of JSON go."""
        if self.active:
            self._print(text)
            self._write(values)

    def step(self, number: int) -> None:
        """This many steps are done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=number)

    def _print(self, text: str) -> None:
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _write(self, values: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, values["iteration"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=values["iteration"])

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        for each in (self._file, self._board):
            if each is not None:
                each.close()
        if self._wandb is not None:
            self._wandb.finish()


def _progress_bar(steps: int) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(TextColumn("iteration"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar.add_task("iteration", total=steps)
    bar.start()
    return bar

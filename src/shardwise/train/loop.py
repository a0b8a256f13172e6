"""A run from its configuration to its last step, on the ranks that exist."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.mesh.process import DistributedManager
from shardwise.parallel.build import parallelize_model
from shardwise.parallel.router import Balance
from shardwise.parallel.step_optimizer import StepOptimizer
from shardwise.parallel.topology import connect
from shardwise.train import dist_checkpoint
from shardwise.train.config import RunConfig
from shardwise.train.data import open_dataset
from shardwise.train.log import Log
from shardwise.train.model import transformers_config
from shardwise.train.plan import RunPlan, in_bf16, in_fp32
from shardwise.train.predict import Cost, PeakMemory, beside, predict
from shardwise.train.profile import profiled
from shardwise.train.schedule import learning_rate
from shardwise.train.step import Trainer


def balance_of(config: RunConfig) -> Balance:
    m = config.model
    return Balance(
        kind=m.moe_router_load_balancing_type,
        coefficient=m.moe_aux_loss_coeff,
        z_coefficient=m.moe_z_loss_coeff,
        score=m.moe_router_score_function,
        bias_rate=m.moe_router_bias_update_rate,
    )


def make_optimizer(config: RunConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Matrices get weight decay, vectors (norms, biases) none."""
    o = config.optimizer
    for group in groups:
        group["weight_decay"] = o.weight_decay if group.pop("decayed") else 0.0
    if o.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=o.lr)
    return torch.optim.AdamW(groups, lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps, fused=True)


class Run:
    """Everything one rank needs. Communication on creation: process groups."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan, self.config = plan, plan.config
        DistributedManager.initialize()
        self.device = DistributedManager().device
        self.topology = connect(plan.layout, timeout=timedelta(minutes=self.config.dist.distributed_timeout_minutes))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        mixed = self.config.mixed_precision or ("bf16_mixed" if self.device.type == "cuda" else "fp32")
        layout = (in_bf16 if mixed == "bf16_mixed" else in_fp32)(plan.layout)
        self.predicted = predict(plan.spec, layout, self.config.model.seq_length, self.device) if plan.spec else None
        self.memory = PeakMemory(self.device)
        hf_config = transformers_config(plan.hf_fields)
        start = self.config.checkpoint.pretrained_checkpoint
        self.model = parallelize_model(
            hf_config,
            self.topology,
            seed=self.config.rng.seed,
            device=self.device,
            balance=balance_of(self.config),
            source=dist_checkpoint.import_pretrained(Path(start)) if start else None,
            dtype=torch.bfloat16 if mixed == "bf16_mixed" else torch.float32,
        )
        self.optimizer = StepOptimizer(self.model, lambda groups: make_optimizer(self.config, groups), self.config.optimizer.clip_grad)
        self.trainer = Trainer(self.model, self.optimizer)
        self.data = open_dataset(self.config, self.model.vocab)
        self.step = 0
        self._stopping = False

    def resume(self) -> None:
        """Continue from `checkpoint.load` when a checkpoint is there."""
        folder = self.config.checkpoint.load
        path = dist_checkpoint.latest(Path(folder)) if folder else None
        if path is not None:
            about = dist_checkpoint.load(path, self.model, self.optimizer)
            self.step = int(about["iteration"])
            self._say(f"resumed from {path} at iteration {self.step}")
        elif folder:
            self._say(f"no checkpoint in {folder} yet: starting at iteration 0")

    def train(self) -> None:
        """Steps until `train_iters`, an exit condition or SIGTERM; then a last checkpoint where `checkpoint.save` is given."""
        config = self.config
        log = Log(config.logger, active=self.rank == self.world - 1, settings=asdict(config), steps=config.train.train_iters)
        with closing(log):
            self._train(log)

    def _train(self, log: Log) -> None:
        config, layout = self.config, self.plan.layout
        each = layout.gbs // layout.dp
        begun = last = time.perf_counter()
        saved = self.step
        losses: list[float] = []
        warm = self.step + 1  # the first step makes buffers and optimizer state
        with self._stop_on_sigterm(), profiled(config.profiling, self.rank, self.device) as mark:
            while self.step < config.train.train_iters and not self._stop(begun):
                self.step += 1
                rate = learning_rate(config, self.step)
                for group in self.optimizer.optimizer.param_groups:
                    group["lr"] = rate
                first = (self.step - 1) * layout.gbs + self.topology.dp_rank * each
                started = time.perf_counter()
                result = self.trainer.train(self.data.train(first, each, self.device))
                if self.step == warm + 1:
                    self._hold_beside(log, time.perf_counter() - started)
                losses.append(result.loss)
                mark(self.step)
                log.step(self.step)
                if config.logger.log_interval and self.step % config.logger.log_interval == 0:
                    now = time.perf_counter()
                    log.iteration(self._values(result.grad_norm, losses, result.routers or {}, rate, now - last))
                    losses, last = [], now
                if config.validation.eval_interval and self.step % config.validation.eval_interval == 0:
                    log.validation(self.step, self.evaluate())
                if config.checkpoint.save and config.checkpoint.save_interval and self.step % config.checkpoint.save_interval == 0:
                    self.save()
                    saved = self.step
        if config.validation.eval_iters and config.validation.eval_interval:
            log.validation(self.step, self.evaluate())
        if config.checkpoint.save and saved != self.step:
            self.save()

    def _hold_beside(self, log: Log, seconds: float) -> None:
        """The planner's prediction beside this step. Communication: one all-reduce."""
        if self.predicted is not None:
            measured = Cost(seconds=seconds, memory=self.memory.heaviest())
            values = {"predicted": asdict(self.predicted), "measured": asdict(measured)}
            log.line(beside(self.predicted, measured), {"kind": "prediction", "iteration": self.step, **values})

    def evaluate(self) -> float:
        """Mean loss of `eval_iters` global batches of held-out samples."""
        layout, count = self.plan.layout, self.config.validation.eval_iters
        each = layout.gbs // layout.dp
        total = 0.0
        for index in range(count):
            samples = self.data.evaluation(index * layout.gbs + self.topology.dp_rank * each, each, self.device)
            total += self.trainer.evaluate(samples).loss
        return total / max(1, count)

    def save(self) -> None:
        about = {"model": self.plan.hf_fields, "layout": self.plan.layout_line}
        target = Path(self.config.checkpoint.save or "")
        path = dist_checkpoint.save(target, self.step, self.model, self.optimizer, about, self.config.checkpoint.most_recent_k)
        self._say(f"saved {path}")

    def _values(self, norm: float, losses: list[float], routers: dict[str, float], rate: float, seconds: float) -> dict[str, Any]:
        layout = self.plan.layout
        values = {
            "iteration": self.step,
            "train_iters": self.config.train.train_iters,
            "consumed_samples": self.step * layout.gbs,
            "elapsed_ms": 1000 * seconds / len(losses),
            "learning_rate": rate,
            "global_batch_size": layout.gbs,
            "lm loss": sum(losses) / len(losses),
            "routers": routers,
            "grad_norm": norm,
        }
        if self.config.logger.log_throughput and self.plan.spec is not None:
            tokens = layout.gbs * self.config.model.seq_length * len(losses) / seconds
            values["tflops"] = 6 * self.plan.spec.active_params * tokens / layout.world / 1e12
        return values

    def _stop(self, begun: float) -> bool:
        """Whether to stop here: decided together, so that all ranks leave after the same step."""
        t = self.config.train
        if t.exit_interval and self.step and self.step % t.exit_interval == 0:
            return True
        late = t.exit_duration_in_mins is not None and (time.perf_counter() - begun) / 60 > t.exit_duration_in_mins
        flag = torch.tensor(int(self._stopping or late), device=self.device)
        if self.world > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    @contextmanager
    def _stop_on_sigterm(self) -> Iterator[None]:
        def stop(*_: object) -> None:
            self._stopping = True

        before = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @property
    def stopped(self) -> bool:
        """Whether SIGTERM ended the run."""
        return self._stopping

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def run(plan: RunPlan) -> int:
    """Train as planned; the exit code: 0, or 143 when SIGTERM ended it (after saving)."""
    begun = time.perf_counter()
    DistributedManager.initialize()
    rank = dist.get_rank()
    if rank == 0:
        print(plan.layout_line, flush=True)
        for finding in plan.findings:
            print(finding, flush=True)
    whole = Run(plan)
    whole.resume()
    if rank == 0:
        print(f"time to initialize (seconds): {time.perf_counter() - begun:.3f}", flush=True)
    whole.train()
    stopped = whole.stopped
    DistributedManager.cleanup()
    return 143 if stopped else 0

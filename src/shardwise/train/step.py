"""One training step of a parallel model: the same for every layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.build import ParallelModel
from shardwise.parallel.pipeline import Loss, MicroBatch, Pipeline
from shardwise.parallel.step_optimizer import StepOptimizer
from shardwise.parallel.token_loss import token_loss
from shardwise.train.batches import Samples, counted_tokens, micro_batches


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """loss: mean over all counted tokens of the step, the same on every rank. routers: router losses by name. tokens: counted tokens."""

    loss: float
    tokens: int
    grad_norm: float = 0.0
    routers: dict[str, float] | None = None


class Trainer:
    """Runs steps."""

    def __init__(self, model: ParallelModel, optimizer: StepOptimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.pipeline = Pipeline(model)
        self.topology = model.topology

    def _loss(self, tokens: int) -> Loss:
        group = self.topology["tp"].group

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return token_loss(logits, labels, self.model.vocab, group) / max(1, tokens)

        return loss

    def _prepare(self, samples: Samples) -> tuple[list[MicroBatch], int]:
        batches = micro_batches(samples, self.topology, self.topology.layout.mbs)
        count = torch.tensor(counted_tokens(batches), device=samples.tokens.device)
        if self.topology["dp_cp"].group is not None:
            dist.all_reduce(count, group=self.topology["dp_cp"].group)
        return batches, int(count)

    @property
    def device(self) -> torch.device:
        return self.model.parameters[0][0].device

    def train(self, samples: Samples) -> StepResult:
        """One step on the samples of this rank's replica ([gbs / dp, S]). Raises `ValueError` when they are not whole micro batches."""
        layout = self.topology.layout
        if samples.size != layout.mbs * layout.microbatches:
            raise ValueError(f"{samples.size} samples are not {layout.microbatches} micro batches of {layout.mbs}")
        batches, tokens = self._prepare(samples)
        self.optimizer.zero_grad()
        self.model.routers.start(weight=1.0 / (layout.microbatches * layout.dp), batch=layout.mbs)
        total = self.pipeline.train(batches, self._loss(tokens), self.optimizer.sums if layout.overlap_grad_reduce else None)
        norm = self.optimizer.step()
        self.model.routers.update_bias()
        return StepResult(loss=self._everywhere(total), tokens=tokens, grad_norm=norm, routers=self._router_values())

    def evaluate(self, samples: Samples) -> StepResult:
        """Loss of the samples of this rank's replica, without gradients."""
        batches, tokens = self._prepare(samples)
        total = self.pipeline.evaluate(batches, self._loss(tokens))
        return StepResult(loss=self._everywhere(total), tokens=tokens)

    def _everywhere(self, total: Tensor) -> float:
        """The loss, from the shares of the last stages; ranks of one tensor parallel group hold the same share."""
        share = total.detach().double() if self.topology["tp"].rank == 0 else torch.zeros((), dtype=torch.float64, device=total.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(share)
        return float(share)

    def _router_values(self) -> dict[str, float]:
        balance = self.model.routers.balance
        names = [name for name, used in (("load_balancing_loss", balance.coefficient), ("z_loss", balance.z_coefficient)) if used]
        if not names:
            return {}
        values = torch.tensor([float(self.model.routers.values.get(name, 0.0)) for name in names], dtype=torch.float64)
        values = values.to(self.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(values)
        same = self.topology.layout.tp * self.topology.layout.cp
        return dict(zip(names, (values / same).tolist(), strict=True))

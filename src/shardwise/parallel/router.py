"""Auxiliary losses of routers, attached to the router's output so that they reach its gradient on any pipeline stage.

Formulas are those of Megatron Core's `TopKRouter`: the load-balancing loss of Fedus et al. (arXiv:2101.03961) over the tokens of one micro
batch, or per sequence, and the z-loss of Zoph et al. (arXiv:2202.08906).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.collectives.functional import sum_forward
from shardwise.parallel.roles import Roles
from shardwise.parallel.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Balance:
    """kind: over the micro batch ("aux_loss"), per sequence ("seq_aux_loss"), or none. Coefficients multiply each layer's loss.

    score: how logits become the probabilities of the loss. bias_rate: step of the expert bias per training step (0: fixed).
    """

    kind: Literal["aux_loss", "seq_aux_loss", "none"] = "none"
    coefficient: float = 0.0
    z_coefficient: float = 0.0
    score: Literal["softmax", "sigmoid"] = "softmax"
    bias_rate: float = 0.0


@dataclass(kw_only=True)
class RouterLosses:
    """The losses of one step. `weight`: share of one micro batch in the step's loss; set before the step.

    values: sums of the weighted losses of this rank's routers, by name. counts: tokens per expert of each router with a bias.
    """

    topology: Topology | None
    balance: Balance
    weight: float = 1.0
    batch: int = 1
    values: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, tuple[nn.Module, Tensor]] = field(default_factory=dict)
    again: bool = False

    @contextmanager
    def running_again(self) -> Iterator[None]:
        """A forward that was counted before runs once more, for its backward."""
        before, self.again = self.again, True  # regions that run again may lie in one another
        try:
            yield
        finally:
            self.again = before

    def add(self, name: str, loss: Tensor) -> None:
        if not self.again:
            self.values[name] = self.values.get(name, 0.0) + loss.detach()

    def start(self, *, weight: float, batch: int) -> None:
        self.weight, self.batch = weight, batch
        self.values = {}
        self.counts = {}

    def update_bias(self) -> None:
        """Move every expert bias towards balance (DeepSeek-V3 report). Communication: one all-reduce of counts per router."""
        for module, count in self.counts.values():
            if self.topology is not None and self.topology["tp_dp_cp"].group is not None:
                dist.all_reduce(count, group=self.topology["tp_dp_cp"].group)
            module.e_score_correction_bias += self.balance.bias_rate * torch.sign(count.float().mean() - count)


class _Attach(torch.autograd.Function):
    """The value unchanged; its backward also sends 1 to the loss."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device = loss.shape, loss.dtype, loss.device
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones(ctx.shape, dtype=ctx.dtype, device=ctx.device)


def routers(model: PreTrainedModel, roles: Roles) -> Iterator[tuple[str, nn.Module]]:
    """The routers: siblings of the experts with a weight of one row per expert."""
    for path in roles.experts:
        parent, _, name = path.rpartition(".")
        try:
            block = model.get_submodule(parent)
        except AttributeError:
            continue
        for child, module in block.named_children():
            if child != name and type(module) is not nn.Linear and getattr(module, "top_k", None) and hasattr(module, "weight"):
                yield f"{parent}.{child}", module


def watch_routers(model: PreTrainedModel, roles: Roles, losses: RouterLosses) -> None:
    """Attach the losses to every router, whose forward returns (logits, weights, indices)."""
    balance = losses.balance
    if balance.kind == "none" and not balance.z_coefficient and not balance.bias_rate:
        return
    for path, router in routers(model, roles):
        router.register_forward_hook(lambda module, _, output, path=path: _after(path, module, output, losses))


def _after(path: str, module: nn.Module, output: tuple[Tensor, ...], losses: RouterLosses) -> tuple[Tensor, ...] | None:
    if not torch.is_grad_enabled():
        return None
    logits, weights, index = output
    balance, total = losses.balance, 0.0
    if balance.bias_rate and hasattr(module, "e_score_correction_bias") and not losses.again:
        count = torch.bincount(index.reshape(-1), minlength=logits.shape[-1])
        known = losses.counts.get(path)
        losses.counts[path] = (module, count if known is None else known[1] + count)
    if balance.kind != "none" and balance.coefficient:
        loss = balance.coefficient * losses.weight * _load(logits.float(), index.shape[-1], losses)
        losses.add("load_balancing_loss", loss)
        total = total + loss
    if balance.z_coefficient:
        loss = balance.z_coefficient * losses.weight * _z(logits.float(), losses)
        losses.add("z_loss", loss)
        total = total + loss
    return (logits, _Attach.apply(weights, total), index) if isinstance(total, Tensor) else None


def _group(losses: RouterLosses) -> dist.ProcessGroup | None:
    """The ranks that hold different tokens of one micro batch."""
    if losses.topology is None:
        return None
    return losses.topology["tp_cp" if losses.topology.layout.sp else "cp"].group


def _sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return x if group is None else sum_forward(x, group)


def _load(logits: Tensor, choices: int, losses: RouterLosses) -> Tensor:
    """E / (k T^2) * sum over experts of (tokens that choose it) * (sum of its probabilities), over the micro batch or per sequence."""
    experts = logits.shape[-1]
    if losses.balance.score == "sigmoid":
        scores = logits.sigmoid()
        probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    else:
        probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.detach().topk(choices, -1).indices, 1.0)
    parts = losses.batch if losses.balance.kind == "seq_aux_loss" else 1
    group = _group(losses)
    rows = torch.tensor(float(logits.shape[0] // parts), device=logits.device)
    sums = _sum(torch.stack((chosen, probabilities)).view(2, parts, -1, experts).sum(2), group)
    tokens = _sum(rows, group)
    return experts / (choices * tokens**2) * (sums[0].detach() * sums[1]).sum() / parts


def _z(logits: Tensor, losses: RouterLosses) -> Tensor:
    group = _group(losses)
    square = torch.logsumexp(logits, -1).square().sum()
    return _sum(square, group) / _sum(torch.tensor(float(logits.shape[0]), device=logits.device), group)

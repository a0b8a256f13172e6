"""Proof that a layout computes what one process computes: the same recipe both ways, compared.

The reference is the model class of `transformers` in one process, with its own attention and its own weights object, torch's AdamW and
torch's gradient clipping. Only the initial weights and the samples are shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.parallel.build import ParallelModel, parallelize_model
from shardwise.parallel.gradients import local
from shardwise.parallel.roles import read_roles
from shardwise.parallel.router import Balance, RouterLosses, watch_routers
from shardwise.parallel.stage import build_meta
from shardwise.parallel.step_optimizer import StepOptimizer
from shardwise.parallel.token_loss import IGNORED
from shardwise.parallel.topology import connect
from shardwise.parallel.weights import initial_state
from shardwise.spec.layout import Layout
from shardwise.train.batches import Samples
from shardwise.train.step import Trainer

TOLERANCE = 1e-5  # relative, float32: sums are taken in another order


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How weights are updated, in numbers. mbs: samples of a micro batch (the auxiliary losses are taken per micro batch)."""

    mbs: int
    lr: float = 3e-4
    decay: float = 0.1
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    seed: int = 1234
    balance: Balance = field(default_factory=Balance)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one process computed. gradients: of the first step, after clipping; weights: after the last one."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def make_adamw(rules: Rules, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    for group in groups:
        group["weight_decay"] = rules.decay if group.pop("decayed") else 0.0
    return torch.optim.AdamW(groups, lr=rules.lr, betas=rules.betas, eps=rules.eps)


def reference(config: Any, steps: list[Samples], rules: Rules) -> Reference:
    """Train the whole model in this process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(initial_state(build_meta(config), rules.seed), strict=False)
    model.tie_weights()
    model.train()
    routers = RouterLosses(topology=None, balance=rules.balance)
    watch_routers(model, read_roles(model), routers)
    parameters = dict(model.named_parameters())
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim <= 1]
    groups = [{"params": params, "decayed": decayed} for params, decayed in ((matrices, True), (vectors, False)) if params]
    optimizer = make_adamw(rules, groups)
    losses, norms, gradients = [], [], {}
    for number, samples in enumerate(steps):
        optimizer.zero_grad()
        count, total = int((samples.labels != IGNORED).sum()), 0.0
        routers.start(weight=rules.mbs / samples.size, batch=rules.mbs)
        for start in range(0, samples.size, rules.mbs):
            rows = samples.rows(start, start + rules.mbs)
            logits = model(input_ids=rows.tokens, position_ids=rows.positions, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), rows.labels.flatten(), ignore_index=IGNORED, reduction="sum") / max(
                1, count
            )
            loss.backward()
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(parameters.values()), rules.clip)))
        if number == 0:
            gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}
        optimizer.step()
        routers.update_bias()
        losses.append(total)
    return Reference(losses=losses, norms=norms, gradients=gradients, weights={name: p.detach().clone() for name, p in parameters.items()})


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Largest relative differences. first: the first parameter in model order whose gradient differs by more than the tolerance."""

    loss: float
    norm: float
    gradient: float
    weight: float
    worst: str
    first: str | None
    losses: list[float]
    expected: list[float]

    @property
    def equal(self) -> bool:
        return max(self.loss, self.norm, self.gradient, self.weight) <= TOLERANCE


def relative(value: Tensor, expected: Tensor, whole: Tensor, floor: float = 0.0) -> float:
    """|value - expected| over the norm of the whole parameter, scaled to the size of the part; at least over `floor`."""
    if value.numel() == 0:
        return 0.0
    scale = max(float(whole.double().norm()) * (value.numel() / whole.numel()) ** 0.5, floor)
    difference = float((value.double() - expected.double()).norm())
    return difference / scale if scale else difference


def gradient_differences(optimizer: StepOptimizer, expected: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """A gradient that vanishes (the queries' at a single key) is rounding noise: it is held to the norm of the whole gradient."""
    floor = 1e-4 * sum(float(each.double().square().sum()) for each in expected.values()) ** 0.5
    for each in optimizer.updated:
        if each.value.grad is not None:
            whole = expected[each.held.name]
            yield each.held.name, relative(local(each.value.grad), each.part.take(whole), whole, floor)


def weight_differences(model: ParallelModel, optimizer: StepOptimizer, expected: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    for each in optimizer.updated:
        whole = expected[each.held.name]
        yield each.held.name, relative(local(each.value).detach(), each.part.take(whole), whole)
    if not model.fsdp:
        for parameter, held in model.parameters:
            whole = expected[held.name]
            yield held.name, relative(parameter.detach(), held.part.take(whole), whole)


def compare(config: Any, layout: Layout, steps: list[Samples], rules: Rules, expected: Reference | None) -> Parity:
    """Train under `layout` on the running world and compare. `expected` is needed on rank 0 only. All ranks get the same answer."""
    box = [expected]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, 0)
    known = box[0]
    assert known is not None
    topology = connect(layout)
    model = parallelize_model(config, topology, seed=rules.seed, device=torch.device("cpu"), balance=rules.balance)
    optimizer = StepOptimizer(model, lambda groups: make_adamw(rules, groups), rules.clip)
    trainer = Trainer(model, optimizer)
    losses, norms, gradients = [], [], {}
    for number, samples in enumerate(steps):
        each = samples.size // layout.dp
        result = trainer.train(samples.rows(topology.dp_rank * each, (topology.dp_rank + 1) * each))
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if number == 0:
            gradients = dict(gradient_differences(optimizer, known.gradients))
    weights: dict[str, float] = {}
    for name, difference in weight_differences(model, optimizer, known.weights):
        weights[name] = max(difference, weights.get(name, 0.0))
    return _combine(losses, norms, gradients, weights, known)


def _combine(losses: list[float], norms: list[float], gradients: dict[str, float], weights: dict[str, float], known: Reference) -> Parity:
    everyone: list[Any] = [(gradients, weights)]
    if dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (gradients, weights))
    grads = {name: max(each[0].get(name, 0.0) for each in everyone) for name in known.gradients}
    after = {name: max(each[1].get(name, 0.0) for each in everyone) for name in known.weights}
    worst = max(after, key=lambda name: after[name])
    return Parity(
        loss=max(_off(a, b) for a, b in zip(losses, known.losses, strict=True)),
        norm=max(_off(a, b) for a, b in zip(norms, known.norms, strict=True)),
        gradient=max(grads.values()),
        weight=after[worst],
        worst=worst,
        first=next((name for name, difference in grads.items() if not difference <= TOLERANCE), None),
        losses=losses,
        expected=known.losses,
    )


def _off(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if b else abs(a - b)

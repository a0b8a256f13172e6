"""Learning rate over the steps, as Megatron's scheduler computes it."""

from __future__ import annotations

import math

from shardwise.train.config import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """Rate of the step with this number, counted from 1: linear warmup, then cosine or linear decay to `min_lr`, or constant."""
    scheduler, optimizer = config.scheduler, config.optimizer
    decay = scheduler.lr_decay_iters or config.train.train_iters
    warmup = min(scheduler.lr_warmup_iters, max(0, decay - 1))
    if warmup and step <= warmup:
        return scheduler.lr_warmup_init + (optimizer.lr - scheduler.lr_warmup_init) * step / warmup
    if scheduler.lr_decay_style == "constant":
        return optimizer.lr
    if step > decay:
        return optimizer.min_lr
    share = (step - warmup) / max(1, decay - warmup)
    factor = 1 - share if scheduler.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * share) + 1)
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * factor

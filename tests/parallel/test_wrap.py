"""One model, one loop, every combination of axes and wrappers: the same training as in one process."""

import pytest
import torch
from tests.parallel.training import Setup, furthest, train_alone, train_split

from shardwise.testing import ranks

STEPS = 20
TOLERANCE = 1e-6
SMOKE = (
    Setup(ddp=4, domain=1),
    Setup(ddp=1, domain=4),
    Setup(ddp=2, domain=2),
    Setup(ddp=2, domain=2, fsdp=True),
    Setup(ddp=2, domain=2, fsdp=True, spatial="auto"),
    Setup(ddp=1, domain=4, fsdp=True),
    Setup(ddp=1, domain=4, fsdp=True, spatial="auto"),
    Setup(ddp=4, domain=1, fsdp=True),
    Setup(ddp=1, domain=4, accumulate=4),
    Setup(ddp=2, domain=2, accumulate=2),
    Setup(ddp=2, domain=2, fsdp=True, accumulate=2),
    Setup(ddp=2, domain=2, fsdp=True, spatial="auto", accumulate=2),
)
COMPILED = (
    Setup(ddp=1, domain=4, compiled=True),
    Setup(ddp=2, domain=2, compiled=True),
    Setup(ddp=2, domain=2, fsdp=True, compiled=True),
    Setup(ddp=2, domain=2, fsdp=True, spatial="auto", compiled=True),
)


def _compare(world, setups, dtype, steps, tolerance):
    reference = train_alone(dtype, steps)
    problems = []
    for setup in setups:
        mesh = world.make_mesh((setup.ddp, setup.domain), ("ddp", "domain"))
        far = furthest(train_split(setup, mesh, dtype, steps), reference)
        problems += [f"{setup}: {name} differ by {value:.2e}" for name, value in far.items() if not value <= tolerance]
    assert problems == []


@ranks(4, processes=True, timeout=300)
def test_training_equals_one_process(world):
    _compare(world, SMOKE, torch.float32, STEPS, TOLERANCE)


@ranks(4, processes=True, timeout=300)
def test_compiled_training_equals_one_process(world):
    _compare(world, COMPILED, torch.float32, 5, TOLERANCE)

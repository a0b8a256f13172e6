"""A gradient of a gradient, as in a gradient penalty, equals that of one process: of inputs and of weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.testing import assert_same_as_unsharded, ranks, shard

FUNCTIONS = {
    "pointwise": lambda x: x.sin() * x * x,
    "sum along the sharded dim": lambda x: x.sum(1).square(),
    "sum beside a sharded operand": lambda x: x.sin() * x.sum(1, keepdim=True),
    "sum of everything": lambda x: x * x.sum(),
    "mean": lambda x: x.mean((0, 1)) * x,
    "var": lambda x: x.var(1, keepdim=True) * x,
    "softmax": lambda x: x.softmax(1) * x,
    "maximum": lambda x: x.amax(1, keepdim=True) * x * x,
    "product that contracts": lambda x: x.mT @ x,
    "einsum": lambda x: torch.einsum("bnc,bnd,bd->bc", x, x, x.sum(1)),
    "cumsum": lambda x: x.cumsum(1) * x,
    "rows picked": lambda x: x[:, [3, 0, 3]].square() * x[:, 1:4],
    "cross entropy": lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(16) % 4),
    "mse": lambda x: F.mse_loss(x, x.detach() + 1),
    "pad and interpolate": lambda x: F.interpolate(F.pad(x.mT, (2, 1), "reflect"), scale_factor=2, mode="linear").pow(3),
    "fft": lambda x: torch.fft.rfft(x, dim=1).abs().square(),
}
MODULES = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
    "convolution": lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv1d(3, 2, 3, 2)),
    "transposed convolution": lambda: nn.Sequential(nn.ConvTranspose1d(2, 3, 3, 2), nn.Tanh()),
    "group norm": lambda: nn.Sequential(nn.Conv1d(2, 4, 1), nn.GroupNorm(2, 4), nn.Tanh()),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Tanh()),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(4), nn.Tanh()),
}


def penalty(function):
    """The squared gradient of `function`, by rows."""

    def of(x):
        (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return gradient.square().sum(1)

    return of


class Penalty(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return penalty(self.module)(x) + self.module(x).sum()


@pytest.mark.parametrize("name", FUNCTIONS)
@ranks(3)
def test_functions(world, name):
    for sizes in ((3, 1, 4), (7, 0, 1)):
        assert_same_as_unsharded(penalty(FUNCTIONS[name]), shard(world.randn(2, 8, 4), world.mesh, dim=1, sizes=sizes))


@pytest.mark.parametrize("name", MODULES)
@ranks(3)
def test_modules(world, name):
    split = {"linear": 1, "layer norm": 1}.get(name, 2)
    shape = (2, 8, 4) if split == 1 else (2, 2, 8)
    for sizes in ((3, 1, 4), (7, 0, 1)):
        module = world.same(lambda: Penalty(MODULES[name]()).double())
        assert_same_as_unsharded(module, shard(world.randn(*shape), world.mesh, dim=split, sizes=sizes))

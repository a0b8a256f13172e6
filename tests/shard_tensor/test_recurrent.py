"""Recurrent layers over split sequences: one process's numbers, weights' gradients and last states."""

import pytest
import torch
from torch import nn

from shardwise import fallback
from shardwise.testing import assert_same_as_unsharded, count_communication, ranks, shard

LAYERS = {
    "two-layer LSTM": lambda: nn.LSTM(5, 4, 2, batch_first=True),
    "bidirectional LSTM": lambda: nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True),
    "bidirectional GRU": lambda: nn.GRU(5, 4, batch_first=True, bidirectional=True),
    "RNN without bias": lambda: nn.RNN(5, 4, batch_first=True, bias=False),
}


class Layer(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.layer = LAYERS[name]().double()
        for number, weight in enumerate(self.layer.parameters()):
            weight.data.copy_(torch.linspace(-0.6, 0.5, weight.numel()).roll(number).view(weight.shape))

    def forward(self, x, *state):
        output, last = self.layer(x, *state)
        return (output, *last) if isinstance(last, tuple) else (output, last)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("sizes", [(5, 3, 6, 2), (0, 7, 0, 9)], ids=["uneven", "empty"])
@ranks(4)
def test_the_state_goes_from_rank_to_rank(world, name, sizes):
    x = shard(world.randn(2, 16, 5), world.mesh, dim=1, sizes=sizes)
    assert_same_as_unsharded(Layer(name), x)


@pytest.mark.parametrize("name", LAYERS)
@ranks(4)
def test_many_sequences_take_the_split_over(world, name):
    x = shard(world.randn(5, 16, 5), world.mesh, dim=1, sizes=(6, 0, 7, 3))
    layer = Layer(name)
    assert_same_as_unsharded(layer, x)
    with count_communication() as counted, fallback("error"):
        output = layer(x)[0]
    assert [(record.collective, record.calls) for record in counted.records] == [("all_to_all", 2)]
    assert output._spec.sizes == x._spec.sizes


@pytest.mark.parametrize("name", LAYERS)
@ranks(3)
def test_a_split_batch_sends_nothing(world, name):
    x = shard(world.randn(6, 4, 5), world.mesh, dim=0, sizes=(4, 0, 2))
    layer = Layer(name)
    assert_same_as_unsharded(layer, x)
    with count_communication() as counted, fallback("error"):
        layer(x)
    assert counted.calls == 0


@ranks(3)
def test_a_given_state_has_its_gradient(world):
    x = shard(world.randn(2, 9, 5), world.mesh, dim=1, sizes=(4, 0, 5))
    assert_same_as_unsharded(Layer("bidirectional GRU"), x, world.randn(2, 2, 4))

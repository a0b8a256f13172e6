"""Tokens to their experts and back: equal to the whole module token for token, and what may go wrong on the way."""

from __future__ import annotations

import pytest
import torch
from tests.parallel import cases
from torch import Tensor, nn

from shardwise.parallel.experts import Dispatch, kept_choices, split_experts
from shardwise.parallel.part import Held, Part
from shardwise.parallel.topology import connect
from shardwise.testing import ranks


def experts_of(world, count: int, kind: str = "eager") -> nn.Module:
    """kind: "grouped_mm" is what models choose by themselves; it takes rows of 16 bytes only, and these have 24 or fewer."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    module = MixtralExperts(cases.config("mixtral", num_local_experts=count, hidden_size=8, intermediate_size=6))
    module.config._experts_implementation = kind
    for index, parameter in enumerate(module.parameters()):
        parameter.data.copy_(world.randn(*parameter.shape, seed=index).float() * 0.3)
    return module


def split(module: nn.Module, dispatch: Dispatch) -> dict[str, Held]:
    whole = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    held = {f"x.{name}": Held(name=name, part=Part.whole(tuple(value.shape))) for name, value in whole.items()}
    split_experts(module, "x", dispatch, held)
    for name, value in whole.items():
        setattr(module, name, nn.Parameter(held[f"x.{name}"].part.take(value)))
    return held


def check(world, words: str, count: int, index: Tensor) -> None:
    """Output, input gradients, router weight gradients and expert gradients against the whole module."""
    topology = connect(cases.layout(world.size, words))
    tokens, choices = index.shape[1:]
    x, w = world.randn(world.size, tokens, 8, seed=50).float(), world.randn(world.size, tokens, choices, seed=51).float()
    plain, own = experts_of(world, count), experts_of(world, count, "grouped_mm")
    held = split(own, Dispatch(topology=topology, count=count))
    xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
    expected = plain(xs.flatten(0, 1), index.flatten(0, 1), ws.flatten(0, 1)).view_as(x)
    expected.square().sum().backward()
    mine, weights = x[world.rank].clone().requires_grad_(), w[world.rank].clone().requires_grad_()
    out = own(mine, index[world.rank], weights)
    out.square().sum().backward()
    torch.testing.assert_close(out, expected[world.rank].detach())
    torch.testing.assert_close(mine.grad, xs.grad[world.rank])
    torch.testing.assert_close(weights.grad, ws.grad[world.rank])
    if topology.layout.edp == 1:
        for name, parameter in own.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(grad, held[f"x.{name}"].part.take(plain.get_parameter(name).grad), rtol=1e-4, atol=1e-5)


def random_index(ranks: int, tokens: int, choices: int, count: int) -> Tensor:
    scores = torch.rand(ranks, tokens, count, generator=torch.Generator().manual_seed(3))
    return scores.topk(choices, -1).indices


@ranks(8)
def test_64_experts_over_eight_ranks(world):
    check(world, "ep=8", 64, random_index(8, 11, 6, 64))


@ranks(4)
def test_expert_tensor_parallel(world):
    check(world, "ep=2 etp=2", 4, random_index(4, 7, 2, 4))


@ranks(4)
def test_ranks_that_receive_no_token(world):
    index = torch.zeros(4, 5, 2, dtype=torch.long)
    index[..., 1] = 1  # both experts are on the first rank
    check(world, "ep=4", 8, index)


@ranks(4)
def test_a_rank_without_tokens_of_its_own(world):
    topology = connect(cases.layout(4, "ep=4"))
    own = experts_of(world, 8)
    split(own, Dispatch(topology=topology, count=8))
    tokens = 0 if world.rank == 2 else 3
    x = world.randn(tokens, 8).float().requires_grad_()
    out = own(x, torch.arange(tokens * 2).view(tokens, 2) % 8, torch.ones(tokens, 2))
    out.sum().backward()
    assert out.shape == (tokens, 8) and x.grad is not None


@pytest.mark.parametrize("factor", [0.5, 1.0, 100.0])
def test_capacity_keeps_the_largest_weights(factor):
    index = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 3]])
    weights = torch.tensor([[0.4, 0.1], [0.9, 0.2], [0.7, 0.3], [0.5, 0.6]])
    kept = kept_choices(index, weights, 4, factor)
    capacity = {0.5: 1, 1.0: 2, 100.0: 4}[factor]
    for expert in range(4):
        chosen = weights[(index == expert)].sort(descending=True).values[:capacity]
        assert sorted(weights[kept & (index == expert)].tolist()) == sorted(chosen.tolist())


@ranks(2)
def test_dropped_choices_do_not_contribute(world):
    """Neither to the output nor to any gradient. Both ranks have the same tokens."""
    topology = connect(cases.layout(2, "ep=2 capacity_factor=1"))
    own, plain = experts_of(world, 4), experts_of(world, 4)
    held = split(own, Dispatch(topology=topology, count=4, capacity_factor=1.0))
    index = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 3]])
    weights = torch.tensor([[0.4, 0.1], [0.9, 0.2], [0.7, 0.3], [0.5, 0.6]])
    kept = kept_choices(index, weights, 4, 1.0)
    assert not kept.all()
    x = world.randn(4, 8).float()
    inputs = [(x.clone().requires_grad_(), weights.clone().requires_grad_()) for _ in range(2)]
    out, expected = own(inputs[0][0], index, inputs[0][1]), plain(inputs[1][0], index, inputs[1][1] * kept)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for mine, whole in zip(*inputs, strict=True):
        torch.testing.assert_close(mine.grad, whole.grad)
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * held[f"x.{name}"].part.take(plain.get_parameter(name).grad))

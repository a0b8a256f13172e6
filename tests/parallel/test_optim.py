"""Optimizer groups by kind of tensor and mesh, and one gradient norm over all of them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.parallel.training import build, data, full
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardwise import clip_grad_norm_, parallelize, param_groups
from shardwise.testing import ranks, shard

NORMS = (1.0, 2.0, float("inf"))


def test_plain_parameters_are_one_group_and_clipped_as_torch_does():
    model, other = build(torch.float64), build(torch.float64)
    x, y = data(torch.float64)
    for norm_type in NORMS:
        for m in (model, other):
            m.zero_grad()
            F.mse_loss(m(x), y).backward()
        mine = clip_grad_norm_(model, 0.1, norm_type)
        theirs = nn.utils.clip_grad_norm_(other.parameters(), 0.1, norm_type)
        torch.testing.assert_close(mine, theirs)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    (group,) = param_groups(model)
    assert len(group["params"]) == len(list(model.parameters()))
    model.head.weight.requires_grad_(False)
    assert len(param_groups(model)[0]["params"]) == len(group["params"]) - 1


def _mixed(mesh, values):
    """Parameters and gradients of four kinds: plain, sharded over one axis and over the other, and a pending sum."""
    layouts = (None, (mesh["ddp"], [Shard(0)]), (mesh["domain"], [Shard(1)]), (mesh, [Shard(0), Shard(0)]), (mesh["ddp"], [Replicate()]))
    parameters = []
    for value, layout in zip(values, layouts, strict=True):
        if layout is None:
            p = nn.Parameter(torch.zeros_like(value))
            p.grad = value.clone()
        else:
            p = nn.Parameter(distribute_tensor(torch.zeros_like(value), *layout))
            p.grad = distribute_tensor(value, *layout)
        parameters.append(p)
    pending = parameters[-1]
    share = values[-1] / 2 + (-1) ** mesh.get_local_rank("ddp")  # the two summands differ
    pending.grad = DTensor.from_local(share, mesh["ddp"], [Partial()], run_check=False)
    return parameters


@pytest.mark.parametrize("norm_type", NORMS)
@ranks(4, processes=True)
def test_one_norm_over_plain_sharded_and_pending_gradients(world, norm_type):
    mesh = world.make_mesh((2, 2), ("ddp", "domain"))
    values = [world.randn(5, 3) for _ in range(5)]
    parameters = _mixed(mesh, values)
    expected = torch.cat([v.flatten() for v in values]).norm(norm_type)
    norm = clip_grad_norm_(parameters, 0.5, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for p, value in zip(parameters, values, strict=True):
        torch.testing.assert_close(full(p.grad), value * (0.5 / (expected + 1e-6)), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("norm_type", NORMS)
@ranks(4, processes=True)
def test_experts_count_once_whatever_tokens_reached_them(world, norm_type):
    """Plain experts of each rank, experts as DTensors on a mesh of their own, a dense weight; rank 0's expert got no token."""
    mesh = world.make_mesh((2, 2), ("edp", "ep"))
    place = mesh.get_local_rank("ep")
    dense, stacked, own = world.randn(3, 2), world.randn(4, 3), [world.randn(5), world.randn(5)]
    idle = place == 0
    weight, expert = nn.Parameter(torch.zeros(3, 2).double()), nn.Parameter(torch.zeros(5).double())
    weight.grad = dense.clone()
    expert.grad = None if idle else own[place].clone()
    shards = nn.Parameter(distribute_tensor(torch.zeros_like(stacked), mesh, [Replicate(), Shard(0)]))
    shards.grad = DTensor.from_local(
        shards.to_local() + stacked.chunk(2)[place] / 2, mesh, [Partial(), Shard(0)], run_check=False
    )  # the data-parallel sum is pending
    expected = torch.cat([dense.flatten(), stacked.flatten(), own[1]]).norm(norm_type)
    norm = clip_grad_norm_([expert, weight, shards], 0.5, norm_type, experts={expert: mesh["ep"]})
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    factor = 0.5 / (expected + 1e-6)
    torch.testing.assert_close(weight.grad, dense * factor)
    torch.testing.assert_close(full(shards.grad), stacked * factor)
    assert expert.grad is None if idle else torch.allclose(expert.grad, own[1] * factor)


@ranks(2)
def test_a_pending_sum_of_a_sharded_parameter_counts_once(world):
    value = world.randn(6, 3)
    p = shard(torch.zeros(6, 3, dtype=torch.float64), world.mesh, dim=0, sizes=(5, 1)).requires_grad_()
    p.grad = shard(value, world.mesh, dim=0, sizes=(5, 1))
    torch.testing.assert_close(clip_grad_norm_([p], 100.0), value.norm())
    torch.testing.assert_close(p.grad.full_tensor(), value)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@ranks(4, processes=True)
def test_every_kind_of_update_takes_the_groups(world, options):
    """FSDP2 with spatial parameters: DTensors on two meshes. Also averaged weights (EMA) and a scheduler."""
    mesh = world.make_mesh((2, 2), ("ddp", "domain"))
    x, y = data(torch.float64)
    alone = build(torch.float64)
    model = parallelize(build(torch.float64), mesh, fsdp=True, spatial_params="auto")
    groups = param_groups(model)
    assert len(groups) == 2
    d = mesh.get_local_rank("ddp")
    xs, ys = shard(x.chunk(2)[d], mesh["domain"], dim=2), y.chunk(2)[d]
    average = copy.deepcopy({name: p.detach() for name, p in model.named_parameters()})
    expected = {name: p.detach().clone() for name, p in alone.named_parameters()}
    optimizers = [torch.optim.AdamW(groups, lr=1e-2, **options), torch.optim.AdamW(alone.parameters(), lr=1e-2, **options)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    for _ in range(3):
        for m, inputs, targets, optimizer, scheduler, ema in zip(
            (model, alone), (xs, x), (ys, y), optimizers, schedulers, (average, expected), strict=True
        ):
            F.mse_loss(m(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            for name, p in m.named_parameters():
                ema[name].lerp_(p.detach(), 0.1)
    for name, p in alone.named_parameters():
        torch.testing.assert_close(full(dict(model.named_parameters())[name]), p.detach(), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(full(average[name]), expected[name], rtol=1e-8, atol=1e-10)

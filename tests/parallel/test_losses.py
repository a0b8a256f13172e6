"""Means over valid elements do not move, whatever the split: by data, by domain, by accumulation."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwise import parallelize
from shardwise.parallel.losses import global_mean, global_sum
from shardwise.parallel.wrap import no_sync
from shardwise.testing import ranks, shard

# Losses of the tokens of each rank, ranks of one domain group side by side. The literal case, and one with unequal groups.
EQUAL = (((1.0, 2.0, 3.0), (6.0,)), ((2.0, 4.0), (0.0, 6.0)))
UNEQUAL = (((1.0, 2.0, 3.0), (6.0, 8.0)), ((4.0,), ()))
IGNORED = -1.0
ROWS = 4


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, losses):
        return self.w * losses


def _padded(tokens):
    return torch.tensor([*tokens, *[IGNORED] * (ROWS - len(tokens))], dtype=torch.float64)


def _train(world, cases, ddp, domain, accumulate, fsdp=False):
    """(loss, gradient) of one step, each group of `cases` dealt to a replica."""
    mesh = world.make_mesh((ddp, domain), ("ddp", "domain"))
    model = parallelize(Scale(), mesh, fsdp=fsdp)
    mine = torch.cat([_padded(tokens) for group in cases for tokens in group]).chunk(ddp)[mesh.get_local_rank("ddp")]
    batches = [shard(part, mesh["domain"], dim=0) for part in mine.view(-1, accumulate).unbind(1)]  # every n-th token
    count = global_sum(sum((x != IGNORED).sum() for x in batches), mesh)
    total = 0.0
    for number, x in enumerate(batches):
        with nullcontext() if number == accumulate - 1 else no_sync(model):
            loss = global_mean(torch.where(x != IGNORED, model(x), 0.0).sum(), count, mesh)
            loss.backward()
        total += loss.item()
    grad = getattr(model, "module", model).w.grad
    return total, float(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)


@pytest.mark.parametrize("accumulate", [1, 2])
@ranks(4, processes=True)
def test_token_mean_is_the_same_in_every_layout(world, accumulate):
    for cases, mean in ((EQUAL, 3.0), (UNEQUAL, 4.0)):
        for ddp, domain in ((2, 2), (4, 1), (1, 4)):
            assert _train(world, cases, ddp, domain, accumulate) == pytest.approx((mean, mean), rel=1e-12)


@ranks(3)
def test_token_mean_over_three_domain_ranks(world):
    x = torch.tensor([1.0, 2.0, 3.0, 6.0, 2.0, 4.0, 0.0, 6.0], dtype=torch.float64)
    mesh = world.make_mesh((1, 3), ("ddp", "domain"))
    model = Scale()
    loss = global_mean(model(shard(x, mesh["domain"], dim=0, sizes=(5, 0, 3))).sum(), 8, mesh)
    loss.backward()
    assert (loss.item(), model.w.grad.item()) == (3.0, 3.0)


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_cross_entropy_with_ignored_targets_and_class_weights(world):
    logits, target = world.randn(2, 6, 5), torch.tensor([[0, 1, -100, 3, -100, -100], [4, 4, 4, -100, 2, 1]])
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=torch.float64)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), weight)
    row = world.mesh.get_local_rank("ddp")
    x, y = shard(logits[row], world.mesh["domain"], dim=0, sizes=(4, 2)), shard(target[row], world.mesh["domain"], dim=0, sizes=(4, 2))
    weights = torch.where(y == -100, 0.0, weight[torch.where(target[row] == -100, 0, target[row])])
    count = global_sum(weights.sum(), world.mesh)
    mean = global_mean(F.cross_entropy(x, y, weight, reduction="sum"), count, world.mesh)
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=0)


@ranks(2)
def test_sum_without_replicas_is_that_of_the_domain(world):
    assert global_sum(shard(torch.arange(5.0), world.mesh, dim=0).sum(), world.mesh).item() == 10.0
    assert dist.get_world_size() == 2

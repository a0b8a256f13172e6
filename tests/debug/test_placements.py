"""The checker finds each planted bug at its module, and nothing on clean runs."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.parallel.training import Net
from torch import nn
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardwise import ShardTensor
from shardwise.collectives import functional as comm
from shardwise.collectives.exchange import exchange
from shardwise.debug import check_step
from shardwise.mesh.groups import axis_group
from shardwise.shard_tensor.promote import plain_operand
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import from_local, to_local
from shardwise.spec.spans import spans_of
from shardwise.testing import ranks, shard

HEIGHT = 8


class Layer(nn.Module):
    """A layer whose author wrote the sharded form by hand: `sharded(x, local)` for shards, `whole(x)` in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(self, x):
        return self.sharded(x, to_local(x)) if isinstance(x, ShardTensor) else self.whole(x)

    def group(self, x):
        return axis_group(x.device_mesh, 0)

    def replicated(self, x, local):
        whole = x._spec.replicate()
        return from_local(local, ShardTensorSpec(whole.mesh, whole.placements, tuple(local.shape), (None,) * local.ndim, local.dtype))


class Mean(Layer):
    def whole(self, x):
        return x.mean(2, keepdim=True) * self.weight.sum()

    def sharded(self, x, local):
        return self.replicated(x, self.reduced(x, local.sum(2, keepdim=True) / HEIGHT) * plain_operand(self.weight, [self.spec(x)]).sum())

    def spec(self, x):
        return x._spec.replicate()

    def reduced(self, x, local):
        return comm.all_reduce(local, self.group(x)) / 1.0


class MissingReduction(Mean):
    def reduced(self, x, local):
        return local


class DoubleReduction(Mean):
    def reduced(self, x, local):
        return comm.sum_forward(comm.sum_forward(local, self.group(x)), self.group(x))


class PartialUsedAsComplete(Mean):
    def sharded(self, x, local):
        pending = from_local(local.sum(2, keepdim=True) / HEIGHT, self._pending(x))
        return self.replicated(x, to_local(pending) * self.weight.sum())

    def _pending(self, x):
        shape = (*x.shape[:2], 1, *x.shape[3:])
        return ShardTensorSpec(x.device_mesh, (Partial(),), shape, (None,) * 4, x.dtype)


class Convolution(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(2, 2, 3, 3, dtype=torch.float64))

    def whole(self, x):
        return F.conv2d(x, self.kernel, padding=1)

    def sharded(self, x, local):
        return from_local(F.conv2d(F.pad(self.halo(x, local), (1, 1)), plain_operand(self.kernel, [x._spec])), x._spec)

    def halo(self, x, local):
        spans = spans_of(x._spec.sizes[2])
        wanted = tuple((start - 1, stop + 1) for start, stop in spans)
        return exchange(local, owned=spans, wanted=wanted, dim=2, group=self.group(x), fill=0.0)


class StaleHalo(Convolution):
    def halo(self, x, local):
        return F.pad(local, (0, 0, 1, 1))


class HaloWithoutGradient(Convolution):
    def halo(self, x, local):
        rows = super().halo(x, local.detach())
        return torch.cat([rows[:, :, :1], local, rows[:, :, -1:]], 2)


class Norm(Layer):
    def whole(self, x):
        return (x - x.mean((2, 3), keepdim=True)) * self.weight[0, 0]

    def sharded(self, x, local):
        return from_local((local - self.mean(x, local)) * plain_operand(self.weight, [x._spec])[0, 0], x._spec)

    def mean(self, x, local):
        return comm.all_reduce(local.sum((2, 3), keepdim=True), self.group(x)) / x[0, 0].numel()


class UnreducedNorm(Norm):
    def mean(self, x, local):
        return local.mean((2, 3), keepdim=True)


class Linear(Layer):
    def whole(self, x):
        return x @ self.weight

    def sharded(self, x, local):
        return from_local(local @ self.operand(x), x._spec)

    def operand(self, x):
        return plain_operand(self.weight, [x._spec])


class UnreducedWeightGradient(Linear):
    def operand(self, x):
        return self.weight


class WeightGradientReducedTwice(Linear):
    def operand(self, x):
        return comm.sum_gradient(plain_operand(self.weight, [x._spec]), self.group(x))


class GradientScaledByRanks(Linear):
    def sharded(self, x, local):
        out = super().sharded(x, local)
        scale = x.device_mesh.size()
        return out * scale - out.detach() * (scale - 1)


class NoiseOfEachRank(Linear):
    def sharded(self, x, local):
        whole = x.full_tensor().clone()
        whole[0, 0, 0, 0] += dist.get_rank()
        return self.replicated(x, whole @ plain_operand(self.weight, [x._spec.replicate()]))


class RowsInTheWrongOrder(Linear):
    def sharded(self, x, local):
        return from_local(comm.ring_shift(local, local.shape, 1, self.group(x)) @ self.operand(x), x._spec)


class WrongGroup(Mean):
    """Reduces over the replicas instead of the domain."""

    def group(self, x):
        return self.other


PLANTED = [
    (MissingReduction, "output 0"),
    (DoubleReduction, "output 0 differs from one process"),
    (PartialUsedAsComplete, "output 0 counts as equal on all ranks"),
    (StaleHalo, "output 0 differs from one process"),
    (HaloWithoutGradient, "the gradient of input 0 differs from one process"),
    (UnreducedNorm, "output 0 differs from one process"),
    (UnreducedWeightGradient, "the gradient of weight counts as equal on all ranks"),
    (WeightGradientReducedTwice, "the gradient of weight differs from one process"),
    (GradientScaledByRanks, "the gradient of input 0 differs from one process"),
    (NoiseOfEachRank, "output 0 counts as equal on all ranks"),
    (RowsInTheWrongOrder, "output 0 differs from one process"),
]


def _differences(world, layer, mesh=None):
    mesh = mesh or world.mesh
    model = world.same(lambda: nn.Sequential(nn.Conv2d(2, 2, 1).double(), nn.Sequential(layer()), nn.GELU()))
    x = shard(world.randn(1, 2, HEIGHT, 3), mesh, dim=2)
    return check_step(model, lambda: model(x).square().sum().backward(), mesh)


@pytest.mark.parametrize("layer, what", PLANTED, ids=lambda value: getattr(value, "__name__", ""))
@ranks(2)
def test_planted_bug_is_found_at_its_module(world, layer, what):
    found = _differences(world, layer)
    assert found and found[0].module == "1.0", found
    assert found[0].what.startswith(what), found


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_reduction_over_the_wrong_axis_is_found(world):
    class Wrong(WrongGroup):
        other = axis_group(world.mesh, 0)

    model = world.same(lambda: nn.Sequential(Wrong()))
    replica = world.mesh.get_local_rank("ddp")
    x = shard(world.randn(1, 2, HEIGHT, 3, seed=replica), world.mesh["domain"], dim=2)
    found = check_step(model, lambda: model(x).sum().backward(), world.mesh["domain"])
    assert found and found[0].module == "0" and found[0].what.startswith("output 0 counts as equal")


@ranks(2)
def test_weights_that_were_not_made_equal_are_found(world):
    model = nn.Sequential(nn.Linear(3, 3).double())
    with torch.no_grad():
        model[0].weight.fill_(world.rank)
        model[0].bias.zero_()
    x = shard(world.randn(4, 3), world.mesh, dim=0)
    found = check_step(model, lambda: model(x).sum().backward(), world.mesh)
    assert str(found[0]).startswith("0: weight counts as equal on all ranks")


@pytest.mark.parametrize("layer", [Convolution, Norm, Linear])
@ranks(2)
def test_nothing_is_found_in_the_right_form_of_each_layer(world, layer):
    assert _differences(world, layer) == []


@ranks(3)
def test_nothing_is_found_on_clean_runs(world):
    model = world.same(lambda: Net().double())
    x = shard(world.randn(1, 2, 10, 6), world.mesh, dim=2, sizes=(5, 1, 4))
    y = world.randn(1, 3)
    assert check_step(model, lambda: F.mse_loss(model(x), y).backward(), world.mesh) == []

    def convolutions():
        before = (nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
        return nn.Sequential(*before, nn.Dropout(0.5), nn.Upsample(scale_factor=2), nn.Conv2d(4, 1, 5, padding=2)).double()

    conv = world.same(convolutions)
    x = shard(world.randn(2, 2, 13, 6), world.mesh, dim=2, sizes=(6, 0, 7))
    assert check_step(conv, lambda: conv(x).square().mean().backward(), world.mesh) == []


@ranks(4, mesh={"rows": 2, "columns": 2})
def test_nothing_is_found_on_a_mesh_of_two_axes(world):
    model = world.same(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.AdaptiveAvgPool2d(1)).double()
    )
    x = shard(world.randn(2, 2, 7, 6), world.mesh, placements=(Shard(2), Shard(3)))
    assert check_step(model, lambda: model(x).sum().backward(), world.mesh) == []
    y = shard(world.randn(2, 2, 7, 6), world.mesh, placements=(Shard(2), Replicate()))
    assert check_step(model, lambda: (model.zero_grad(), model(y).sum().backward()), world.mesh) == []

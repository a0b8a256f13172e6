"""The oracle passes what is equal and tells what is not; saved bytes are those of storages."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardwise import ShardTensor
from shardwise.testing import assert_same_as_unsharded, count_communication, measure_saved_bytes, numerical_shard_tensor_check, ranks, shard

SIZES = pytest.mark.parametrize("sizes", [(4, 4, 4), (7, 1, 4), (11, 0, 1)], ids=["even", "one-row", "empty"])


@SIZES
@ranks(3)
def test_shard_holds_the_rows_it_was_given(world, sizes):
    whole = world.randn(2, 12, 3)
    x = shard(whole, world.mesh, dim=1, sizes=sizes)
    assert x.to_local().shape == (2, sizes[world.rank], 3)
    assert torch.equal(x.to_local(), whole.split(sizes, dim=1)[world.rank])
    assert torch.equal(x.full_tensor(), whole)


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_shard_follows_placements_of_a_mesh_with_two_axes(world):
    whole = world.randn(5, 6)
    row, column = divmod(world.rank, 2)
    both = shard(whole, world.mesh, placements=(Shard(0), Shard(1)), sizes={0: (4, 1), 1: (1, 5)})
    assert torch.equal(both.to_local(), whole.split((4, 1))[row].split((1, 5), dim=1)[column])
    stacked = shard(whole, world.mesh, placements=(Shard(0), Shard(0)), sizes={0: (2, 0, 1, 2)})
    assert torch.equal(stacked.to_local(), whole.split((2, 0, 1, 2))[world.rank])
    pending = shard(whole, world.mesh, placements=(Partial(), Replicate()))
    assert not torch.equal(pending.to_local(), whole)
    torch.testing.assert_close(pending.full_tensor(), whole)


@ranks(2)
def test_shard_refuses_sizes_that_do_not_fit(world):
    x = world.randn(4, 6)
    with pytest.raises(ValueError, match=r"sizes \(3, 2\) do not split dim 1 of \(4, 6\)"):
        shard(x, world.mesh, dim=1, sizes=(3, 2))
    with pytest.raises(ValueError, match=r"sizes \(2, 2, 2\) do not split dim 1"):
        shard(x, world.mesh, dim=1, sizes=(2, 2, 2))
    with pytest.raises(ValueError, match="shard takes either dim"):
        shard(x, world.mesh)


class Scale(nn.Module):
    """A module that can do something else on sharded tensors, so that the oracle has something to find."""

    def __init__(self, *, output=1.0, gradient=1.0, weight=1.0, count=1.0):
        super().__init__()
        self.factors = output, gradient, weight, count
        self.weight = nn.Parameter(torch.arange(1.0, 4.0, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        output, gradient, weight, count = self.factors if isinstance(x, ShardTensor) else (1.0, 1.0, 1.0, 1.0)
        self.calls += count
        x = x.detach() * (1 - gradient) + x * gradient
        w = self.weight.detach() * (1 - weight) + self.weight * weight
        return x * w * output


@SIZES
@ranks(3)
def test_equal_computations_pass(world, sizes):
    x = shard(world.randn(12, 3), world.mesh, dim=0, sizes=sizes)
    assert_same_as_unsharded(lambda x, y: (x * y + 1, {"sum": x + 2}), x, world.randn(3))
    assert_same_as_unsharded(Scale(), x, step=True)
    numerical_shard_tensor_check(world.mesh, Scale(), [x], {})


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"output": 2.0}, ["output 0", "gradient of argument[0]", "gradient of weight", "weight after a step"]),
        ({"gradient": 1.001}, ["gradient of argument[0]"]),
        ({"weight": 0.5}, ["gradient of weight", "weight after a step"]),
        ({"count": 2.0}, ["buffer calls"]),
    ],
)
@ranks(2)
def test_differences_are_all_told(world, wrong, found):
    x = shard(world.randn(12, 3), world.mesh, dim=0, sizes=(11, 1))
    with pytest.raises(AssertionError) as caught:
        assert_same_as_unsharded(Scale(**wrong), x, step=True)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()[1:]] == found


@ranks(2)
def test_shapes_dtypes_counts_and_missing_gradients_are_told(world):
    def mine(x):
        return isinstance(x, ShardTensor)

    x = shard(world.randn(12, 3), world.mesh, dim=0)
    for function, message in [
        (lambda x: x.float() if mine(x) else x, "output 0: .* torch.float32, unsharded .* torch.float64"),
        (lambda x: (x, x) if mine(x) else x, "2 output tensors, unsharded 1"),
        (lambda x: x.detach() if mine(x) else x * 1, "output 0: requires_grad is False, unsharded True"),
    ]:
        with pytest.raises(AssertionError, match=message):
            assert_same_as_unsharded(function, x)


@ranks(2)
def test_check_of_a_module_takes_its_options(world):
    x = shard(world.randn(12, 3), world.mesh, dim=0)
    module = Scale()
    with torch.no_grad():
        module.weight += world.rank  # the check makes weights equal first
    numerical_shard_tensor_check(world.mesh, module, [x], {})
    assert module.weight.tolist() == [1.0, 2.0, 3.0]
    numerical_shard_tensor_check(world.mesh, module, [x], {}, distribute_fn=lambda module, mesh: module)
    with pytest.raises(AssertionError, match="output_check_fn returned False"):
        numerical_shard_tensor_check(world.mesh, module, [x], {}, output_check_fn=lambda mine, other: False)
    with pytest.raises(AssertionError, match="output 0"):
        numerical_shard_tensor_check(world.mesh, module, [x], {}, distribute_fn=lambda module, mesh: Scale(output=1.01))
    numerical_shard_tensor_check(world.mesh, Scale(output=1.01), [x], {}, check_grads=False, rtol=0.02, atol=0.0)


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_check_of_a_module_on_a_mesh_of_two_axes(world):
    module = nn.Linear(3, 5).double()  # other weights on every rank, until the check
    for placements in [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(0), Shard(0))]:
        x = shard(world.randn(6, 5, 3), world.mesh, placements=placements)
        numerical_shard_tensor_check(world.mesh, module, [x], {})


@ranks(2)
def test_check_of_a_module_in_bf16(world):
    x = shard(world.randn(12, 3, dtype=torch.float32), world.mesh, dim=0, sizes=(11, 1))
    numerical_shard_tensor_check(world.mesh, nn.Linear(3, 5), [x], {}, amp=True)


def test_saved_bytes_count_each_storage_once_and_whole():
    weight = torch.ones(10, requires_grad=True)
    with measure_saved_bytes([weight]) as saved:
        x = torch.ones(10, requires_grad=True) * weight  # saves the left factor; the weight is excluded
        assert saved.bytes == 40
        y = x * x  # saves x, twice
        assert saved.bytes == 80
        z = (y[:1] * y[:1]).sum()  # saves two views of y
        assert (saved.bytes, saved.peak) == (120, 120)
    z.backward()
    assert (saved.bytes, saved.peak) == (0, 120)


@ranks(2)
def test_saved_bytes_of_a_sharded_tensor_are_those_of_the_shard(world):
    x = shard(world.randn(12, 2), world.mesh, dim=0, sizes=(9, 3)).requires_grad_()
    with measure_saved_bytes() as saved:
        y = x * x
    assert saved.bytes == (9, 3)[world.rank] * 2 * 8
    del y
    assert saved.bytes == 0


@ranks(2)
def test_communication_is_counted(world):
    x = shard(world.randn(12, 2), world.mesh, dim=0)
    with count_communication() as sent:
        y = x + 1
    assert sent.calls == 0
    with count_communication() as sent:
        y.full_tensor()
    assert sent.calls == 1


def test_saved_storages_that_are_freed_and_filled_again_count_once():
    weight, x = torch.randn(4, 4), torch.randn(3, 4, requires_grad=True)
    with measure_saved_bytes() as saved:
        y = x @ weight
        size = weight.untyped_storage().nbytes()
        weight.untyped_storage().resize_(0)  # as FSDP2 does between forward and backward
        assert saved.bytes == size
        weight.untyped_storage().resize_(size)
        with torch.no_grad():
            weight.fill_(1.0)
        y.sum().backward()
        assert saved.bytes == 0 and x.grad.eq(4.0).all()

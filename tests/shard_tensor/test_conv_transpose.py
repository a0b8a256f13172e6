"""Transposed convolution on shards equals transposed convolution in one process."""

import random

import pytest
import torch
import torch.nn.functional as F
from tests.shard_tensor.conv_cases import TRANSPOSED, random_split, random_transposed
from torch import nn
from torch.distributed.tensor import Partial, Shard

from shardwise.collectives.counter import count_communication
from shardwise.testing import assert_same_as_unsharded, ranks, shard


def check_random(world, seed, count):
    rng = random.Random(seed)
    for number in range(count):
        n, shape, kernel, bias, arguments = random_transposed(rng)
        x = random_split(rng, world.mesh, world.randn(*shape))
        weights = [world.randn(*kernel), *([world.randn(kernel[1] * arguments["groups"])] if bias else [])]
        try:
            assert_same_as_unsharded(TRANSPOSED[n], x, *weights, kwargs=arguments)
        except BaseException as error:
            error.add_note(f"case {number}: {x._spec.describe()}, weight {kernel}, {arguments}")
            raise


@ranks(2)
def test_200_random_cases_on_two_ranks(world):
    check_random(world, 2, 200)


@ranks(3)
def test_100_random_cases_on_three_ranks(world):
    check_random(world, 3, 100)


@ranks(4, mesh={"a": 2, "b": 2})
def test_100_random_cases_on_a_mesh_of_two_axes(world):
    check_random(world, 5, 100)


@pytest.mark.parametrize(
    ("kernel", "arguments"), [(2, {"stride": 2}), (4, {"stride": 4}), (3, {"stride": 5, "output_padding": 2}), (1, {"stride": 3})]
)
@ranks(3)
def test_a_kernel_no_longer_than_the_stride_exchanges_nothing(world, kernel, arguments):
    x = shard(world.randn(2, 3, 9), world.mesh, dim=2, sizes=(4, 3, 2))
    weight = world.randn(3, 2, kernel)
    with count_communication() as sent:
        y = F.conv_transpose1d(x, weight, **arguments)
    assert sent.calls == 0
    assert y.placements == (Shard(2),)
    assert_same_as_unsharded(F.conv_transpose1d, x, weight, kwargs=arguments)


@ranks(3)
def test_upsampling_by_kernel_four_stride_two_keeps_the_split(world):
    x = shard(world.randn(1, 3, 9, 4), world.mesh, dim=2, sizes=(5, 1, 3))
    module = world.same(lambda: nn.ConvTranspose2d(3, 2, 4, stride=2, padding=1, dtype=torch.float64))
    assert module(x)._spec.sizes[2] == (10, 2, 6)
    assert_same_as_unsharded(module, x, step=True)
    pending = shard(x.full_tensor(), world.mesh, placements=(Partial(),))
    assert_same_as_unsharded(F.conv_transpose2d, pending, world.randn(3, 2, 4, 4))


@ranks(2)
def test_convolution_by_its_general_name(world):
    x = shard(world.randn(2, 4, 7), world.mesh, dim=2)
    for transposed, kernel in ((False, (6, 2, 3)), (True, (4, 3, 3))):
        args = (world.randn(*kernel), world.randn(6), (2,), (1,), (1,), transposed, (1 if transposed else 0,), 2)
        assert_same_as_unsharded(torch.convolution, x, *args)


@ranks(2)
def test_bad_arguments_raise_what_torch_raises(world):
    x = shard(world.randn(2, 3, 9), world.mesh, dim=2)
    for weight, arguments in (
        (world.randn(2, 4, 3), {}),
        (world.randn(3, 2, 3), {"output_padding": 1}),
        (world.randn(3, 2, 3), {"stride": 0}),
    ):
        with pytest.raises(RuntimeError) as ours:
            F.conv_transpose1d(x, weight, **arguments)
        with pytest.raises(RuntimeError) as theirs:
            F.conv_transpose1d(x.full_tensor(), weight, **arguments)
        assert str(ours.value)[:60] == str(theirs.value)[:60]

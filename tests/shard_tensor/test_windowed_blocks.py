"""Sliding blocks and rearranged pixels on shards equal those in one process."""

import random

import pytest
import torch
import torch.nn.functional as F
from tests.shard_tensor.conv_cases import random_split
from torch import nn

from shardwise.collectives.counter import count_communication
from shardwise.testing import assert_same_as_unsharded, ranks, shard


def random_blocks(rng):
    kernel, dilation, stride = ([rng.randint(1, high) for _ in range(2)] for high in (4, 3, 4))
    padding = [rng.randint(0, 3) for _ in range(2)]
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding)]
    shape = ([rng.randint(1, 3)] if rng.random() < 0.8 else []) + [rng.randint(1, 3), *(rows + rng.randint(0, 8) for rows in least)]
    return shape, {"kernel_size": kernel, "dilation": dilation, "padding": padding, "stride": stride}


def check_random(world, seed, count):
    rng = random.Random(seed)
    for number in range(count):
        shape, arguments = random_blocks(rng)
        image = random_split(rng, world.mesh, world.randn(*shape))
        columns = random_split(rng, world.mesh, world.randn(*F.unfold(torch.zeros(shape), **arguments).shape))
        try:
            assert_same_as_unsharded(F.unfold, image, kwargs=arguments)
            assert_same_as_unsharded(F.fold, columns, shape[-2:], kwargs=arguments)
        except BaseException as error:
            error.add_note(f"case {number}: {image._spec.describe()}, {columns._spec.describe()}, {arguments}")
            raise


@ranks(2)
def test_100_random_blocks_on_two_ranks(world):
    check_random(world, 2, 100)


@ranks(3)
def test_80_random_blocks_on_three_ranks(world):
    check_random(world, 3, 80)


@ranks(4, mesh={"a": 2, "b": 2})
def test_40_random_blocks_on_a_mesh_of_two_axes(world):
    check_random(world, 5, 40)


@ranks(3)
def test_patches_of_a_row_split_exchange_nothing(world):
    x = shard(world.randn(1, 2, 12, 8), world.mesh, dim=2, sizes=(4, 0, 8))
    with count_communication() as sent:
        columns = F.unfold(x, 4, stride=4)
        y = F.fold(columns, (12, 8), 4, stride=4)
    assert sent.calls == 0
    assert columns._spec.sizes[2] == (2, 0, 4)
    assert y._spec.sizes == x._spec.sizes
    assert torch.equal(y.full_tensor(), x.full_tensor())


@ranks(3)
def test_windows_of_one_dim(world):
    x = world.randn(2, 11, 3)
    for size, step in ((1, 1), (3, 1), (4, 3), (2, 5), (11, 1), (7, 2)):
        for sizes in ((4, 3, 4), (0, 11, 0), (1, 9, 1)):
            assert_same_as_unsharded(lambda x: x.unfold(1, size, step), shard(x, world.mesh, dim=1, sizes=sizes))  # noqa: B023
        for dim in (0, 2):
            assert_same_as_unsharded(lambda x: x.unfold(-2, size, step).sum(-1) ** 2, shard(x, world.mesh, dim=dim))  # noqa: B023


@pytest.mark.parametrize("factor", [1, 2, 3])
@ranks(3)
def test_pixel_shuffles(world, factor):
    squared = factor**2
    for shape in ((2, 4 * squared, 5, 4), (1, 3, squared, 2, 3)):
        for dim in range(len(shape)):
            for sizes in (None, (shape[dim], 0, 0), (shape[dim] - 1, 1, 0)):
                x = shard(world.randn(*shape), world.mesh, dim=dim, sizes=sizes)
                assert_same_as_unsharded(nn.PixelShuffle(factor), x)
    for shape in ((2, 3, 4 * factor, 3 * factor), (3, 2 * factor, 4 * factor)):
        for dim in range(len(shape)):
            for sizes in (None, (shape[dim], 0, 0), (shape[dim] - 1, 1, 0)):
                x = shard(world.randn(*shape), world.mesh, dim=dim, sizes=sizes)
                assert_same_as_unsharded(nn.PixelUnshuffle(factor), x)


@ranks(3)
def test_pixel_shuffle_of_spatial_shards_exchanges_nothing(world):
    x = shard(world.randn(1, 8, 7, 5), world.mesh, dim=2, sizes=(4, 2, 1))
    with count_communication() as sent:
        y = F.pixel_shuffle(x, 2)
        z = F.pixel_unshuffle(y, 2)
    assert sent.calls == 0
    assert y._spec.sizes[2] == (8, 4, 2)
    assert z._spec.sizes == x._spec.sizes


@ranks(3)
def test_channel_shuffle(world):
    x = world.randn(2, 6, 5, 4)
    for dim in range(4):
        assert_same_as_unsharded(nn.ChannelShuffle(3), shard(x, world.mesh, dim=dim))


@ranks(2)
def test_bad_arguments_raise_on_all_ranks(world):
    x = shard(world.randn(1, 6, 6, 6), world.mesh, dim=2)
    for call in (
        lambda: F.pixel_shuffle(x, 2),
        lambda: F.pixel_unshuffle(x, 4),
        lambda: F.channel_shuffle(x, 4),
        lambda: F.unfold(x, 9),
        lambda: F.fold(x[0], (4, 4), 2),
        lambda: x.unfold(2, 7, 1),
    ):
        with pytest.raises(RuntimeError):
            call()

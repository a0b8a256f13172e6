"""Padding on shards equals padding in one process."""

import random

import pytest
import torch
import torch.nn.functional as F
from tests.shard_tensor.conv_cases import random_split
from torch import nn
from torch.distributed.tensor import Partial

from shardwise.collectives.counter import count_communication
from shardwise.testing import assert_same_as_unsharded, ranks, shard


def random_padding(rng):
    n = rng.choice((1, 2, 3))
    mode = rng.choice(("constant", "reflect", "replicate", "circular"))
    shape = [rng.randint(1, 3), rng.randint(1, 3), *(rng.randint(2, 9) for _ in range(n))]
    if rng.random() < 0.3:
        shape = shape[1:]
    pads = []
    count = rng.randint(1, len(shape)) if mode == "constant" else n
    for size in reversed(shape[len(shape) - count :]):
        widest = {"constant": 12, "reflect": size - 1, "replicate": 12, "circular": size}[mode]
        lowest = -((size - 1) // 2) if mode != "replicate" else 0
        before, after = rng.randint(lowest, widest), rng.randint(lowest, widest)
        if mode == "circular" and max(before, after) > size + min(before, 0) + min(after, 0):
            before = after = 0  # undefined in torch
        pads += [before, after]
    return shape, pads, mode, rng.choice((None, 1.5)) if mode == "constant" else None


def check_random(world, seed, count):
    rng = random.Random(seed)
    for number in range(count):
        shape, pads, mode, value = random_padding(rng)
        x = random_split(rng, world.mesh, world.randn(*shape))
        try:
            assert_same_as_unsharded(F.pad, x, pads, mode, value)
        except BaseException as error:
            error.add_note(f"case {number}: {x._spec.describe()}, {pads} {mode} {value}")
            raise


@ranks(2)
def test_200_random_paddings_on_two_ranks(world):
    check_random(world, 2, 200)


@ranks(3)
def test_150_random_paddings_on_three_ranks(world):
    check_random(world, 3, 150)


@ranks(4, mesh={"a": 2, "b": 2})
def test_100_random_paddings_on_a_mesh_of_two_axes(world):
    check_random(world, 5, 100)


@ranks(3)
def test_bytes(world):
    x = shard(world.randn(1, 2, 12, 4), world.mesh, dim=2, sizes=(4, 4, 4))
    for mode, pads, rows in (
        ("constant", (0, 0, 5, 7), 0),
        ("constant", (0, 0, -2, -3), 0),
        ("reflect", (2, 2, 3, 2), 0),
        ("circular", (1, 1, 0, 0), 0),
        ("circular", (0, 0, 2, 1), 2 if world.rank == 2 else 1 if world.rank == 0 else 0),
        ("reflect", (0, 0, 0, 6), 3 if world.rank == 1 else 0),
    ):
        with count_communication() as sent:
            F.pad(x, pads, mode)
        assert sent.bytes == rows * 2 * 4 * 8, (mode, pads)


@ranks(2)
def test_modules_integers_and_pending_sums(world):
    x = shard(world.randn(1, 2, 6, 5), world.mesh, dim=2, sizes=(1, 5))
    for module in (
        nn.ZeroPad2d(2),
        nn.ReflectionPad2d((1, 2, 3, 0)),
        nn.CircularPad2d(1),
        nn.ReplicationPad2d(4),
        nn.ConstantPad2d(1, 3.5),
    ):
        assert_same_as_unsharded(module, x)
    widths = [torch.tensor(2), torch.tensor(1)]  # some models compute them
    assert_same_as_unsharded(lambda x: F.pad(x, widths), x)
    whole = torch.arange(12).view(2, 6)
    assert_same_as_unsharded(F.pad, shard(whole, world.mesh, dim=1), (1, 2), "constant", 7, grads=False)
    assert_same_as_unsharded(torch.constant_pad_nd, shard(whole, world.mesh, dim=1), (1, 2), 7, grads=False)
    assert_same_as_unsharded(F.pad, shard(world.randn(2, 6), world.mesh, placements=(Partial(),)), (1, 2), "constant", 1.0)


@ranks(2)
def test_too_wide_padding_raises_on_all_ranks(world):
    x = shard(world.randn(1, 2, 6), world.mesh, dim=2)
    for mode, pads in (("reflect", (6, 0)), ("circular", (0, 7)), ("circular", (5, -2)), ("constant", (-4, -4))):
        with pytest.raises(RuntimeError):
            F.pad(x, pads, mode)

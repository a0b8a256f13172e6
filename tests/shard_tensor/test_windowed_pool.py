"""Pooling on shards equals pooling in one process, indices included."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F
from tests.shard_tensor.conv_cases import random_split
from torch import nn
from torch.distributed.tensor import Partial

from shardwise.collectives.counter import count_communication
from shardwise.errors import MissingShardPatch
from shardwise.testing import assert_same_as_unsharded, ranks, shard

AVERAGES = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MAXIMA = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def random_pool(rng):
    n = rng.choice((1, 2, 2, 3))
    padding_counts = 0 if n == 3 else 2  # in three dims torch asks for as many rows as the kernel has, padding or not
    kernel, stride = [rng.randint(1, 5) for _ in range(n)], [rng.randint(1, 4) for _ in range(n)]
    padding = [rng.randint(0, size // 2) for size in kernel]
    arguments = {"kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": rng.random() < 0.5}
    if rng.random() < 0.5:
        function = AVERAGES[n]
        least = kernel
        arguments["count_include_pad"] = rng.random() < 0.5
        if n > 1 and rng.random() < 0.3:
            arguments["divisor_override"] = rng.randint(1, 9)
    else:
        function = MAXIMA[n]
        arguments["dilation"] = [rng.randint(1, 3) for _ in range(n)]
        arguments["return_indices"] = rng.random() < 0.5
        least = [max(d * (k - 1) + 1, d + 2 * p) for k, d, p in zip(kernel, arguments["dilation"], padding)]
    spatial = [max(1, rows - padding_counts * pad) + rng.randint(0, 12 if n < 3 else 5) for rows, pad in zip(least, padding)]
    shape = ([rng.randint(1, 3)] if rng.random() < 0.8 else []) + [rng.randint(1, 3), *spatial]
    return n, function, shape, arguments


def check_random(world, seed, count):
    rng = random.Random(seed)
    for number in range(count):
        n, function, shape, arguments = random_pool(rng)
        x = world.randn(*shape)
        if rng.random() < 0.2:
            x[..., : shape[-1] // 2 + 1] = -torch.inf if function is MAXIMA[n] else 0.0
        x = random_split(rng, world.mesh, x)
        try:
            assert_same_as_unsharded(function, x, kwargs=arguments)
        except BaseException as error:
            error.add_note(f"case {number}: {function}, {x._spec.describe()}, {arguments}")
            raise


@ranks(2)
def test_300_random_cases_on_two_ranks(world):
    check_random(world, 2, 300)


@ranks(3)
def test_150_random_cases_on_three_ranks(world):
    check_random(world, 3, 150)


@ranks(4, mesh={"a": 2, "b": 2})
def test_100_random_cases_on_a_mesh_of_two_axes(world):
    check_random(world, 5, 100)


ADAPTIVE = {
    1: (F.adaptive_avg_pool1d, F.adaptive_max_pool1d),
    2: (F.adaptive_avg_pool2d, F.adaptive_max_pool2d),
    3: (F.adaptive_avg_pool3d, F.adaptive_max_pool3d),
}


def check_random_adaptive(world, seed, count):
    rng = random.Random(seed)
    for number in range(count):
        n = rng.choice((1, 2, 2, 3))
        shape = ([rng.randint(1, 3)] if rng.random() < 0.8 else []) + [rng.randint(1, 3), *(rng.randint(2, 14) for _ in range(n))]
        size = tuple(rng.choice((1, 1, 2, rng.randint(1, 16), shape[i - n] // 2)) for i in range(n))
        average, maximum = ADAPTIVE[n]
        function = average if rng.random() < 0.5 else maximum
        arguments = {"return_indices": True} if function is maximum and rng.random() < 0.6 else {}
        x = world.randn(*shape)
        if function is maximum and rng.random() < 0.3:
            x = x.round()
            x[..., : shape[-1] // 2 + 1] = -torch.inf
        x = random_split(rng, world.mesh, x)
        try:
            assert_same_as_unsharded(function, x, size, kwargs=arguments)
        except BaseException as error:
            error.add_note(f"case {number}: {function}, {x._spec.describe()}, {size} {arguments}")
            raise


@ranks(2)
def test_200_random_adaptive_cases_on_two_ranks(world):
    check_random_adaptive(world, 2, 200)


@ranks(3)
def test_100_random_adaptive_cases_on_three_ranks(world):
    check_random_adaptive(world, 3, 100)


@ranks(4, mesh={"a": 2, "b": 2})
def test_100_random_adaptive_cases_on_a_mesh_of_two_axes(world):
    check_random_adaptive(world, 5, 100)


@ranks(4)
def test_pooling_to_one_row_sums_what_the_ranks_have(world):
    x = shard(world.randn(2, 3, 11, 5), world.mesh, dim=2, sizes=(4, 0, 6, 1))
    with count_communication() as sent:
        y = F.adaptive_avg_pool2d(x, 1)
    assert sent.calls == 0
    assert y.placements == (Partial(),)
    assert_same_as_unsharded(lambda x: F.adaptive_avg_pool2d(x, (None, 2)) * 2, x)


@ranks(2)
def test_names_of_adaptive_max_pooling(world):
    x = shard(world.randn(2, 2, 9), world.mesh, dim=2, sizes=(3, 6))
    for function in (torch.adaptive_max_pool1d, F.adaptive_max_pool1d_with_indices):
        assert_same_as_unsharded(function, x, 4)
    y = shard(world.randn(2, 2, 9, 5), world.mesh, dim=2, sizes=(3, 6))
    for function in (torch._C._nn.adaptive_max_pool2d, F.adaptive_max_pool2d_with_indices, torch._C._nn.adaptive_avg_pool2d):
        assert_same_as_unsharded(function, y, (1, 4))


@pytest.mark.parametrize("module", [nn.LPPool1d(3, 2, ceil_mode=True), nn.LPPool2d(2, (3, 2), stride=2), nn.LPPool3d(2, 2)])
@ranks(3)
def test_lp_pooling(world, module):
    n = int(type(module).__name__[-2])
    x = world.randn(2, 3, *[9, 7, 6][:n]).abs()
    for dim, sizes in ((2, (5, 1, 3)), (1, (1, 0, 2))):
        with count_communication() as sent:
            assert_same_as_unsharded(module, shard(x, world.mesh, dim=dim, sizes=sizes))
        assert sent.only(collective="exchange").calls <= 2


@ranks(2)
def test_aligned_windows_exchange_nothing(world):
    x = shard(world.randn(1, 2, 12, 6), world.mesh, dim=2, sizes=(8, 4))
    with count_communication() as sent:
        y = F.max_pool2d(x, 2)
        F.avg_pool2d(x, 4, stride=4)
    assert sent.calls == 0
    assert y._spec.sizes[2] == (4, 2)


@ranks(2)
def test_names_of_max_pooling(world):
    x = shard(world.randn(2, 2, 9), world.mesh, dim=2, sizes=(3, 6))
    for function in (torch.max_pool1d, torch.max_pool1d_with_indices, F.max_pool1d_with_indices):
        assert_same_as_unsharded(function, x, 3, 2, 1)
    y = shard(world.randn(2, 2, 9, 5), world.mesh, dim=2, sizes=(3, 6))
    for function in (torch.max_pool2d, torch.nn.functional.max_pool2d_with_indices, torch._C._nn.max_pool2d_with_indices):
        assert_same_as_unsharded(function, y, 3, 2, 1)


@ranks(2)
def test_a_window_without_rows_is_refused_on_all_ranks(world):
    x = shard(world.randn(1, 2, 1, 8), world.mesh, dim=3)
    with pytest.raises(MissingShardPatch, match="contains no row"):
        F.max_pool2d(x, 2, padding=1, dilation=2)


@ranks(2)
def test_bad_windows_raise_on_all_ranks(world):
    x = shard(world.randn(1, 2, 6, 6), world.mesh, dim=2)
    for arguments in ({"kernel_size": 3, "padding": 2}, {"kernel_size": 9}):
        for function in (F.max_pool2d, F.avg_pool2d):
            with pytest.raises(RuntimeError):
                function(x, **arguments)


# ---------------------------------------------------------------------- windows that depend on data


@ranks(3)
def test_unpooling_of_overlapping_windows(world):
    for n, layouts in (
        (1, ((2, (0, 2, 3)), (1, (2, 0, 1)))),
        (2, ((2, (1, 3, 1)), (3, (1, 1, 2)), (0, (1, 0, 1)))),
        (3, ((4, (1, 0, 1)),)),
    ):
        plain = world.randn(2, 3, *[11, 9, 5][:n])
        values, places = MAXIMA[n](plain, 3, stride=2, return_indices=True)
        for dim, sizes in layouts:
            split = shard(values, world.mesh, dim=dim, sizes=sizes)
            where = shard(places, world.mesh, dim=dim, sizes=sizes)
            function = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}[n]
            assert_same_as_unsharded(function, split, where, 3, 2, 0, plain.shape[-n:])
            assert_same_as_unsharded(function, split, places, 3, 2)
            assert function(split, where, 3, 2).placements == split.placements


@ranks(2)
def test_pooling_then_unpooling(world):
    def there_and_back(x):
        values, places = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(values, places, 2, output_size=x.shape)

    assert_same_as_unsharded(there_and_back, shard(world.randn(1, 2, 9, 6), world.mesh, dim=2, sizes=(4, 5)))


@ranks(3)
def test_fractional_pooling(world):
    for function, n in ((F.fractional_max_pool2d, 2), (F.fractional_max_pool3d, 3)):
        samples = world.randn(2, 4, n).sigmoid()
        for dim, sizes in ((2, (3, 0, 6)), (1, (1, 3, 0)), (0, (1, 0, 1))):
            x = shard(world.randn(2, 4, *[9, 8, 7][:n]), world.mesh, dim=dim, sizes=sizes)
            for arguments in ({"output_size": 4, "return_indices": True}, {"output_ratio": (0.6,) * n}):
                assert_same_as_unsharded(functools.partial(function, kernel_size=2, _random_samples=samples, **arguments), x)
            drawn = function(x, 2, output_size=4)
            assert drawn.placements == x.placements
            assert (drawn.full_tensor() <= x.full_tensor().amax()).all()

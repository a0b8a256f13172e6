"""Interpolation on shards equals interpolation in one process."""

import random

import pytest
import torch
import torch.nn.functional as F
from tests.shard_tensor.conv_cases import random_split
from torch import nn

from shardwise.collectives.counter import count_communication
from shardwise.shard_tensor.taps import Resize
from shardwise.testing import assert_same_as_unsharded, ranks, shard

MODES = {1: ("nearest", "nearest-exact", "linear", "area"), 2: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
         3: ("nearest", "nearest-exact", "trilinear", "area")}  # fmt: skip


def random_interpolation(rng):
    n = rng.choice((1, 2, 2, 3))
    mode = rng.choice(MODES[n])
    shape = [rng.randint(1, 3), rng.randint(1, 3), *(rng.randint(2, 12 if n < 3 else 7) for _ in range(n))]
    arguments = {"mode": mode}
    if rng.random() < 0.5:
        arguments["size"] = [rng.choice((rng.randint(1, 16), 2 * rows, rows)) for rows in shape[2:]]
    else:
        scales = [rng.choice((2, 3, 0.5, 1.0, rng.uniform(0.5, 2.6))) for _ in range(n)]
        arguments["scale_factor"] = scales if rng.random() < 0.5 else scales[0]
        if rng.random() < 0.3:
            arguments["recompute_scale_factor"] = True
    if mode in ("linear", "bilinear", "bicubic", "trilinear"):
        arguments["align_corners"] = rng.random() < 0.4
        if n == 2 and rng.random() < 0.4:
            # torch 2.13 gives every row the values of the first when the antialiased result is one column wide
            arguments["antialias"] = F.interpolate(torch.empty(shape, device="meta"), **arguments).shape[-1] > 1
    return shape, arguments


def check_random(world, seed, count, dtype=torch.float64):
    rng = random.Random(seed)
    for number in range(count):
        shape, arguments = random_interpolation(rng)
        x = random_split(rng, world.mesh, world.randn(*shape, dtype=dtype))
        try:
            assert_same_as_unsharded(F.interpolate, x, kwargs=arguments)
        except BaseException as error:
            error.add_note(f"case {number}: {x._spec.describe()}, {arguments}")
            raise


@ranks(2)
def test_150_random_cases_on_two_ranks(world):
    check_random(world, 2, 150)


@ranks(3)
def test_80_random_cases_on_three_ranks(world):
    check_random(world, 3, 80)


@ranks(4, mesh={"a": 2, "b": 2})
def test_60_random_cases_on_a_mesh_of_two_axes(world):
    check_random(world, 5, 60)


@ranks(2)
def test_60_random_cases_in_single_precision(world):
    check_random(world, 7, 60, torch.float32)


@pytest.mark.parametrize(("mode", "halo"), [("nearest", 0), ("bilinear", 1), ("bicubic", 2)])
@ranks(3)
def test_a_whole_factor_fetches_the_halo_only(world, mode, halo):
    x = shard(world.randn(1, 2, 12, 4), world.mesh, dim=2, sizes=(3, 4, 5))
    with count_communication() as sent:
        y = nn.Upsample(scale_factor=2, mode=mode)(x)
    assert y._spec.sizes[2] == (6, 8, 10)
    assert sent.bytes == halo * (2 if world.rank == 1 else 1) * 2 * 4 * 8


@ranks(4)
def test_shards_narrower_than_the_reach(world):
    x = shard(world.randn(1, 2, 7, 5), world.mesh, dim=2, sizes=(1, 1, 0, 5))
    for arguments in ({"scale_factor": 2}, {"size": (3, 9)}, {"size": (33, 4), "align_corners": True}, {"size": (2, 2), "antialias": True}):
        assert_same_as_unsharded(F.interpolate, x, kwargs={"mode": "bicubic", **arguments})


@ranks(2)
def test_integers_and_the_old_name(world):
    image = shard((world.randn(1, 3, 8, 6) * 60).to(torch.uint8), world.mesh, dim=2)
    assert_same_as_unsharded(F.interpolate, image, kwargs={"scale_factor": 1.5}, grads=False)
    assert_same_as_unsharded(F.interpolate, image, kwargs={"size": (5, 9), "mode": "bilinear"}, grads=False)
    x = shard(world.randn(1, 3, 8, 6), world.mesh, dim=3)
    assert_same_as_unsharded(nn.UpsamplingBilinear2d(scale_factor=1.5), x)


@ranks(2)
def test_bad_arguments_raise_on_all_ranks(world):
    x = shard(world.randn(1, 2, 6), world.mesh, dim=2)
    for arguments in ({}, {"size": 3, "scale_factor": 2.0}, {"size": 3, "mode": "bilinear"}, {"size": 3, "align_corners": True}):
        with pytest.raises((ValueError, NotImplementedError)):
            F.interpolate(x, **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_whose_rounding_shifts_a_row_takes_no_short_way(dtype):
    shifted = 0
    for factor in range(2, 60):
        resize = Resize(kind="nearest", size=9, outputs=9 * factor, scale=float(factor), align_corners=False, antialias=False)
        rows = [row for (row,) in resize.table(dtype)[0]]
        whole = [output // factor for output in range(9 * factor)]
        shifted += rows != whole
        if resize.factor is not None:
            assert rows == whole
    assert shifted or dtype is torch.float64

"""Grid sampling on shards equals grid sampling in one process, and fetches only the rows in reach."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from tests.shard_tensor.conv_cases import random_split
from torch.distributed.tensor import Partial, Replicate, Shard

from shardwise.collectives.counter import count_communication
from shardwise.testing import assert_same_as_unsharded, ranks, shard


def identity_grid(n, shape, align):
    return F.affine_grid(torch.eye(n, n + 1, dtype=torch.float64).expand(shape[0], -1, -1), shape, align)


def check_random(world, seed, count):
    rng = random.Random(seed)
    for number in range(count):
        n = rng.choice((2, 2, 3))
        batch, channels = rng.randint(1, 3), rng.randint(1, 3)
        shape = (batch, channels, *(rng.randint(1, 9 if n == 2 else 5) for _ in range(n)))
        align = rng.random() < 0.5
        mode = rng.choice(("bilinear", "nearest", "bicubic") if n == 2 else ("bilinear", "nearest"))
        arguments = {"mode": mode, "padding_mode": rng.choice(("zeros", "border", "reflection")), "align_corners": align}
        if rng.random() < 0.5:
            grid = identity_grid(n, shape, align) + rng.choice((0.02, 0.2)) * world.randn(batch, *shape[2:], n)
        else:
            grid = 1.3 * world.randn(batch, *(rng.randint(1, 6) for _ in range(n)), n)
        x = random_split(rng, world.mesh, world.randn(*shape))
        grid = random_split(rng, world.mesh, grid)
        try:
            assert_same_as_unsharded(F.grid_sample, x, grid, kwargs=arguments)
        except BaseException as error:
            error.add_note(f"case {number}: {x._spec.describe()}, {grid._spec.describe()}, {arguments}")
            raise


@ranks(2)
def test_150_random_cases_on_two_ranks(world):
    check_random(world, 2, 150)


@ranks(3)
def test_100_random_cases_on_three_ranks(world):
    check_random(world, 3, 100)


@ranks(4, mesh={"a": 2, "b": 2})
def test_80_random_cases_on_a_mesh_of_two_axes(world):
    check_random(world, 5, 80)


@ranks(3)
def test_small_displacements_fetch_a_halo(world):
    whole, grid = world.randn(1, 2, 30, 4), identity_grid(2, (1, 2, 30, 4), True) + 0.01
    x, places = shard(whole, world.mesh, dim=2), shard(grid, world.mesh, dim=1)
    with count_communication() as sent:
        y = F.grid_sample(x, places, align_corners=True)
    assert y._spec.sizes[2] == (10, 10, 10)
    assert sent.only(collective="exchange").bytes <= 2 * 4 * 2 * 4 * 8  # at most four rows to each side
    assert_same_as_unsharded(F.grid_sample, x, grid, kwargs={"align_corners": True})


@ranks(2)
def test_plain_operands_pending_sums_and_numbers_that_are_none(world):
    x, grid = world.randn(2, 3, 5, 4), world.randn(2, 6, 4, 2)
    for placement, dim in itertools.product((Partial(), Replicate(), Shard(2)), (0, 1, 2, 3)):
        places = shard(grid, world.mesh, dim=dim)
        assert_same_as_unsharded(F.grid_sample, x, places, kwargs={"align_corners": False})
        split = shard(x, world.mesh, placements=(placement,))
        assert_same_as_unsharded(F.grid_sample, split, grid, kwargs={"align_corners": False})
        assert_same_as_unsharded(F.grid_sample, split, places, kwargs={"align_corners": False})
    grid[0, 0, 0, 1], grid[1, 1, 1, 1] = torch.nan, torch.inf
    y = F.grid_sample(shard(x, world.mesh, dim=2), shard(grid, world.mesh, dim=1), align_corners=False)
    z = F.grid_sample(x, grid, align_corners=False)
    assert torch.allclose(y.full_tensor(), z, equal_nan=True, atol=1e-10)


@ranks(3)
def test_affine_grids_and_a_spatial_transformer(world):
    theta = world.randn(4, 2, 3)
    for dim, sizes in ((0, (1, 0, 3)), (1, (1, 1, 0)), (2, (1, 1, 1))):
        split = shard(theta, world.mesh, dim=dim, sizes=sizes)
        assert_same_as_unsharded(lambda t: F.affine_grid(t, (4, 3, 5, 6), align_corners=False), split)

    def transform(x, theta):
        return F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=True), align_corners=True)

    image = world.randn(4, 2, 7, 6)
    for dim in (0, 1, 2, 3):
        assert_same_as_unsharded(transform, shard(image, world.mesh, dim=dim), theta)


@ranks(2)
def test_bad_shapes_raise_on_all_ranks(world):
    x = shard(world.randn(2, 3, 5, 4), world.mesh, dim=2)
    for shape in ((1, 4, 4, 2), (2, 4, 4, 3), (2, 4, 2)):
        with pytest.raises(RuntimeError):
            F.grid_sample(x, world.randn(*shape), align_corners=False)

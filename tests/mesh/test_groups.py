"""Groups of a mesh: group rank is mesh coordinate, on offset, transposed and unsorted meshes and on parts of a world."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.collectives.functional import all_gather
from shardwise.mesh.groups import axis_group, axis_name, flat_group, new_group
from shardwise.testing import ranks


def members(group):
    """Global ranks in group order, by metadata and by what a gather brings."""
    gathered = all_gather(torch.tensor([dist.get_rank()]), 0, (1,) * group.size(), group).tolist()
    assert gathered == dist.get_process_group_ranks(group)
    return gathered


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_axis_groups(world):
    mesh, me = world.mesh, world.rank
    assert members(axis_group(mesh, 0)) == ([0, 2] if me % 2 == 0 else [1, 3])
    assert members(axis_group(mesh, 1)) == ([0, 1] if me < 2 else [2, 3])
    assert axis_group(mesh, -1) is axis_group(mesh, 1) is mesh.get_group("domain") is axis_group(mesh["domain"])
    assert axis_name(axis_group(mesh, 0)) == "ddp"
    assert axis_name(axis_group(mesh["domain"])) == "domain"


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_flat_groups(world):
    mesh = world.mesh
    both = flat_group(mesh, (0, 1))
    assert members(both) == [0, 1, 2, 3]
    assert both is dist.group.WORLD
    swapped = flat_group(mesh, (1, 0))
    assert members(swapped) == [0, 2, 1, 3]
    assert swapped.rank() == [0, 2, 1, 3].index(world.rank)
    assert swapped is flat_group(mesh, (1, 0))
    assert axis_name(swapped) == "domain+ddp"


@ranks(8, mesh={"pp": 2, "dp": 2, "tp": 2})
def test_two_of_three_dims(world):
    mesh, (pp, dp, tp) = world.mesh, world.mesh.get_coordinate()
    assert members(flat_group(mesh, (0, 2))) == [2 * dp, 2 * dp + 1, 4 + 2 * dp, 5 + 2 * dp]
    assert members(flat_group(mesh, (1, 2))) == [4 * pp, 4 * pp + 1, 4 * pp + 2, 4 * pp + 3]
    assert members(flat_group(mesh["pp", "dp"], (0, 1))) == [tp, 2 + tp, 4 + tp, 6 + tp]
    assert axis_name(flat_group(mesh, (0, 2))) == "pp+tp"


@ranks(4)
def test_mesh_whose_ranks_do_not_ascend(world):
    mesh = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b"))
    row, column = mesh.get_coordinate()
    assert members(axis_group(mesh, 0)) == [[3, 2], [1, 0]][column]
    assert members(axis_group(mesh, 1)) == [[3, 1], [2, 0]][row]
    assert axis_group(mesh, 0).rank() == row
    assert axis_group(mesh, 1).rank() == column
    assert members(flat_group(mesh, (0, 1))) == [3, 1, 2, 0]


def on_a_part_of_the_world(world):
    mesh = DeviceMesh("cpu", [[1, 3], [2, 4]], mesh_dim_names=("a", "b"))
    if mesh.get_coordinate() is None:
        with pytest.raises(ValueError, match="rank 0 is not on"):
            flat_group(mesh, (0, 1))
    else:
        assert members(flat_group(mesh, (0, 1))) == [1, 3, 2, 4]
        assert members(axis_group(mesh, 1)) == [[1, 3], [2, 4]][mesh.get_coordinate()[0]]


@ranks(5)
def test_only_members_take_part(world):
    on_a_part_of_the_world(world)


@ranks(5, processes=True)
def test_only_members_take_part_over_gloo(world):
    on_a_part_of_the_world(world)


@ranks(4, processes=True, mesh={"ddp": 2, "domain": 2})
def test_groups_over_gloo(world):
    assert members(flat_group(world.mesh, (1, 0))) == [0, 2, 1, 3]
    assert members(axis_group(world.mesh, 0)) == ([0, 2] if world.rank % 2 == 0 else [1, 3])


@ranks(2)
def test_unnamed_mesh_and_dim_named_twice(world):
    mesh = DeviceMesh("cpu", [[0, 1]])
    assert axis_name(axis_group(mesh, 1)) == "dim1"
    assert axis_group(mesh, 0).size() == 1
    with pytest.raises(ValueError, match="one dim twice"):
        flat_group(mesh, (1, -1))


def different_histories(world):
    """Ranks make different numbers of groups first: of parts of the world, and of themselves alone."""
    for _ in range(world.rank):
        new_group([world.rank], description="alone")
    if world.rank < 2:
        assert members(new_group([1, 0], description="pair")) == [1, 0]
    mesh = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b"))
    assert members(flat_group(mesh, (0, 1))) == [3, 1, 2, 0]
    first, second = (new_group(range(4), description=text) for text in ("first", "second"))
    assert members(first) == members(second) == [0, 1, 2, 3]
    assert first.group_name != second.group_name
    assert axis_name(first) == "first"
    with pytest.raises(ValueError, match=f"rank {world.rank} is not one of"):
        new_group([(world.rank + 1) % 4], description="others")


@ranks(4)
def test_ranks_that_made_other_groups_before(world):
    different_histories(world)


@ranks(4, processes=True)
def test_ranks_that_made_other_groups_before_over_gloo(world):
    different_histories(world)

"""Distributed checkpoints of sharded tensors: saved in one split, loaded in another."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor import Shard as DShard

from shardwise import ShardTensor
from shardwise.testing import ranks, shard

SPLITS = [((1, 4, 2, 3), (3, 2, 4, 1)), ((5, 0, 3, 2), (0, 0, 10, 0)), ((4, 3, 3, 0), (0, 7, 0, 3))]


@pytest.mark.parametrize(("saved", "loaded"), SPLITS)
@ranks(4, processes=True)
def test_a_checkpoint_loads_into_another_split(world, saved, loaded, tmp_path):
    full = world.randn(10, 3)
    folder = str(tmp_path)
    dcp.save({"x": shard(full, world.mesh, dim=0, sizes=saved), "n": 3}, checkpoint_id=folder)
    for dim, sizes in ((0, loaded), (1, (1, 0, 2, 0))):
        target = shard(torch.zeros_like(full), world.mesh, dim=dim, sizes=sizes)
        dcp.load({"x": target}, checkpoint_id=folder)
        torch.testing.assert_close(target.full_tensor(), full, rtol=0, atol=0)
    plain = torch.zeros_like(full)
    dcp.load({"x": plain}, checkpoint_id=folder)
    torch.testing.assert_close(plain, full, rtol=0, atol=0)
    other: DTensor = distribute_tensor(torch.zeros_like(full), world.mesh, [DShard(0)])
    dcp.load({"x": other}, checkpoint_id=folder)
    torch.testing.assert_close(other.full_tensor(), full, rtol=0, atol=0)


@ranks(2, processes=True)
def test_a_pending_sum_is_not_saved(world, tmp_path):
    x = ShardTensor.from_local(world.randn(3), world.mesh, (Partial(),))
    with pytest.raises(BaseException, match="pending sum"):
        dcp.save({"x": x}, checkpoint_id=str(tmp_path))

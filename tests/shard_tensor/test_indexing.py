"""Picking and placing by index: what is sent, where results lie, what is refused on all ranks."""

import pytest
import torch
from torch.distributed.tensor.placement_types import Shard

from shardwise import MissingShardPatch, ShardTensor, fallback
from shardwise.testing import assert_same_as_unsharded, count_communication, ranks, shard


@ranks(4)
def test_rows_asked_for_come_from_their_owners_only(world):
    x = shard(world.randn(32, 8), world.mesh, dim=0)
    wanted = torch.arange(32)
    with count_communication() as counted, fallback("error"):
        picked = x[wanted]
    rows = sum(record.bytes for record in counted.records) - 2 * 3 * 8
    assert rows <= 8 * 8  # every rank asks for the rows it has: counts and no rows travel
    assert picked.placements == (Shard(0),)
    with count_communication() as counted, fallback("error"):
        x[wanted.flip(0)]
    assert sum(record.bytes for record in counted.records) <= 8 * 8 * 8 + 8 * 8 + 4 * 3 * 8


@ranks(3)
def test_an_index_out_of_range_on_one_rank_is_refused_on_all(world):
    x = shard(world.randn(6, 2), world.mesh, dim=0)
    index = shard(torch.tensor([0, 1, 2, 3, 4, 6]), world.mesh, dim=0)
    with pytest.raises(IndexError, match="outside the 6 rows"):
        x[index]
    with pytest.raises(IndexError):
        x[torch.tensor([7])]


@ranks(4)
def test_a_mask_leaves_rows_where_they_are(world):
    x = shard(torch.arange(12.0), world.mesh, dim=0, sizes=(5, 0, 4, 3))
    with count_communication() as counted, fallback("error"):
        kept = x[x > 3.5]
    assert [(record.collective, record.calls) for record in counted.records] == [("all_gather", 1)]
    assert kept._spec.sizes == ((1, 0, 4, 3),)
    assert kept.full_tensor().tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


@ranks(4)
def test_messages_over_split_edges_add_up_at_the_nodes(world):
    """One step of a graph network: neighbours picked by index, sums over edges, nodes and edges split."""
    nodes = shard(world.randn(10, 6), world.mesh, dim=0, sizes=(4, 0, 3, 3))
    weight = world.randn(6, 6)
    generator = torch.Generator().manual_seed(0)
    source, target = torch.randint(0, 10, (2, 40), generator=generator)

    def step(x, w, i, j):
        messages = torch.relu(x[i] @ w)
        total = x.new_zeros(10, 6).index_add_(0, j, messages)
        largest = x.new_zeros(10, 6).scatter_reduce_(0, j.unsqueeze(1).expand(-1, 6), messages, "amax", include_self=False)
        return total + largest + x

    assert_same_as_unsharded(step, nodes, weight, source, target)
    assert_same_as_unsharded(step, nodes, weight, shard(source, world.mesh, dim=0), shard(target, world.mesh, dim=0, sizes=(40, 0, 0, 0)))
    with fallback("error"):
        assert step(nodes, weight, source, target)._spec.sizes == nodes._spec.sizes


@ranks(4)
def test_nearest_neighbours_of_split_points(world):
    """Distances to all points by ranks' own rows, features of the nearest gathered from where they lie."""
    points = shard(world.randn(11, 3), world.mesh, dim=0, sizes=(4, 0, 5, 2))
    features = shard(world.randn(11, 5), world.mesh, dim=0, sizes=(4, 0, 5, 2))

    def pooled(p, f):
        distance, index = torch.cdist(p, p).topk(3, largest=False)
        return (f[index] * torch.exp(-distance).unsqueeze(-1)).sum(1), distance

    assert_same_as_unsharded(pooled, points, features)

    def within(p, f):
        near = torch.cdist(p, p) < 1.2
        receiver, sender = near.nonzero(as_tuple=True)
        return f.new_zeros(11, 5).index_add_(0, receiver, f[sender])

    assert_same_as_unsharded(within, points, features)


@ranks(2)
def test_a_plain_buffer_that_is_given_shards_becomes_a_shard_tensor(world):
    x = shard(world.randn(6, 4), world.mesh, dim=0)
    buffer = torch.zeros(6, 8, dtype=torch.float64)
    buffer[:, 2:6] = x
    assert isinstance(buffer, ShardTensor)
    assert buffer._spec.sizes == ((3, 3), None)
    assert torch.equal(buffer.full_tensor()[:, 2:6], x.full_tensor())


@ranks(2)
def test_a_plain_buffer_whose_memory_is_shared_is_left_alone(world):
    x = shard(world.randn(6, 4), world.mesh, dim=0)
    buffer = torch.zeros(6, 4, dtype=torch.float64)
    other = buffer.view(24)
    with pytest.raises(MissingShardPatch, match="cannot become sharded"):
        buffer[:] = x
    with pytest.raises(MissingShardPatch, match="cannot become sharded"):
        other[:6].copy_(x[:, 0])
    assert not other.any()


@ranks(2)
def test_a_plain_buffer_that_is_given_whole_values_stays_plain(world):
    x = shard(world.randn(6, 4), world.mesh, dim=0)
    running = torch.zeros(4, dtype=torch.float64)
    running.mul_(0.9).add_(x.mean(0), alpha=0.1)
    assert type(running) is torch.Tensor
    torch.testing.assert_close(running, x.full_tensor().mean(0) * 0.1)


@ranks(2)
def test_a_write_after_an_op_that_saved_the_shard_is_noticed(world):
    x = shard(world.randn(1, 2, 6), world.mesh, dim=2)
    weight = world.randn(3, 2, 3).requires_grad_()
    y = torch.nn.functional.conv1d(x, weight, padding=1)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()

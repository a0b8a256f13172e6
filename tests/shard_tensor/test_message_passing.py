"""Message passing: nodes and edges split over ranks, edges naming nodes by their number in the whole graph."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from shardwise.testing import assert_same_as_unsharded, count_communication, ranks, shard

NODES, EDGES, FEATURES = 40, 150, 3


def layer(x, source, target):
    """Each node gets the sum of its neighbours' features, twice, once by each op."""
    messages = x[source] * 2
    added = torch.zeros_like(x).index_add(0, target, messages, alpha=0.5)
    return added + x.scatter_add(0, target.unsqueeze(1).expand(-1, x.shape[1]), messages)


def graph(world, reach=NODES):
    target = world.same(lambda: torch.randint(0, NODES, (EDGES,))).sort().values
    return (target + world.same(lambda: torch.randint(0, reach, (EDGES,)))) % NODES, target


@pytest.mark.parametrize(("nodes", "edges"), [((14, 13, 13), (50, 50, 50)), ((40, 0, 0), (0, 149, 1)), ((1, 38, 1), (75, 0, 75))], ids=str)
@ranks(3)
def test_equals_one_process(world, nodes, edges):
    x = shard(world.randn(NODES, FEATURES), world.mesh, dim=0, sizes=nodes)
    source, target = graph(world)
    assert_same_as_unsharded(layer, x, *(shard(t, world.mesh, dim=0, sizes=edges) for t in (source, target)))
    assert_same_as_unsharded(layer, x, source, target)


@ranks(4)
def test_on_two_axes(world):
    mesh = world.make_mesh((2, 2), ("a", "b"))
    source, target = graph(world)
    for node, edge in (
        ((Shard(0), Shard(0)), (Shard(0), Shard(0))),
        ((Shard(0), Replicate()), (Shard(0), Replicate())),
        ((Shard(0), Shard(1)), (Shard(0), Replicate())),
        ((Shard(0), Replicate()), (Replicate(), Shard(0))),
    ):
        x = shard(world.randn(NODES, FEATURES), mesh, placements=node)
        assert_same_as_unsharded(layer, x, *(shard(t, mesh, placements=edge) for t in (source, target)))


@ranks(4)
def test_only_what_crosses_travels(world):
    """Edges lie with their targets, and reach three nodes on: what travels does not grow with the graph."""
    sent = []
    for size in (100, 400):
        target = torch.arange(size).repeat_interleave(5)
        source = (target + torch.arange(5).repeat(size) % 4) % size
        x = shard(world.randn(size, 64), world.mesh, dim=0)
        messages = x[shard(source, world.mesh, dim=0)]
        with count_communication() as count:
            torch.zeros_like(x).index_add(0, shard(source, world.mesh, dim=0), messages)
        sent.append(count.bytes)
    assert sent[0] == sent[1] == 3 * 64 * 8 + 3 * 8 + 3 * 8  # sums of three nodes, their numbers, one count for each other rank


@ranks(3)
def test_nodes_that_do_not_exist_are_refused_together(world):
    x = shard(world.randn(NODES, FEATURES), world.mesh, dim=0)
    for wrong in (NODES, -1):
        target = shard(torch.tensor([0, 1, 2, 3, 4, wrong]), world.mesh, dim=0)
        with pytest.raises(IndexError, match="out of range"):
            x.index_add(0, target, shard(world.randn(6, FEATURES), world.mesh, dim=0))


@ranks(2)
def test_an_index_that_was_expanded_and_then_changed(world):
    """A result made of an expanded index has memory of its own: its columns may differ."""

    def changed(i, how):
        i = how(i.unsqueeze(1).expand(-1, 3))
        i[:, 1] += 1
        return i

    numbers = torch.tensor([0, 3, 2, 1, 4, 0])
    for how in (torch.clone, lambda i: i * 1, torch.Tensor.contiguous, lambda i: torch.zeros_like(i) + i):
        assert_same_as_unsharded(
            lambda x, i, s, how=how: x.scatter_add(0, changed(i, how), s),
            shard(world.randn(6, 3), world.mesh, dim=0, sizes=(4, 2)),
            shard(numbers, world.mesh, dim=0, sizes=(4, 2)),
            shard(world.randn(6, 3, seed=1), world.mesh, dim=0, sizes=(4, 2)),
        )

"""Sharded tensors made, moved and left inside one compiled function: what makes them runs outside of the graph, with the same numbers."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise import ShardTensor, scatter_tensor
from shardwise.testing import ranks


def infer(local, mesh):
    return (ShardTensor.from_local(local, mesh, [Shard(0)]).redistribute(placements=[Shard(1)]) * 2).to_local()


def state(local, mesh):
    x = ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes={0: [(3, 4), (2, 4)]})
    return x.redistribute(placements=[Shard(1)]).to_local() * 2


def chunk(local, mesh):
    return ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes="chunk", global_shape=(5, 4)).full_tensor() * 2


def scatter(local, mesh):
    return (scatter_tensor(local[:2].clone(), 0, mesh, [Shard(0)]) * 2).full_tensor() + local.sum()


def dtensor(local, mesh):
    x = ShardTensor.from_dtensor(distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)], src_data_rank=None))
    return x.redistribute(placements=[Replicate()]).to_local() + local.sum()


@pytest.mark.parametrize("made", [infer, state, chunk, scatter, dtensor])
@ranks(2, processes=True, timeout=120)
def test_made_in_a_compiled_function(world, made):
    torch._dynamo.reset()
    local = world.randn(5, 4).float().split([3, 2])[world.rank].clone().requires_grad_()
    results = []
    for run in (made, torch.compile(made, backend="aot_eager", dynamic=False)):
        y = run(local, world.mesh)
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), local)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


@ranks(2, processes=True, timeout=120)
def test_a_full_graph_says_why_not(world):
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a ShardTensor is made outside of a graph"):
        torch.compile(infer, backend="aot_eager", fullgraph=True)(world.randn(3, 4), world.mesh)

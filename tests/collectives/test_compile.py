"""Every collective traces into one graph, forward and backward, and computes the same."""

import pytest
import torch
import torch.distributed as dist

from shardwise.collectives.exchange import exchange
from shardwise.collectives.functional import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
    ring_shift,
    sum_forward,
    sum_gradient,
)
from shardwise.mesh.groups import axis_group, flat_group
from shardwise.testing import ranks

OWNED = ((0, 2), (2, 2), (2, 5))
CASES = {
    "all_gather": lambda x, g, me: all_gather(x, 1, (4, 4, 4), g),
    "all_gather_uneven": lambda x, g, me: all_gather(x[: me + 1], 0, (1, 2, 3), g),
    "reduce_scatter": lambda x, g, me: reduce_scatter(x, 0, (1, 1, 1), g),
    "reduce_scatter_uneven": lambda x, g, me: reduce_scatter(x, 1, (1, 3, 0), g),
    "all_reduce": lambda x, g, me: all_reduce(x, g),
    "all_reduce_max": lambda x, g, me: all_reduce(x, g, "max"),
    "sum_pair": lambda x, g, me: sum_forward(sum_gradient(x, g) * 2, g),
    "all_to_all": lambda x, g, me: all_to_all(x, (1, 0, 2), ((1, 0, 2)[me],) * 3, 0, g),
    "all_to_all_other_dim": lambda x, g, me: all_to_all(x, (1, 0, 2), (4, 4, 4), 0, g, 1),
    "ring_shift": lambda x, g, me: ring_shift(x, (3, 4), 1, g),
    "broadcast": lambda x, g, me: broadcast(x, 1, g),
    "exchange": lambda x, g, me: exchange(x[: (2, 0, 3)[me]], owned=OWNED, wanted=((-1, 3), (1, 4), (1, 7)), dim=0, group=g, fill=2.0),
    "exchange_nothing": lambda x, g, me: exchange(x[: (2, 0, 3)[me]], owned=OWNED, wanted=OWNED, dim=0, group=g) * 1,
}


@ranks(3)
def test_compiled_equals_eager(world):
    group = axis_group(world.mesh)

    def every_case(x):
        return [case(x.sin(), group, world.rank) for case in CASES.values()]

    def run(function):
        x = (world.randn(3, 4, seed=1) * (world.rank + 1)).requires_grad_()
        results = function(x)
        sum((y**2).sum() for y in results).backward()
        return results, x.grad

    torch._dynamo.reset()
    compiled = run(torch.compile(every_case, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(compiled, run(every_case), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dims", [(0,), (0, 1)])
@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_groups_of_a_mesh_inside_a_graph(world, dims):
    flat_group(world.mesh, dims)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: all_reduce(x, flat_group(world.mesh, dims)), backend="aot_eager", fullgraph=True)
    x = torch.tensor([1.0 * world.rank])
    dist.barrier()
    assert compiled(x).item() == ({0: 2, 1: 4}[world.rank % 2] if dims == (0,) else 6)

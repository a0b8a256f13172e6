"""Split attention inside `torch.compile`: one graph, the same numbers, no second compilation."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.attention import ring_attention, ulysses_attention
from shardwise.spec.sequence import rows_in, zigzag_order
from shardwise.testing import World, ranks


@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention])
@ranks(2, processes=True, timeout=300)
def test_compiles_into_one_graph_once(world: World, attend: object) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    order = zigzag_order(14, 2)
    call = partial(attend, q_spans=order, kv_spans=order, group=dist.group.WORLD, causal=True)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(q * 2, k, v).sin()

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
    for step in range(2):
        results = []
        for function in (layer, compiled):
            local = [world.randn(1, heads, rows_in(order[world.rank]), 8, seed=10 * step + world.rank) for heads in (4, 2, 2)]
            local = [x.requires_grad_() for x in local]
            out = function(*local)
            out.sum().backward()
            results.append((out, *(x.grad for x in local)))
        torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    assert backend.frame_count == 1

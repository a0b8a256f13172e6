"""`flex_attention` on shards: gathered, right, and said so; torch has no backward for it on CPU."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import shardwise
from shardwise.errors import MissingShardPatch
from shardwise.testing import assert_same_as_unsharded, ranks, shard


def causal(score, batch, head, query, key):
    return torch.where(query >= key, score, -float("inf"))


@pytest.mark.filterwarnings("ignore")
@ranks(2, processes=True, timeout=150)
def test_scores_by_position_are_those_of_the_whole(world):
    q, k, v = (shard(world.randn(1, 2, 16, 8).float(), world.mesh, dim=2, sizes=(9, 7)) for _ in range(3))
    assert_same_as_unsharded(lambda a, b, c: flex_attention(a, b, c, score_mod=causal), q, k, v, grads=False)
    with shardwise.fallback("error"), torch.no_grad(), pytest.raises(Exception, match="flex_attention on") as caught:
        flex_attention(q, k, v)
    causes = [caught.value, caught.value.__cause__]
    assert any(isinstance(cause, MissingShardPatch) for cause in causes)

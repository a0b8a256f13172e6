"""`scaled_dot_product_attention` and what is built on it, in every layout, against one process."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardwise import ShardTensor
from shardwise.random import use_generator
from shardwise.testing import assert_same_as_unsharded, ranks, shard

sdpa = F.scaled_dot_product_attention
SPLITS = {"batch": Shard(0), "heads": Shard(1), "rows": Shard(2), "features": Shard(3), "whole": Replicate(), "plain": None}
ROWS, KEYS = (4, 0, 5), (1, 7, 3)


def lay(x, world, split, sizes=None):
    placement = SPLITS[split]
    if placement is None:
        return x
    return shard(x, world.mesh, placements=(placement,), sizes={2: sizes} if split == "rows" and sizes else None)


@pytest.mark.parametrize(("queries", "keys"), [p for p in itertools.product(SPLITS, SPLITS) if p != ("plain", "plain")])
@ranks(3)
def test_every_pair_of_layouts(world, queries, keys):
    q, k, v = world.randn(2, 4, 9, 8), world.randn(2, 4, 11, 8), world.randn(2, 4, 11, 5)
    mask = world.randn(9, 11) > 0
    mask[:, 0] = True
    parts = lay(q, world, queries, ROWS), lay(k, world, keys, KEYS), lay(v, world, keys, KEYS)
    assert_same_as_unsharded(sdpa, *parts)
    assert_same_as_unsharded(lambda a, b, c: sdpa(a, b, c, attn_mask=mask, scale=0.3), *parts)


@pytest.mark.parametrize("split", ["batch", "heads", "rows", "whole"])
@ranks(3)
def test_causal_with_fewer_key_heads_and_an_additive_mask_with_gradient(world, split):
    q, k, v = world.randn(2, 6, 9, 8), world.randn(2, 3, 9, 8), world.randn(2, 3, 9, 8)
    bias = world.randn(1, 6, 9, 9)
    parts = [lay(x, world, split, ROWS) for x in (q, k, v)]
    assert_same_as_unsharded(lambda a, b, c: sdpa(a, b, c, is_causal=True, enable_gqa=True), *parts)
    assert_same_as_unsharded(lambda a, b, c, d: sdpa(a, b, c, attn_mask=d, enable_gqa=True), *parts, bias)


@ranks(4)
def test_two_axes(world):
    mesh = world.make_mesh((2, 2), ("a", "b"))
    x = world.randn(2, 4, 10, 8)
    for placements in itertools.product((Shard(0), Shard(1), Shard(2), Replicate(), Partial()), repeat=2):
        part = shard(x, mesh, placements=placements)
        if isinstance(part, ShardTensor):
            assert_same_as_unsharded(lambda a: sdpa(a, a * 0.5, a, is_causal=True), part)


@ranks(3)
def test_modules_built_on_it(world):
    x = shard(world.randn(1, 9, 8), world.mesh, dim=1, sizes=ROWS)
    attention = world.same(lambda: nn.MultiheadAttention(8, 2, batch_first=True).double())
    assert_same_as_unsharded(lambda a: attention(a, a, a, need_weights=False)[0], x)
    layer = world.same(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double())
    assert_same_as_unsharded(layer, x)


@ranks(3)
def test_dropout_is_that_of_the_whole(world):
    """The mask depends on the place in the whole tensor, not on the split."""
    q, k, v = world.randn(1, 2, 9, 8), world.randn(1, 2, 9, 8), world.randn(1, 2, 9, 8)
    results = []
    for split in ("heads", "rows", "whole"):
        with use_generator(torch.Generator().manual_seed(7)):
            results.append(sdpa(*(lay(x, world, split, ROWS) for x in (q, k, v)), dropout_p=0.5).full_tensor())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])
    assert not torch.allclose(results[0], sdpa(q, k, v))


@ranks(2)
def test_features_that_lie_apart_in_memory(world):
    """Transposed, overlapping, and channels last: kernels read the features of a row next to each other."""
    views = {
        "transposed": lambda x: x.transpose(1, 2)[:, None],
        "windows": lambda x: x[0].unfold(0, 2, 1)[:, None],
        "channels last": lambda x: torch.stack([x, x * 2], 1).contiguous(memory_format=torch.channels_last),
    }
    for view in views.values():
        for causal in (False, True):
            attend = lambda x: F.scaled_dot_product_attention(view(x), view(x), view(x), is_causal=causal)  # noqa: B023, E731
            for dim in (1, 2):
                assert_same_as_unsharded(attend, shard(world.randn(3, 6, 5), world.mesh, dim=dim))

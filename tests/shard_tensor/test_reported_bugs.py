"""Bugs that users of other libraries reported, tried here."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from shardwise.testing import assert_same_as_unsharded, ranks, shard


@ranks(4)
def test_loss_with_weights_and_gaps_of_the_whole_grid(world):
    """Point weights and a mask of missing values of full size beside a split field."""
    field, target, weights = world.randn(2, 13, 3), world.randn(2, 13, 3), world.randn(13, 1).abs()
    target[target > 1] = torch.nan

    def loss(x, w):
        there = ~target.isnan()
        return (w * torch.where(there, x - target.nan_to_num(), 0).square()).sum() / (w * there).sum()

    x = shard(field, world.mesh, dim=1, sizes=(5, 1, 0, 7))
    assert_same_as_unsharded(loss, x, weights)
    assert_same_as_unsharded(loss, x, shard(weights, world.mesh, dim=0, sizes=(5, 1, 0, 7)))


@ranks(3)
def test_two_consumers_of_one_result_of_which_one_is_plain(world):
    layer = world.same(lambda: nn.Conv1d(2, 3, 3, padding=1).double())

    def both(x):
        y = layer(x)
        whole = y.full_tensor() if hasattr(y, "full_tensor") else y
        return y.square().mean() + whole.sin().mean()

    assert_same_as_unsharded(both, shard(world.randn(1, 2, 9), world.mesh, dim=2, sizes=(2, 6, 1)))


@ranks(3)
def test_rows_are_overwritten_right_after_their_halo_was_sent(world):
    x = shard(world.randn(1, 1, 9), world.mesh, dim=2, sizes=(2, 6, 1))
    whole = x.full_tensor()
    kernel = torch.tensor([[[0.25, 0.5, 0.25]]], dtype=torch.float64)
    for _ in range(100):
        x.copy_(F.conv1d(x, kernel, padding=1)).add_(1)
        whole = F.conv1d(whole, kernel, padding=1) + 1
    torch.testing.assert_close(x.full_tensor(), whole)


@ranks(7)
def test_a_dim_shorter_than_the_ranks_are_many(world):
    layer = world.same(lambda: nn.Conv1d(2, 2, 3, padding=1).double())
    for sizes in (None, (1, 0, 2, 0, 0, 3, 0)):
        assert_same_as_unsharded(layer, shard(world.randn(1, 2, 6), world.mesh, dim=2, sizes=sizes))


@ranks(2)
def test_a_forward_replaced_in_user_code_keeps_its_rows(world):
    layer = world.same(lambda: nn.Conv2d(2, 3, 5, padding=2).double())
    layer.forward = lambda x: F.conv2d(x, layer.weight, layer.bias, padding=2) * 2
    assert_same_as_unsharded(lambda x: layer(x), shard(world.randn(1, 2, 43, 4), world.mesh, dim=2))


@ranks(4)
def test_the_largest_is_the_first_of_the_largest_four(world):
    x = shard(world.randn(2, 81), world.mesh, dim=1, sizes=(20, 1, 40, 20))
    one, four = x.topk(1, 1), x.topk(4, 1)
    assert torch.equal(one.values.full_tensor(), four.values.full_tensor()[:, :1])
    assert torch.equal(one.indices.full_tensor(), four.indices.full_tensor()[:, :1])


@ranks(4)
def test_value_width_other_than_key_width_with_fewer_key_heads(world):
    q, k, v = (shard(world.randn(1, h, 12, d), world.mesh, dim=2, sizes=(5, 4, 2, 1)) for h, d in ((4, 8), (2, 8), (2, 6)))
    assert_same_as_unsharded(lambda a, b, c: F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True), q, k, v)


@ranks(4)
def test_721_rows_without_padding(world):
    layer = world.same(lambda: nn.Conv2d(1, 1, 4, 2, 1).double())
    assert_same_as_unsharded(layer, shard(world.randn(1, 1, 721, 6), world.mesh, dim=2))


@ranks(8)
def test_convolution_of_three_split_dims_on_eight_ranks(world):
    mesh = world.make_mesh((2, 2, 2), ("x", "y", "z"))
    layer = world.same(lambda: nn.Conv3d(1, 2, 3, padding=1).double())
    assert_same_as_unsharded(layer, shard(world.randn(1, 1, 5, 4, 3), mesh, placements=(Shard(2), Shard(3), Shard(4))))

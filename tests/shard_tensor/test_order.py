"""What ops along a sharded dim send, and where their results lie."""

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardwise import fallback
from shardwise.testing import assert_same_as_unsharded, count_communication, ranks, shard


def sent(function):
    with count_communication() as counted, fallback("error"):
        result = function()
    return result, [(record.collective, record.calls) for record in counted.records], sum(record.bytes for record in counted.records)


@ranks(4)
def test_a_running_sum_sends_one_row_for_each_rank(world):
    x = shard(world.randn(16, 3), world.mesh, dim=0, sizes=(5, 3, 0, 8))
    result, calls, size = sent(lambda: x.cumsum(0))
    assert calls == [("all_gather", 1)]
    assert size == 3 * 3 * 8
    assert result._spec.sizes == x._spec.sizes


@ranks(4)
def test_sorting_along_the_split_dim_moves_the_split_and_brings_it_back(world):
    x = shard(world.randn(16, 8), world.mesh, dim=0, sizes=(5, 3, 6, 2))
    result, calls, size = sent(lambda: x.sort(0))
    assert calls == [("all_to_all", 3)]
    assert size <= 3 * x.to_local().numel() * 8 + 3 * 16 * 2 * 8
    assert result.values._spec.sizes == result.indices._spec.sizes == x._spec.sizes


@ranks(4)
def test_the_largest_are_chosen_among_the_largest_of_each_rank(world):
    x = shard(world.randn(64, 3), world.mesh, dim=0)
    result, calls, size = sent(lambda: x.topk(2, 0))
    assert calls == [("all_gather", 2)]
    assert size == 2 * 3 * (2 * 3 * 8)
    assert result.values.placements == (Replicate(),)


@ranks(4)
def test_an_op_along_a_whole_dim_sends_nothing(world):
    x = shard(world.randn(16, 8), world.mesh, dim=0, sizes=(5, 3, 6, 2))
    ops = (
        lambda: (x.sort(1), x.argsort(1), x.topk(2, 1), x.cumsum(1), x.cummax(1), x.median(1), x.quantile(0.5, 1), x.flip(1), x.roll(1, 1)),
        lambda: (
            x.repeat(1, 2),
            x.gather(1, x.argsort(1)),
            x[:, [1, 2]],
            x.index_add(1, torch.tensor([0]), x[:, :1]),
            x.tril(),
            x.repeat_interleave(2, 0),
        ),
        lambda: torch.fft.rfft(x, dim=1),
    )
    for op in ops:
        assert sent(op)[1] == []


@ranks(4)
def test_rolling_by_a_shard_moves_each_row_once(world):
    x = shard(world.randn(16, 2), world.mesh, dim=0)
    _, calls, size = sent(lambda: x.roll(4, 0))
    assert calls == [("exchange", 1)]
    assert size == 4 * 2 * 8


@ranks(3)
def test_pending_sums_are_resolved_before_they_are_ordered(world):
    x = shard(world.randn(6, 5), world.mesh, placements=(Partial(),))
    assert_same_as_unsharded(lambda t: (*t.sort(0), t.cumsum(0), t.flip(0), t.roll(2, 1), *t.topk(2, 1), t[[1, 2]], t.tril()), x)


@ranks(4, mesh={"a": 2, "b": 2})
def test_two_axes_on_one_dim_and_on_two(world):
    for placements in ((Shard(0), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Shard(1))):
        x = shard(world.randn(7, 6, 5), world.mesh, placements=placements)
        assert_same_as_unsharded(
            lambda t: (*t.sort(0), t.cumsum(1), t.flip(0, 1), t.roll((1, 2), (0, 1)), *t.median(0), t.logcumsumexp(0)), x
        )


@ranks(3)
def test_second_derivatives_flow_through_moved_splits(world):
    x = shard(world.randn(6, 4), world.mesh, dim=0, sizes=(4, 0, 2))

    def slope(t):
        value = (t.sort(0)[0].cumsum(0).flip(0) ** 3).sum() + (torch.fft.rfft(t, dim=0).abs() ** 3).sum() + (t[[1, 1, 5]] ** 3).sum()
        return torch.autograd.grad(value, t, create_graph=True)[0]

    assert_same_as_unsharded(slope, x)


@ranks(2)
def test_dims_out_of_range_are_refused_as_in_torch(world):
    x = shard(world.randn(4, 3), world.mesh, dim=0)
    for call in (lambda: x.sort(2), lambda: x.cumsum(-3), lambda: x.flip(5), lambda: torch.fft.fft(x, dim=4)):
        try:
            call()
        except IndexError as error:
            assert "out of range" in str(error)
        else:
            raise AssertionError("no error")

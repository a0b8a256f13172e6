"""Reductions of worked cases, what they communicate, and how exact they are."""

import pytest
import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardwise import ShardTensor, fallback
from shardwise.testing import assert_same_as_unsharded, count_communication, ranks, shard


@ranks(2)
def test_mean_and_variance_of_twelve_numbers_split_two_to_one(world):
    x = shard(torch.arange(12.0, dtype=torch.float64).view(3, 4), world.mesh, dim=0, sizes=(2, 1)).requires_grad_()
    mean = x.mean()
    assert mean.placements == (Partial(),)
    assert mean.item() == 5.5
    assert x.var().item() == pytest.approx(13.0, abs=1e-12)
    assert x.var(correction=0).item() == pytest.approx(143 / 12, abs=1e-12)
    mean.backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((3, 4), 1 / 12, dtype=torch.float64))
    assert x.grad.to_local().shape == x.to_local().shape


@ranks(2)
def test_mean_with_an_empty_shard_is_a_number(world):
    x = shard(torch.arange(4.0).view(1, 4), world.mesh, dim=0)
    assert [s[0] for s in x._spec.sharding_shapes(0)] == [1, 0]
    assert x.mean().item() == 1.5


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (4, 0), (0, 4)])
@ranks(2)
def test_places_of_maxima_are_global(world, sizes):
    x = shard(torch.tensor([10.0, 5.0, 3.0, 8.0]), world.mesh, dim=0, sizes=sizes)
    assert x.argmax().item() == 0
    top = torch.max(x, 0)
    assert (top.values.item(), top.indices.item()) == (10.0, 0)
    assert x.argmin(0).item() == 2
    low = x.min(dim=0, keepdim=True)
    assert (low.values.tolist(), low.indices.tolist()) == ([3.0], [2])


@pytest.mark.parametrize("sizes", [(2, 2, 2), (0, 5, 1), (1, 0, 5)])
@ranks(3)
def test_ties_give_the_lowest_global_index(world, sizes):
    whole = torch.tensor([1.0, 7.0, 7.0, 2.0, 7.0, -3.0])
    x = shard(whole, world.mesh, dim=0, sizes=sizes)
    assert x.argmax().item() == x.max(0).indices.item() == 1
    assert torch.equal(x.new_zeros(6).add_(x).max(0).indices.full_tensor(), whole.max(0).indices)
    assert torch.equal((x * 0).argmin(0).full_tensor(), torch.tensor(0))


@pytest.mark.parametrize("dim", [0, 1])
@ranks(4, mesh={"a": 2, "b": 2})
def test_argmax_of_everything_over_two_sharded_dims(world, dim):
    whole = torch.zeros(5, 6)
    whole[3, 1] = whole[1, 5] = 1.0
    x = shard(whole, world.mesh, placements=(Shard(dim), Shard(1 - dim)))
    assert x.argmax().item() == whole.argmax().item() == 11


@ranks(3)
def test_named_fields_survive_with_and_without_gradient(world):
    for x in (shard(world.randn(6, 2), world.mesh, dim=0), shard(world.randn(6, 2), world.mesh, dim=0).requires_grad_()):
        result = x.max(0)
        assert type(result) is torch.return_types.max
        assert torch.equal(result.values.full_tensor(), result[0].full_tensor())


@ranks(3)
def test_sums_send_nothing_until_their_value_is_needed(world):
    x = shard(world.randn(7, 4), world.mesh, dim=0).requires_grad_()
    with count_communication() as counted:
        results = [x.sum(), x.sum(0), x.mean(0, keepdim=True), x.mean(1), x.sum() / 2, x.sum(0).sum()]
        assert counted.calls == 0
        results[1].full_tensor()
        assert [(r.collective, r.calls) for r in counted.records] == [("all_reduce", 1)]
    assert [r.placements for r in results[:4]] == [(Partial(),)] * 3 + [(Shard(0),)]


@ranks(3)
def test_statistics_send_small_all_reduces_only(world):
    x = shard(world.randn(300, 4), world.mesh, dim=0)
    size = 2 * 2 * 4 * 8 // 3  # an all-reduce of one row over three ranks
    for reduce, calls in [(lambda: x.var(0), 2), (lambda: x.std(0), 2), (lambda: x.amax(0), 1), (lambda: x.max(0), 2),
                          (lambda: x.argmin(0), 2), (lambda: x.logsumexp(0), 2), (lambda: x.softmax(0), 2), (lambda: x.norm(dim=0), 1),
                          (lambda: x.prod(0), 1)]:  # fmt: skip
        with count_communication() as counted, fallback("error"):
            reduce()
        assert counted.calls == calls
        assert counted.bytes == calls * size
    for local in (lambda: x.var(1), lambda: x.max(1), lambda: x.softmax(1), lambda: x.any(1)):
        with count_communication() as counted, fallback("error"):
            local()
        assert counted.calls == 0


@ranks(3)
def test_gradients_of_chosen_values_are_not_gathered(world):
    x = shard(world.randn(9, 4), world.mesh, dim=0).requires_grad_()
    values = x.max(0).values + x.min(0).values
    with count_communication() as counted, fallback("error"):
        values.backward(torch.ones_like(values))
    assert counted.calls == 0
    assert x.grad.placements == (Shard(0),)


@ranks(3)
def test_double_backward(world):
    x = shard(world.randn(5, 4), world.mesh, dim=0, sizes=(3, 0, 2))

    def second_order(function):
        def run(x):
            (first,) = torch.autograd.grad(function(x), x, create_graph=True)
            return (first**2).sum()

        return run

    for function in (
        lambda x: (x**3).mean(),
        lambda x: (x**2).max(0).values.sum(),
        lambda x: x.prod(0).sum(),
        lambda x: x.var(0).prod(),
        lambda x: (x.softmax(0) ** 2).sum(),
        lambda x: x.logsumexp(0).sum() ** 2,
        lambda x: x.norm() ** 3,
    ):
        leaf = ShardTensor(x.to_local().clone(), x._spec).requires_grad_()
        assert_same_as_unsharded(second_order(function), leaf)


@ranks(4)
def test_half_types_are_accumulated_in_float32(world):
    whole = world.same(lambda: torch.randn(4096, dtype=torch.float32) + 300).to(torch.bfloat16)
    x = shard(whole, world.mesh, dim=0)
    exact = whole.double()
    step = 2.0**-8
    assert x.sum().dtype is x.mean().dtype is x.var().dtype is torch.bfloat16
    assert x.sum().item() == pytest.approx(exact.sum().item(), rel=step)
    assert x.mean().item() == pytest.approx(exact.mean().item(), rel=step)
    assert x.var().item() == pytest.approx(exact.var().item(), rel=step)
    assert x.norm().item() == pytest.approx(exact.norm().item(), rel=step)
    large = shard(torch.full((4000,), 60.0, dtype=torch.float16), world.mesh, dim=0)
    assert large.mean().item() == 60.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks(4)
def test_gradients_of_sums_and_means_are_laid_out_like_the_input(world, dtype):
    x = shard(torch.ones(8, 6, dtype=dtype), world.mesh, dim=0).requires_grad_()
    for reduce in (lambda x: x.mean(), lambda x: x.sum(0).sum(), lambda x: x.mean((0, 1), keepdim=True).sum(), torch.mean):
        seen = []
        y = x * 1
        y.register_hook(seen.append)
        reduce(y).backward()
        assert seen[0].placements == (Shard(0),)
        assert seen[0].to_local().shape == (2, 6)


@ranks(4)
def test_variance_keeps_its_digits_under_a_large_offset(world):
    whole = world.same(lambda: torch.randn(1000, 3, dtype=torch.float32)) + 1000
    x = shard(whole, world.mesh, dim=0, sizes=(1, 500, 0, 499))
    torch.testing.assert_close(x.var(0).full_tensor().double(), whole.double().var(0), rtol=1e-4, atol=0)


@ranks(2)
def test_a_pending_sum_stays_pending_through_sums_and_is_completed_for_the_rest(world):
    whole = world.randn(3, 4)
    x = shard(whole, world.mesh, placements=(Partial(),))
    with count_communication() as counted:
        total = x.sum(0)
        mean = x.mean()
        assert counted.calls == 0
    assert total.placements == mean.placements == (Partial(),)
    torch.testing.assert_close(total.full_tensor(), whole.sum(0))
    torch.testing.assert_close(x.amax(1).full_tensor(), whole.amax(1))
    assert x.amax(1).placements == (Replicate(),)


@ranks(3)
def test_all_ranks_refuse_alike(world):
    x = shard(torch.arange(4), world.mesh, dim=0, sizes=(2, 2, 0))
    for call, error in [
        (lambda: x.mean(), "floating point or complex"),
        (lambda: x.sum(3), "Dimension out of range"),
        (lambda: x.logical_not().argmax(0), "bool"),
        (lambda: x.view(4, 1).sum((0, 0)), "twice"),
    ]:
        with pytest.raises((RuntimeError, IndexError), match=error):
            call()
    nothing = shard(torch.zeros(0, 2), world.mesh, dim=0)
    with pytest.raises((RuntimeError, IndexError)):
        nothing.amax(0)
    assert nothing.mean(0).isnan().all()

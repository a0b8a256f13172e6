"""Collectives against dense arithmetic in one process: values, gradients and gradients of gradients, uneven and empty shards."""

import math

import pytest
import torch
import torch.distributed as dist

from shardwise.collectives.counter import count_communication
from shardwise.collectives.functional import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
    ring_shift,
    start_all_reduce,
    start_reduce_scatter,
    sum_forward,
    sum_gradient,
)
from shardwise.mesh.groups import axis_group
from shardwise.spec.spans import spans_of
from shardwise.testing import ranks

SIZES = {
    2: [(3, 3), (1, 4), (0, 5), (0, 0)],
    3: [(2, 2, 2), (3, 0, 2), (0, 0, 4), (1, 5, 2)],
    4: [(1, 1, 1, 1), (3, 3, 3, 1), (3, 3, 3, 0), (0, 1, 0, 2)],
}


def shape(dim, size):
    return [size if d == dim else length for d, length in enumerate((2, 3, 4))]


def rows(x, dim, span):
    return x.narrow(dim, span[0], span[1] - span[0])


def check(world, inputs, run, dense):
    """`run(x)` on this rank against `dense(xs)[rank]` for all ranks in one process, up to second derivatives of a nonlinear loss.

    The loss of the dense run is the sum over ranks of what every rank makes of its output.
    """
    me = world.rank

    def derivatives(leaves, outputs, at):
        loss = sum((y**3 * w[: y.numel()].view(y.shape)).sum() for y, w in zip(outputs, weights))
        if not loss.requires_grad:
            return [torch.zeros_like(x) for x in leaves], [torch.zeros_like(x) for x in leaves]
        first = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(sum((g.sin() * directions[r]).sum() for r, g in zip(at, first)), leaves, materialize_grads=True)
        return first, second

    weights = [world.randn(1000) for _ in range(world.size)]
    directions = [world.randn(*x.shape) for x in inputs]
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = dense(leaves)
    expected_first, expected_second = derivatives(leaves, expected, range(world.size))

    mine = inputs[me].clone().requires_grad_()
    result = run(mine)
    weights = [weights[me]]
    first, second = derivatives([mine], [result], [me])
    torch.testing.assert_close(result, expected[me], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(first[0], expected_first[me], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(second[0], expected_second[me], rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        assert torch.equal(run(mine), result)


def gather_and_scatter(world, dim):
    group = axis_group(world.mesh)
    for sizes in SIZES[world.size]:
        spans = spans_of(sizes)
        shards = [world.randn(*shape(dim, size)) for size in sizes]
        check(world, shards, lambda x, s=sizes: all_gather(x, dim, s, group), lambda xs: [torch.cat(xs, dim)] * world.size)
        wholes = [world.randn(*shape(dim, sum(sizes))) for _ in sizes]
        check(
            world,
            wholes,
            lambda x, s=sizes: reduce_scatter(x, dim, s, group),
            lambda xs, spans=spans: [rows(sum(xs), dim, span) for span in spans],
        )


@pytest.mark.parametrize("dim", [0, 1, -1])
@ranks(2)
def test_gather_and_scatter_on_2(world, dim):
    gather_and_scatter(world, dim % 3)


@pytest.mark.parametrize("dim", [0, 1, -1])
@ranks(3)
def test_gather_and_scatter_on_3(world, dim):
    gather_and_scatter(world, dim % 3)


@pytest.mark.parametrize("dim", [0, 1, -1])
@ranks(4)
def test_gather_and_scatter_on_4(world, dim):
    gather_and_scatter(world, dim % 3)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@ranks(3)
def test_all_reduce(world, op):
    dense = {
        "sum": lambda xs: torch.stack(xs).sum(0),
        "avg": lambda xs: torch.stack(xs).mean(0),
        "max": lambda xs: torch.stack(xs).amax(0),
        "min": lambda xs: torch.stack(xs).amin(0),
    }[op]
    group = axis_group(world.mesh)
    inputs = [world.randn(3, 4) for _ in range(world.size)]
    inputs[1][0], inputs[2][1] = inputs[0][0], inputs[0][1]  # ties
    check(world, inputs, lambda x: all_reduce(x, group, op), lambda xs: [dense(xs)] * world.size)
    check(world, [x[:0] for x in inputs], lambda x: all_reduce(x, group, op), lambda xs: [dense(xs)] * world.size)


@ranks(3)
def test_maximum_keeps_nan_like_torch(world):
    xs = torch.tensor([[1.0, math.nan, -math.inf, 2.0], [3.0, 0.0, -math.inf, math.inf], [math.nan, 5.0, -math.inf, -1.0]])
    group = axis_group(world.mesh)
    for op, dense in (("max", torch.amax), ("min", torch.amin)):
        assert torch.equal(all_reduce(xs[world.rank], group, op).nan_to_num(7e7), dense(xs, 0).nan_to_num(7e7))


@ranks(2)
def test_product_has_a_value_and_no_gradient(world):
    group = axis_group(world.mesh)
    x = torch.tensor([2.0, 3.0]) + world.rank
    assert all_reduce(x, group, "product").tolist() == [6.0, 12.0]
    with pytest.raises(NotImplementedError, match="no gradient"):
        all_reduce(x.requires_grad_(), group, "product")


@ranks(4)
def test_sum_pair_keeps_replicated_values_and_gradients_right(world):
    """A replicated x, used by every rank for a part of the work, whose parts are summed: the loss counts once."""
    group = axis_group(world.mesh)
    x = world.randn(3).requires_grad_()
    parts = world.randn(4, 3)

    def split(x):
        return sum_forward((sum_gradient(x, group) ** 3 * parts[world.rank]).sum(), group)

    def derivatives(loss):
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad((first.sin() * parts[0]).sum(), x)
        return loss.detach(), first.detach(), second

    torch.testing.assert_close(derivatives(split(x)), derivatives((x**3 * parts.sum(0)).sum()), rtol=1e-12, atol=1e-12)


def all_to_all_case(world, dim, recv_dim):
    group = axis_group(world.mesh)
    table = [[(3 * a + b) % 3 for b in range(world.size)] for a in range(world.size)]  # rows that a sends b, some of them 0
    if recv_dim is None:
        inputs = [world.randn(*shape(dim, sum(row))) for row in table]

        def dense(xs):
            return [torch.cat([x.split(row, dim)[me] for x, row in zip(xs, table)], dim) for me in range(world.size)]

        check(world, inputs, lambda x: all_to_all(x, table[world.rank], [row[world.rank] for row in table], dim, group), dense)
        return
    for sizes in SIZES[world.size]:
        other = SIZES[world.size][1]
        whole = world.randn(*shape(recv_dim, sum(other)))
        lengths = list(whole.shape)
        lengths[dim] = sum(sizes)
        whole = world.randn(*lengths)
        check(
            world,
            list(whole.split(other, recv_dim)),
            lambda x, s=sizes, o=other: all_to_all(x, s, o, dim, group, recv_dim),
            lambda xs, s=sizes: list(torch.cat(xs, recv_dim).split(s, dim)),
        )


@pytest.mark.parametrize(("dim", "recv_dim"), [(0, None), (1, None), (0, 2), (2, 0), (1, 0)])
@ranks(3)
def test_all_to_all_on_3(world, dim, recv_dim):
    all_to_all_case(world, dim, recv_dim)


@pytest.mark.parametrize(("dim", "recv_dim"), [(0, None), (1, 2)])
@ranks(2)
def test_all_to_all_on_2(world, dim, recv_dim):
    all_to_all_case(world, dim, recv_dim)


@pytest.mark.parametrize("step", [1, -1, 2, 3, 5])
@ranks(3)
def test_ring_shift_on_3(world, step):
    ring(world, step)


@pytest.mark.parametrize("step", [1, -1, 2])
@ranks(2)
def test_ring_shift_on_a_ring_of_2(world, step):
    ring(world, step)


def ring(world, step):
    group = axis_group(world.mesh)
    inputs = [world.randn(size, 2) for size in (3, 0, 4)[: world.size]]
    before = (world.rank - step) % world.size
    check(
        world,
        inputs,
        lambda x: ring_shift(x, inputs[before].shape, step, group),
        lambda xs: [xs[(r - step) % world.size] * 1 for r in range(world.size)],
    )


@pytest.mark.parametrize("src", [0, 2])
@ranks(3)
def test_broadcast(world, src):
    group = axis_group(world.mesh)
    inputs = [world.randn(2, 3) for _ in range(3)]
    check(world, inputs, lambda x: broadcast(x, src, group), lambda xs: [xs[src]] * 3)


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def every_dtype(world, dtype):
    group = axis_group(world.mesh)
    n, me = world.size, world.rank
    numbers = [(torch.arange(6).view(2, 3) + r) % 4 for r in range(n)]
    xs = [x.to(dtype) * (1 + 1j) if dtype.is_complex else x.to(dtype) for x in numbers]
    x = xs[me]
    cut = (1, 2) + (0,) * (n - 2)
    assert torch.equal(all_gather(x, 0, (2,) * n, group), torch.cat(xs))
    assert torch.equal(all_gather(x, 1, (3,) * n, group), torch.cat(xs, 1))
    assert torch.equal(
        all_gather(x[: me + 1], 0, [min(r + 1, 2) for r in range(n)], group), torch.cat([x[: r + 1] for r, x in enumerate(xs)])
    )
    assert torch.equal(all_to_all(x, cut, (cut[me],) * n, 1, group), torch.cat([x.split(cut, 1)[me] for x in xs], 1))
    assert torch.equal(ring_shift(x, x.shape, 1, group), xs[me - 1])
    assert torch.equal(broadcast(x, 1, group), xs[1])
    if dtype == torch.bool:
        assert torch.equal(all_reduce(x, group, "max"), torch.stack(xs).any(0))
        assert torch.equal(all_reduce(x, group, "min"), torch.stack(xs).all(0))
        for refused in (lambda: all_reduce(x, group), lambda: reduce_scatter(x, 1, (3,), group), lambda: start_all_reduce(x, group)):
            with pytest.raises(TypeError, match="sum of bool"):
                refused()
    else:
        total = torch.stack(xs).sum(0, dtype=dtype)
        assert torch.equal(all_reduce(x, group), total)
        assert torch.equal(reduce_scatter(x, 1, cut, group), total.split(cut, 1)[me])
        wide = torch.cat((x,) * n, 1)
        assert torch.equal(reduce_scatter(wide, 1, (3,) * n, group), total)
        pending = start_all_reduce(x.clone(), group)
        assert torch.equal(pending.wait(), total)
        assert torch.equal(pending.wait(), total)
    if dtype.is_complex:
        with pytest.raises(TypeError, match="complex"):
            all_reduce(x, group, "max")
        assert torch.equal(all_gather(x.conj(), 0, (2,) * n, group), torch.cat(xs).conj().resolve_conj())
    elif dtype != torch.bool:
        assert torch.equal(all_reduce(x, group, "max"), torch.stack(xs).amax(0))
        assert torch.equal(all_reduce(x, group, "min"), torch.stack(xs).amin(0))
    if dtype.is_floating_point or dtype.is_complex:
        assert torch.allclose(all_reduce(x, group, "avg"), torch.stack(xs).mean(0), rtol=1e-2)
    else:
        with pytest.raises(TypeError, match="average"):
            all_reduce(x, group, "avg")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(2)
def test_every_dtype_in_threads(world, dtype):
    every_dtype(world, dtype)


@ranks(3, processes=True)
def test_every_dtype_over_gloo(world):
    for dtype in DTYPES:
        every_dtype(world, dtype)


@ranks(2, processes=True)
def test_float8_moves(world):
    x = torch.tensor([1.0, 2.0, -3.0]).to(torch.float8_e4m3fn)
    assert torch.equal(all_gather(x, 0, (3, 3), axis_group(world.mesh)).float(), torch.tensor([1.0, 2, -3, 1, 2, -3]))


@ranks(3, processes=True)
def test_gradients_over_gloo(world):
    gather_and_scatter(world, 1)
    all_to_all_case(world, 0, 2)
    ring(world, 1)


@ranks(2)
def test_what_comes_from_other_layouts_is_contiguous_and_right(world):
    x = world.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)[:, :, ::2]
    group = axis_group(world.mesh)
    for dim in range(4):
        size = x.shape[dim]
        assert torch.equal(all_gather(x, dim, (size, size), group), torch.cat((x, x), dim))
        assert torch.equal(reduce_scatter(x, dim, (0, size), group), 2 * rows(x, dim, (0, size) if world.rank else (0, 0)))


@ranks(2)
def test_wrong_local_size_is_refused_with_numbers(world):
    with pytest.raises(ValueError, match=r"5 rows on dim 0 .* \(4, 2\)"):
        all_gather(torch.zeros(4, 2), 0, (5, 5), axis_group(world.mesh))


@ranks(3, processes=True)
def test_started_sums_keep_each_ranks_elements(world):
    group = axis_group(world.mesh)
    for sizes in SIZES[3]:
        xs = [torch.arange(float(sum(sizes))) * (r + 1) for r in range(3)]
        with count_communication() as counted:
            pending = start_reduce_scatter(xs[world.rank], sizes, group)
        expected = sum(xs).split(sizes)[world.rank]
        assert torch.equal(pending.wait(), expected) and torch.equal(pending.wait(), expected)
        assert counted.bytes == 4 * (sum(sizes) - sizes[world.rank])
    with pytest.raises(ValueError, match="the sizes say 5 rows"):
        start_reduce_scatter(torch.zeros(4), (5, 0, 0), group)


@ranks(2)
def test_start_all_reduce_refuses_strided_tensors(world):
    with pytest.raises(ValueError, match="contiguous"):
        start_all_reduce(torch.zeros(4, 4)[:, ::2], axis_group(world.mesh))


@ranks(1)
def test_one_rank_communicates_nothing(world):
    group = dist.group.WORLD
    x = torch.arange(3.0)
    results = (
        all_gather(x, 0, (3,), group),
        reduce_scatter(x, 0, (3,), group),
        all_reduce(x, group),
        sum_forward(x, group),
        sum_gradient(x, group),
        all_to_all(x, (3,), (3,), 0, group),
        ring_shift(x, (3,), 1, group),
        broadcast(x, 0, group),
        start_all_reduce(x, group).wait(),
    )
    assert all(torch.equal(result, x) for result in results)

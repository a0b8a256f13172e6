"""Exchange against slicing of the whole tensor in one process: values, gradients, gradients of gradients, and exact bytes."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.collectives.counter import count_communication
from shardwise.collectives.exchange import exchange
from shardwise.mesh.groups import axis_group, flat_group
from shardwise.spec.spans import Window, as_spans, spans_of
from shardwise.testing import ranks


def take(whole, wanted, dim, fill, offset=0):
    """The wanted rows of a whole tensor whose first row is row `offset`; rows outside are `fill`."""
    parts = []
    for start, stop in as_spans(wanted):
        for row in range(start, stop):
            if 0 <= row - offset < whole.shape[dim]:
                parts.append(whole.narrow(dim, row - offset, 1))
            else:
                parts.append(torch.full_like(whole.narrow(dim, 0, 1) if whole.shape[dim] else whole.sum(dim, keepdim=True), fill))
    return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)


def derivatives(losses, leaves, directions):
    loss = sum(losses) + sum(0 * (x**3).sum() for x in leaves)  # so that a tensor that nobody reads has a gradient too
    first = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(sum((g.sin() * d).sum() for g, d in zip(first, directions)), leaves, materialize_grads=True)
    return first, second


def check(world, owned, wanted, dim=0, fill=0, group=None):
    group = group or axis_group(world.mesh)
    me = group.rank()
    total = max(stop for _, stop in owned)
    lengths = [3, 2, 4]
    lengths[dim] = total
    whole = world.randn(*lengths, seed=1)
    direction = world.randn(*lengths, seed=2)
    shards = [whole.narrow(dim, start, stop - start).clone().requires_grad_() for start, stop in owned]
    directions = [direction.narrow(dim, start, stop - start) for start, stop in owned]
    weights = []
    for number, pieces in enumerate(wanted):
        lengths[dim] = sum(stop - start for start, stop in as_spans(pieces))
        weights.append(world.randn(*lengths, seed=10 + number))

    order = sorted(range(len(owned)), key=lambda rank: owned[rank])
    joined = torch.cat([shards[rank] for rank in order], dim)
    expected = [take(joined, pieces, dim, fill) for pieces in wanted]
    first, second = derivatives(
        [((y.exp() if math.isinf(fill) else y**3) * w).sum() for y, w in zip(expected, weights)], shards, directions
    )

    mine = shards[me].detach().clone().requires_grad_()
    with count_communication() as count:
        result = exchange(mine, owned=owned, wanted=wanted, dim=dim, group=group, fill=fill)
        loss = ((result.exp() if math.isinf(fill) else result**3) * weights[me]).sum()
        my_first, my_second = derivatives([loss], [mine], [directions[me]])
    torch.testing.assert_close(result, expected[me], rtol=0, atol=0)
    torch.testing.assert_close(my_first[0], first[me], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(my_second[0], second[me], rtol=1e-12, atol=1e-12)
    check_bytes(count, owned, wanted, me, whole.numel() // total * whole.element_size())


def check_bytes(count, owned, wanted, me, row_bytes):
    def rows(source, destination):
        start, stop = owned[source]
        return sum(max(0, min(b, stop) - max(a, start)) for a, b in as_spans(wanted[destination])) if source != destination else 0

    everyone = range(len(owned))
    sent, received = sum(rows(me, other) for other in everyone), sum(rows(other, me) for other in everyone)
    active = any(rows(source, destination) for source in everyone for destination in everyone)
    forward, backward = count.only(direction="forward"), count.only(direction="backward")
    assert (forward.calls, forward.bytes) == (int(active), sent * row_bytes)
    # rows go back for the gradient; for its derivative they come again and go back again
    assert (backward.calls, backward.bytes) == (3 * active, (received + sent + received) * row_bytes)


SPAN = st.tuples(st.integers(-3, 12), st.integers(0, 9)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@st.composite
def cases(draw, size):
    sizes = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size).filter(lambda sizes: sum(sizes) > 0))
    spans = spans_of(sizes)
    owned = tuple(spans[place] for place in draw(st.permutations(range(size))))
    wanted = tuple(draw(st.one_of(SPAN, st.lists(SPAN, max_size=3).map(tuple))) for _ in owned)
    return owned, wanted, draw(st.integers(0, 2)), draw(st.sampled_from([0, 1.5, -math.inf]))


@settings(max_examples=60)
@given(case=cases(2))
@ranks(2)
def test_any_rows_on_2(world, case):
    check(world, *case)


@settings(max_examples=60)
@given(case=cases(3))
@ranks(3)
def test_any_rows_on_3(world, case):
    check(world, *case)


@settings(max_examples=60)
@given(case=cases(4))
@ranks(4)
def test_any_rows_on_4(world, case):
    check(world, *case)


@ranks(4, processes=True)
def test_rows_over_gloo(world):
    owned = spans_of((3, 0, 2, 4))
    check(world, owned, ((-1, 4), (2, 7), ((0, 2), (8, 9), (0, 9)), (5, 11)), dim=1)
    check(world, owned, ((0, 0), (0, 9), (3, 3), (3, 3)), dim=0, fill=-math.inf)
    check(world, owned, owned)


@ranks(2)
def test_periodic_ring_of_two(world):
    """Both neighbours of a rank are the same rank; its two halos must not be mixed up."""
    owned = spans_of((3, 4))
    wanted = (((6, 7), (0, 3), (3, 4)), ((2, 3), (3, 7), (0, 1)))
    check(world, owned, wanted)
    whole = torch.arange(7.0)
    start, stop = owned[world.rank]
    got = exchange(whole[start:stop], owned=owned, wanted=wanted, dim=0, group=axis_group(world.mesh))
    assert got.tolist() == [[6, 0, 1, 2, 3], [2, 3, 4, 5, 6, 0]][world.rank]


@ranks(4)
def test_halo_wider_than_a_neighbour(world):
    owned = spans_of((4, 1, 0, 3))
    wanted = tuple((start - 3, stop + 3) for start, stop in owned)
    check(world, owned, wanted)


@ranks(3)
def test_rebalance_and_gather(world):
    check(world, spans_of((7, 0, 2)), spans_of((3, 3, 3)))
    check(world, spans_of((3, 3, 3)), ((0, 9),) * 3)


@ranks(2)
def test_gradient_by_the_incoming_gradient_ignores_fill(world):
    """The gradient is linear in what comes in: its own derivative fetches rows with fill 0, whatever the fill of the value."""
    owned, wanted = ((0, 2), (2, 5)), ((-1, 3), (1, 6))
    whole = world.randn(5, 2)
    start, stop = owned[world.rank]
    x = whole[start:stop].clone().requires_grad_()
    y = exchange(x, owned=owned, wanted=wanted, dim=0, group=axis_group(world.mesh), fill=9.0)
    incoming = torch.ones_like(y, requires_grad=True)
    (gradient,) = torch.autograd.grad(y, x, incoming, create_graph=True)
    (second,) = torch.autograd.grad((gradient * x.detach()).sum(), incoming)
    assert torch.equal(second, take(whole, wanted[world.rank], 0, 0))


@ranks(3)
def test_nothing_is_sent_when_nobody_needs_anything(world):
    owned = spans_of((3, 0, 2))
    group = axis_group(world.mesh)
    start, stop = owned[world.rank]
    x = world.randn(stop - start, 2).requires_grad_()
    with count_communication() as count:
        assert exchange(x, owned=owned, wanted=owned, dim=0, group=group) is x
        wanted = ((-2, 2), (3, 3), (4, 9))
        y = exchange(x, owned=owned, wanted=wanted, dim=0, group=group)
        y.sum().backward()
    assert count.calls == 0
    assert y.shape[0] == [4, 0, 5][world.rank]
    assert x.grad.sum(1).tolist() == [[2, 2, 0], [], [0, 2]][world.rank]


@ranks(3)
def test_bytes_are_the_rows_read_and_not_owned(world):
    window = Window(size=5, stride=2, pad_before=2, pad_after=2)
    sizes = (5, 3, 6)
    owned = spans_of(sizes)
    wanted = tuple(window.input_span(outputs) for outputs in window.output_spans(sizes))
    x = world.randn(2, sizes[world.rank], 3, dtype=torch.float32).requires_grad_()
    with count_communication() as count:
        exchange(x, owned=owned, wanted=wanted, dim=1, group=axis_group(world.mesh)).sum().backward()
    # outputs 0:3, 3:4, 4:7 read rows -2:7, 4:9, 6:15
    assert wanted == ((-2, 7), (4, 9), (6, 15))
    row = 2 * 3 * 4
    sent = [1, 2 + 2, 1][world.rank]
    returned = [2, 2, 2][world.rank]
    assert [(r.direction, r.calls, r.bytes) for r in count.records] == [("forward", 1, sent * row), ("backward", 1, returned * row)]
    assert count.by_axis == {"domain": (sent + returned) * row}


def two_lines(world, transposed):
    """Two domain groups with a signal each: a width-3 sum with zero borders must not mix them."""
    mesh = world.mesh
    axis = 0 if transposed else 1
    group = axis_group(mesh, axis)
    line = mesh.get_coordinate()[1 - axis]
    assert group.rank() == mesh.get_coordinate()[axis]
    owned = spans_of((4, 4))
    signal = torch.arange(8.0, dtype=torch.float64) + 100 * line
    start, stop = owned[group.rank()]
    local = exchange(signal[start:stop], owned=owned, wanted=((-1, 5), (3, 9)), dim=0, group=group)
    result = F.conv1d(local.view(1, 1, -1), torch.ones(1, 1, 3, dtype=torch.float64)).view(-1)
    expected = [[1, 3, 6, 9, 12, 15, 18, 13], [201, 303, 306, 309, 312, 315, 318, 213]][line]
    assert result.tolist() == expected[start:stop]
    check(world, spans_of((3, 2)), ((-1, 4), (1, 6)), group=group)


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_offset_groups_do_not_mix(world):
    two_lines(world, transposed=False)


@ranks(4, mesh={"domain": 2, "ddp": 2})
def test_transposed_groups_do_not_mix(world):
    two_lines(world, transposed=True)


@ranks(4, mesh={"ddp": 2, "domain": 2}, processes=True)
def test_groups_do_not_mix_over_gloo(world):
    two_lines(world, transposed=False)
    two_lines(world, transposed=True)


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_over_two_mesh_dims(world):
    owned = spans_of((3, 0, 2, 2))
    check(world, owned, ((-1, 4), (2, 6), (2, 6), (4, 8)), group=flat_group(world.mesh, (0, 1)))


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        (torch.bool, True),
        (torch.int64, 7),
        (torch.complex64, 1 + 2j),
        (torch.bfloat16, -math.inf),
        (torch.float16, 0.5),
        (torch.uint8, 255),
    ],
    ids=str,
)
@ranks(2)
def test_dtypes_and_fill(world, dtype, fill):
    whole = (torch.arange(10).view(5, 2) % 3).to(dtype)
    owned = spans_of((2, 3))
    wanted = ((-1, 4), ((1, 3), (4, 6)))
    start, stop = owned[world.rank]
    got = exchange(whole[start:stop], owned=owned, wanted=wanted, dim=0, group=axis_group(world.mesh), fill=fill)
    assert got.dtype == dtype
    assert torch.equal(got, take(whole, wanted[world.rank], 0, fill))


@ranks(2)
def test_other_layouts(world):
    whole = world.randn(2, 3, 8, 4).to(memory_format=torch.channels_last)[..., ::2]
    owned = spans_of((3, 5))
    wanted = ((0, 6), (1, 8))
    start, stop = owned[world.rank]
    got = exchange(whole.narrow(2, start, stop - start), owned=owned, wanted=wanted, dim=-2, group=axis_group(world.mesh))
    assert torch.equal(got, take(whole, wanted[world.rank], 2, 0))


@ranks(2)
def test_wrong_metadata_is_refused(world):
    group = axis_group(world.mesh)
    with pytest.raises(ValueError, match=r"owns 3 rows of dim 0.* \(2, 2\)"):
        exchange(torch.zeros(2, 2), owned=((0, 3), (3, 6)), wanted=((0, 3), (3, 6)), dim=0, group=group)
    with pytest.raises(ValueError, match="1 ranks own rows and 2 want"):
        exchange(torch.zeros(2, 2), owned=((0, 2),), wanted=((0, 3), (3, 6)), dim=0, group=group)
    with pytest.raises(ValueError, match="two owners"):
        exchange(torch.zeros(2, 2), owned=((0, 2), (1, 3)), wanted=((0, 3), (1, 3)), dim=0, group=group)

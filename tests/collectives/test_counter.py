"""The counter: calls and bytes per collective, axis and direction, each rank its own."""

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from shardwise.collectives.counter import Record, count_communication
from shardwise.collectives.functional import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, ring_shift, start_all_reduce
from shardwise.mesh.groups import axis_group, flat_group
from shardwise.testing import ranks


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_bytes_of_every_collective(world):
    me, group = world.rank, flat_group(world.mesh, (0, 1))
    x = torch.zeros(4, 3)  # 48 bytes, 12 a row
    sizes = (1, 0, 2, 1)
    expected = {
        "all_gather": 3 * 48 + 3 * 12 * sizes[me],
        "reduce_scatter": 48 - 12 + 12 * (4 - sizes[me]),
        "all_reduce": 2 * 48 * 3 // 4 + 2 * 48 * 3 // 4 * 2,
        "all_to_all": 12 * (4 - sizes[me]),
        "ring_shift": 48,
        "broadcast": 3 * 48 if me == 2 else 0,
    }
    with count_communication() as count:
        all_gather(x, 0, (4,) * 4, group)
        all_gather(x[: sizes[me]], 0, sizes, group)
        reduce_scatter(x, 0, (1,) * 4, group)
        reduce_scatter(x, 0, sizes, group)
        start_all_reduce(x.clone(), group).wait()
        all_reduce(x, group, "max")
        all_to_all(x, sizes, (sizes[me],) * 4, 0, group)
        ring_shift(x, x.shape, 1, group)
        broadcast(x, 2, group)
    assert {r.collective: r.bytes for r in count.records} == expected
    assert count.calls == 9
    assert count.bytes == sum(expected.values())
    assert count.by_axis == {"ddp+domain": count.bytes}
    assert count.only(direction="backward").calls == 0


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_axes_and_directions(world):
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    with count_communication() as outer:
        y = all_gather(x, 0, (2, 2), axis_group(world.mesh, 1))
        with count_communication() as inner:
            y.sum().backward()
        dist.all_reduce(x.grad)  # not ours, not counted
        all_reduce(x.grad, axis_group(world.mesh, 0))
        all_reduce(x.grad, axis_group(world.mesh["domain"]))
    assert inner.records == (Record(collective="reduce_scatter", axis="domain", direction="backward", calls=1, bytes=16),)
    assert [(r.collective, r.axis, r.direction, r.bytes) for r in outer.records] == [
        ("all_gather", "domain", "forward", 16),
        ("reduce_scatter", "domain", "backward", 16),
        ("all_reduce", "ddp", "forward", 16),
        ("all_reduce", "domain", "forward", 16),
    ]
    assert outer.by_axis == {"domain": 48, "ddp": 16}
    assert outer.only(collective="all_reduce", axis="ddp").calls == 1
    assert "forward all_gather over domain: 1 calls, 16 bytes" in repr(outer)
    before = outer.calls
    all_reduce(x.detach(), axis_group(world.mesh, 0))
    assert outer.calls == before


@ranks(2)
def test_recomputation_counts_as_backward(world):
    group = axis_group(world.mesh)
    x = torch.ones(2, requires_grad=True)
    with count_communication() as count:
        y = checkpoint(lambda x: all_reduce(x, group).exp(), x, use_reentrant=False)
        y.sum().backward()
    assert [(r.direction, r.calls) for r in count.records] == [("forward", 1), ("backward", 2)]


@ranks(3)
def test_each_rank_counts_its_own(world):
    group = axis_group(world.mesh)
    if world.rank == 1:
        with count_communication() as count:
            all_reduce(torch.zeros(3), group)
        assert count.calls == 1
    else:
        all_reduce(torch.zeros(3), group)
    with count_communication() as count:
        broadcast(torch.zeros(3), 1, group)
    assert count.bytes == (24 if world.rank == 1 else 0)


@ranks(2, processes=True)
def test_backward_over_gloo_is_counted(world):
    group = axis_group(world.mesh)
    x = torch.ones(2, requires_grad=True)
    with count_communication() as count:
        all_reduce(x, group).sum().backward()
    assert [(r.direction, r.calls, r.bytes) for r in count.records] == [("forward", 1, 8), ("backward", 1, 8)]

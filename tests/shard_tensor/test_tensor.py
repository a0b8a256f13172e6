"""The tensor object: how it is made, moved, refused, and what acts on it by identity."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardwise import ShardTensor, ShardTensorSpec, TensorPromotionMode, scatter_tensor, sync_module_over_mesh
from shardwise.testing import count_communication, ranks, shard

SPLITS = [(2, 3, 5), (10, 0, 0), (0, 1, 9), (4, 3, 3)]


def check(tensor, full):
    torch.testing.assert_close(tensor.full_tensor(), full, rtol=0, atol=0)
    assert tuple(tensor._local_tensor.shape) == tensor._spec.local_shape


@pytest.mark.parametrize(("before", "after"), itertools.product(SPLITS, repeat=2))
@ranks(3)
def test_every_transition_between_uneven_splits(world, before, after):
    full = world.randn(10, 7)
    x = shard(full, world.mesh, dim=0, sizes=before).requires_grad_()
    other = shard(full, world.mesh, dim=0, sizes=after)
    gradient = world.randn(10, 7)
    for y in (x.redistribute(placements=(Replicate(),)), x.redistribute(placements=(Shard(1),)), x + other - other):
        torch.testing.assert_close(y.detach().full_tensor(), full)
        (g,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
        assert g._spec.sizes == x._spec.sizes
        torch.testing.assert_close(g.full_tensor(), gradient)


PLACEMENTS = (Shard(0), Shard(1), Shard(2), Replicate())


@ranks(6, mesh={"a": 2, "b": 3})
def test_every_transition_on_two_axes(world):
    full = world.randn(7, 5, 4)
    for source in itertools.product((*PLACEMENTS, Partial()), repeat=2):
        x = shard(full, world.mesh, placements=source)
        for target in itertools.product(PLACEMENTS, repeat=2):
            y = x.redistribute(placements=target)
            assert y.placements == target
            torch.testing.assert_close(y.full_tensor(), full)
            assert tuple(y._local_tensor.shape) == y._spec.local_shape


@ranks(3)
def test_scatter_sends_shards_only(world):
    full = world.randn(9, 4)
    x = scatter_tensor(full if world.rank == 1 else None, 1, world.mesh, (Shard(0),), requires_grad=True)
    check(x, full)
    assert x.is_leaf and x.requires_grad
    with pytest.raises(ValueError, match="not one of the ranks"):
        scatter_tensor(full, 7, world.mesh, (Shard(0),))
    with pytest.raises(ValueError, match="global_shape"):
        scatter_tensor(full, 0, world.mesh, (Shard(0),), global_shape=(8, 4))
    with pytest.raises(ValueError, match="dtype"):
        scatter_tensor(full, 0, world.mesh, (Shard(0),), dtype=torch.float32)
    with pytest.raises(ValueError, match="placements"):
        scatter_tensor(full, 0, world.mesh, (Shard(0), Shard(1)))
    with pytest.raises(ValueError, match="does not fit"):
        scatter_tensor(full, 0, world.mesh, (Shard(5),))


@ranks(3)
def test_from_local_in_all_its_ways(world):
    full, sizes = world.randn(10, 4), (2, 5, 3)
    local = full.split(sizes)[world.rank].clone().requires_grad_()
    shapes = [[n, 4] for n in sizes]
    for stated in ("infer", {0: shapes}):
        x = ShardTensor.from_local(local, world.mesh, (Shard(0),), sharding_shapes=stated)
        check(x.detach(), full)
        (x * x).sum().backward()
        torch.testing.assert_close(local.grad, 2 * local.detach())
        local.grad = None
    chunk = full.chunk(3)[world.rank]
    check(ShardTensor.from_local(chunk, world.mesh, (Shard(0),), sharding_shapes="chunk", global_shape=(10, 4)), full)
    for wrong in (
        {"sharding_shapes": "chunk"},
        {"sharding_shapes": "nonsense"},
        {"sharding_shapes": {}},
        {"sharding_shapes": {0: shapes[:2]}},
        {"global_shape": (11, 4)},
    ):
        with pytest.raises(ValueError):
            ShardTensor.from_local(local, world.mesh, (Shard(0),), **wrong)


@ranks(4)
def test_from_dtensor(world):
    full = world.randn(10, 4)
    d = distribute_tensor(full, world.mesh, [Shard(0)])
    x = ShardTensor.from_dtensor(d)
    assert not isinstance(x, DTensor)
    check(x, full)
    assert ShardTensor.from_dtensor(x) is x


@ranks(3)
def test_gradients_of_leaving(world):
    full = world.randn(9, 4)
    x = shard(full, world.mesh, dim=0, sizes=(4, 0, 5)).requires_grad_()
    (x.to_local() ** 2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * full)
    x.grad = None
    (x.full_tensor() ** 2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * full)
    whole = shard(full, world.mesh, placements=(Replicate(),)).requires_grad_()
    (whole.to_local(grad_placements=[Partial()]) * (world.rank + 1)).sum().backward()
    torch.testing.assert_close(whole.grad.full_tensor(), torch.full_like(full, 6.0))


@ranks(3)
def test_refusals_of_redistribute(world):
    x = shard(world.randn(9, 4), world.mesh, dim=0)
    with pytest.raises(RuntimeError, match="needs placements"):
        x.redistribute()
    with pytest.raises(RuntimeError, match="pending sum"):
        x.redistribute(placements=(Partial(),))
    with pytest.raises(NotImplementedError, match="not the mesh"):
        x.redistribute(world.make_mesh((1, 3), ("a", "b")), (Shard(0), Shard(0)))
    assert x.redistribute(placements=(Shard(-1),)).placements == (Shard(1),)


@ranks(3)
def test_different_layouts_meet_and_the_cheaper_one_moves(world):
    big, small = world.randn(9, 6), world.randn(1, 6)
    x = shard(big, world.mesh, dim=0)
    y = shard(small, world.mesh, dim=1)
    with count_communication() as sent:
        z = x + y
    assert z.placements == (Shard(0),)
    assert sent.bytes == 2 * 2 * 8  # this rank's two columns of y, to two others
    torch.testing.assert_close(z.full_tensor(), big + small)


@ranks(3)
def test_a_plain_tensor_counts_as_replicated(world):
    x = shard(world.randn(9, 6), world.mesh, dim=0, sizes=(1, 8, 0))
    table = world.randn(9, 6).requires_grad_()
    with count_communication() as sent:
        y = x * table
    assert not sent.calls
    y.sum().backward()
    torch.testing.assert_close(table.grad, x.full_tensor())


@ranks(3)
def test_promotion_modes(world):
    x, w = shard(world.randn(9, 6), world.mesh, dim=0), world.randn(6)
    assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
    with ShardTensor.promotion_mode("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x + w
        assert world.rank or any("auto-promoting" in str(c.message) for c in caught)
    with ShardTensor.promotion_mode(TensorPromotionMode.DISABLED), pytest.raises(RuntimeError, match="plain tensor"):
        x + w
    with ShardTensor.promotion_mode("disabled"), pytest.raises(RuntimeError, match="plain tensor"):
        F.linear(x, world.randn(2, 6))
    assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
    with pytest.raises(ValueError):
        ShardTensor.set_promotion_mode("nonsense")


@ranks(3)
def test_identity(world):
    full = world.randn(9, 6)
    x = shard(full, world.mesh, dim=0, sizes=(4, 0, 5))
    alias = x
    assert x.add_(1) is x and alias is x
    check(x, full + 1)
    out = torch.empty_like(x)
    assert torch.mul(x, 2, out=out) is out
    check(out, (full + 1) * 2)
    x.data = x.data * 0
    check(x, full * 0)
    x.copy_(full)
    check(x, full)
    x.zero_()
    check(x, full * 0)
    d = x.detach()
    d.fill_(3)
    check(x, torch.full_like(full, 3))


@ranks(3)
def test_conversions(world):
    full = world.randn(9, 6)
    x = shard(full, world.mesh, dim=0, sizes=(4, 0, 5))
    for y, z in (
        (x.to(torch.float32), full.float()),
        (x.half(), full.half()),
        (x.cpu(), full),
        (x.to("cpu"), full),
        (x.type(torch.float32), full.float()),
        (x.int(), full.int()),
        (x.bool(), full.bool()),
        (x.contiguous(), full),
        (x.clone(), full),
    ):
        assert isinstance(y, ShardTensor) and y.dtype is z.dtype
        check(y, z)
    assert len(x) == 9 and x.numel() == 54 and x.element_size() == 8 and x.dim() == 2 and not x.is_cuda


@ranks(3)
def test_hooks_and_retained_gradients(world):
    x = shard(world.randn(9, 6), world.mesh, dim=0, sizes=(4, 0, 5)).requires_grad_()
    seen = []
    x.register_hook(lambda g: seen.append(type(g)))
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t is x))
    y = x.exp()
    y.retain_grad()
    handle = y.register_hook(lambda g: g * 2)
    y.sum().backward()
    handle.remove()
    assert seen == [ShardTensor, True]
    torch.testing.assert_close(y.grad.full_tensor(), torch.full((9, 6), 2.0, dtype=torch.float64))
    torch.testing.assert_close(x.grad.full_tensor(), 2 * x.detach().full_tensor().exp())
    assert y.grad_fn is not None and not y.is_leaf and x.is_leaf


@ranks(3)
def test_a_custom_autograd_function_keeps_the_graph(world):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    x = shard(world.randn(9, 6), world.mesh, dim=0, sizes=(4, 0, 5)).requires_grad_()
    Double.apply(x).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.full((9, 6), 2.0, dtype=torch.float64))


@ranks(3)
def test_a_written_row_reaches_the_tensor(world):
    full = world.randn(9, 6)
    x = shard(full.clone(), world.mesh, dim=0, sizes=(4, 0, 5))
    for t in (x, full):
        row = t[5]
        row.mul_(3)
        t[2][1] = 7
    check(x, full)


@ranks(3)
def test_specs(world):
    spec = ShardTensorSpec.chunked(world.mesh, (Shard(0),), (10, 4), torch.float32)
    same = ShardTensorSpec.chunked(world.mesh, [Shard(-2)], (10, 4), torch.float32)
    assert spec == same and hash(spec) == hash(same)
    assert spec != ShardTensorSpec.chunked(world.mesh, (Shard(1),), (10, 4), torch.float32)
    assert spec.sharding_shapes() == {0: ((4, 4), (4, 4), (2, 4))}
    assert spec.offsets(0) == 4 * world.rank and spec.offsets() == (4 * world.rank,)


@ranks(3)
def test_sync_module(world):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(world.rank)
    sync_module_over_mesh(module, world.mesh, src_mesh_rank=2, verify=True)
    assert all((p == 2).all() for p in module.parameters())
    with pytest.raises(ValueError, match="src_mesh_rank"):
        sync_module_over_mesh(module, world.mesh, src_mesh_rank=3)
    with pytest.raises(ValueError, match="1-D mesh"):
        sync_module_over_mesh(module, world.make_mesh((1, 3), ("a", "b")))
    with pytest.raises(RuntimeError, match="metadata differs"):
        sync_module_over_mesh(nn.Linear(2 + world.rank, 2), world.mesh, verify=True)
    with pytest.raises(RuntimeError, match="meta"):
        sync_module_over_mesh(nn.Linear(2, 2, device="meta"), world.mesh)
    sync_module_over_mesh(nn.Identity(), world.mesh)


@ranks(3)
def test_writing_into_a_pending_sum(world):
    """The sum is completed first; a view of it cannot be written into, which would not reach it."""
    full = world.randn(5, 6)
    rows = torch.tensor([1, 2])
    for key, value in (((slice(1, None), rows), 2.0), (slice(1, 3), 5.0), ((2, 3), 1.0), ([0, 4], 7.0)):
        x, y = shard(full, world.mesh, placements=(Partial(),)), full.clone()
        x[key] = value
        y[key] = value
        torch.testing.assert_close(x.full_tensor(), y)
    x = shard(full, world.mesh, placements=(Partial(),))
    with pytest.raises(NotImplementedError, match="view"):
        x[1:].add_(1)

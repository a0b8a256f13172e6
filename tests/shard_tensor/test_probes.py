"""Small everyday uses, each compared with one process in output and gradients: 4 ranks, even, uneven and empty shards."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from shardwise import ShardTensor, scatter_tensor
from shardwise.errors import MissingShardPatch
from shardwise.testing import ranks, shard

UNEVEN, EMPTY, EVEN = (5, 3, 6, 2), (6, 0, 7, 3), (4, 4, 4, 4)
SHAPE = (2, 16, 6)


def whole(value):
    return value.full_tensor() if isinstance(value, ShardTensor) else value


def compare(world, function, *operands, dim=1, sizes=UNEVEN, grads=True):
    """`function` of the split operands equals that of the whole ones: every output, every gradient."""
    mine = [shard(x, world.mesh, dim=dim, sizes=sizes) for x in operands]
    theirs = [x.clone() for x in operands]
    for x in (*mine, *theirs):
        if grads and x.is_floating_point():
            x.requires_grad_()
    ours, expected = function(*mine), function(*theirs)
    ours, expected = ([*r] if isinstance(r, tuple | list) else [r] for r in (ours, expected))
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert tuple(a.shape) == tuple(b.shape)
        torch.testing.assert_close(whole(a), b, rtol=1e-10, atol=1e-10)
    pairs = [(a, b) for a, b in zip(ours, expected, strict=True) if b.requires_grad]
    if not pairs or not grads:
        return
    for a, b in pairs:
        weights = torch.linspace(0.5, 1.5, b.numel(), dtype=b.dtype).view(b.shape)
        (b * weights).sum().backward(retain_graph=True)
        (a * weights).sum().backward(retain_graph=True)
    for a, b in zip(mine, theirs, strict=True):
        if b.grad is not None:
            assert a.grad._spec.sizes == a._spec.sizes
            torch.testing.assert_close(whole(a.grad), b.grad, rtol=1e-10, atol=1e-10)


PROBES = {
    "add, mul": lambda x: x * 2 + x * x,
    "in-place add_ on a clone": lambda x: x.clone().add_(1).mul_(x),
    "comparison": lambda x: x > 0,
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "ones_like, zeros_like": lambda x: torch.ones_like(x) * x + torch.zeros_like(x),
    "sum and mean of everything": lambda x: (x.sum(), x.mean()),
    "sum along the sharded dim": lambda x: x.sum(1),
    "sum(dim=0, keepdim=True)": lambda x: x.sum(dim=0, keepdim=True),
    "sum over two dims": lambda x: x.sum((0, 1)),
    "sum(dim=())": lambda x: x.sum(dim=()),
    "max along the sharded dim, with indices": lambda x: tuple(x.max(1)),
    "argmax along the other dim": lambda x: x.argmax(2),
    "argmax along the sharded dim": lambda x: x.argmax(1),
    "var along the sharded dim": lambda x: x.var(1),
    "std of everything": lambda x: x.std(),
    "softmax along the sharded dim": lambda x: x.softmax(1),
    "cumsum along the sharded dim": lambda x: x.cumsum(1),
    "topk along the sharded dim": lambda x: tuple(x.topk(3, 1)),
    "topk along the other dim": lambda x: tuple(x.topk(3, 2)),
    "any, all": lambda x: ((x > 2).any(), (x > -9).all(), (x > 0).any(1)),
    "view splits an unsharded dim": lambda x: x.view(2, 16, 2, 3),
    "permute": lambda x: x.permute(2, 1, 0),
    "transpose, contiguous, view": lambda x: x.transpose(1, 2).contiguous().view(12, 16),
    "unsqueeze, squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "repeat along the other dim": lambda x: x.repeat(1, 1, 2),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "chunk along the other dim": lambda x: x.chunk(3, 2),
    "split along the sharded dim": lambda x: x.split([4, 12], 1),
    "unbind along the other dim": lambda x: x.unbind(0),
    "flip along the sharded dim": lambda x: x.flip(1),
    "triu of a sharded matrix": lambda x: x[0].triu(),
    "F.pad circular on another dim": lambda x: F.pad(x, (1, 1), mode="circular"),
    "x[0]": lambda x: x[0],
    "x.select(-1, 0)": lambda x: x.select(-1, 0),
    "boolean mask": lambda x: x[x > 0],
    "take_along_dim on the sharded dim": lambda x: torch.take_along_dim(x, x.detach().argsort(1), 1),
    "einsum that contracts": lambda x: torch.einsum("bnc,bnd->bcd", x, x * 2),
    "cross_entropy": lambda x: F.cross_entropy(x.reshape(-1, 6), torch.arange(32) % 6),
    "cdist": lambda x: torch.cdist(x, x.detach() + 1),
    "checkpoint": lambda x: checkpoint(lambda y: F.gelu(y) * y, x, use_reentrant=False),
    "fft along the sharded dim": lambda x: torch.fft.fft(x, dim=1).real,
    "roll along the sharded dim": lambda x: x.roll(3, 1),
    "sort along the sharded dim": lambda x: tuple(x.sort(1)),
    "gather with a plain index": lambda x: x.gather(1, torch.arange(24).view(2, 2, 6) % 16),
    "index with a plain tensor": lambda x: x[:, torch.tensor([3, 15, 0, 3])],
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 15, 0, 3])),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.5),
    "tril": lambda x: x.tril(),
    "diff": lambda x: x.diff(dim=1),
    "norm": lambda x: (x.norm(), x.norm(dim=1), x.norm(p=1, dim=2)),
    "logsumexp": lambda x: x.logsumexp(1),
    "prod": lambda x: x.prod(1),
    "nonzero": lambda x: (x > 0).nonzero(),
    "unique": lambda x: (x * 2).round().detach().unique(),
    "meshgrid-like": lambda x: x + torch.arange(16, dtype=x.dtype).view(1, 16, 1),
}


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("sizes", [UNEVEN, EMPTY], ids=["uneven", "empty"])
@ranks(4)
def test_probe(world, name, sizes):
    compare(world, PROBES[name], world.randn(*SHAPE), sizes=sizes)


@ranks(4)
def test_integers(world):
    compare(world, lambda x: ((x * 3 + 1) // 2, x.sum(), x.float().mean()), torch.arange(96).view(2, 16, 3), grads=False)


@ranks(4)
def test_writing_rows_across_shards(world):
    x = world.randn(16, 3)
    mine, theirs = shard(x, world.mesh, dim=0, sizes=UNEVEN), x.clone()
    for t in (mine, theirs):
        t[3:9] = 0
        t[:, 1] = 5
        t[2] += 1
    torch.testing.assert_close(mine.full_tensor(), theirs)


@ranks(4)
def test_requires_grad_on_a_finished_tensor(world):
    x = shard(world.randn(16, 3), world.mesh, dim=0, sizes=UNEVEN)
    assert x.requires_grad_() is x
    (x * x).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * x.detach().full_tensor())


@ranks(4)
def test_second_order_gradients(world):
    full = world.randn(16, 3)
    x, y = shard(full, world.mesh, dim=0, sizes=UNEVEN).requires_grad_(), full.clone().requires_grad_()
    results = []
    for t in (x, y):
        (g,) = torch.autograd.grad((t**3).sum(), t, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), t)
        results.append(whole(h))
    torch.testing.assert_close(*results)


@ranks(4)
def test_embedding_of_uneven_indices(world):
    indices = torch.arange(16) % 5
    tables = [world.randn(5, 4, seed=1).requires_grad_() for _ in range(2)]
    ours = F.embedding(shard(indices, world.mesh, dim=0, sizes=UNEVEN), tables[0])
    theirs = F.embedding(indices, tables[1])
    torch.testing.assert_close(ours.full_tensor(), theirs)
    ours.pow(2).sum().backward()
    theirs.pow(2).sum().backward()
    torch.testing.assert_close(tables[0].grad, tables[1].grad)


NORMS = {
    "group norm": lambda: nn.GroupNorm(2, 4),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "conv k3 p0": lambda: nn.Conv2d(4, 3, 3),
    "conv k3 p1 s2": lambda: nn.Conv2d(4, 3, 3, 2, 1),
    "conv same k5": lambda: nn.Conv2d(4, 3, 5, padding="same"),
    "conv k2": lambda: nn.Conv2d(4, 3, 2),
    "conv k4 s2 p1": lambda: nn.Conv2d(4, 3, 4, 2, 1),
    "conv k2 s2": lambda: nn.Conv2d(4, 3, 2, 2),
    "conv k1": lambda: nn.Conv2d(4, 3, 1),
    "transposed k2 s2": lambda: nn.ConvTranspose2d(4, 3, 2, 2),
    "transposed k4 s2 p1": lambda: nn.ConvTranspose2d(4, 3, 4, 2, 1),
    "max pool k2": lambda: nn.MaxPool2d(2),
    "max pool k3 s2 p1": lambda: nn.MaxPool2d(3, 2, 1),
    "avg pool k4 s4 p2": lambda: nn.AvgPool2d(4, 4, 2),
    "adaptive pool": lambda: nn.AdaptiveAvgPool2d(1),
    "bilinear x1.5": lambda: nn.Upsample(scale_factor=1.5, mode="bilinear"),
    "bilinear to (32, 10)": lambda: nn.Upsample(size=(32, 10), mode="bilinear"),
    "bicubic x2": lambda: nn.Upsample(scale_factor=2, mode="bicubic"),
    "pixel shuffle": lambda: nn.PixelShuffle(2),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN, EMPTY], ids=["even", "uneven", "empty"])
@ranks(4)
def test_layer(world, name, sizes):
    ours = world.same(lambda: NORMS[name]().double())
    theirs = copy.deepcopy(ours)
    full = world.randn(1, 4, 16, 8)
    x, y = shard(full, world.mesh, dim=2, sizes=sizes).requires_grad_(), full.clone().requires_grad_()
    a, b = ours(x), theirs(y)
    torch.testing.assert_close(a.full_tensor(), b, rtol=1e-10, atol=1e-10)
    weights = torch.linspace(0.5, 1.5, b.numel(), dtype=b.dtype).view(b.shape)
    (a * weights).sum().backward()
    (b * weights).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), y.grad, rtol=1e-10, atol=1e-10)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-10)
    for p, q in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(p, q)


@ranks(4)
def test_group_norm_on_two_axes(world):
    mesh = world.make_mesh((2, 2), ("a", "b"))
    full = world.randn(4, 4, 6, 5)
    norm = world.same(lambda: nn.GroupNorm(2, 4).double())
    x = scatter_tensor(full, 0, mesh, (Shard(0), Shard(2)), requires_grad=True)
    y = full.clone().requires_grad_()
    torch.testing.assert_close(norm(x).full_tensor(), norm(y), rtol=1e-10, atol=1e-10)


@ranks(4)
def test_conv_with_split_channels_and_on_replicate_by_shard(world):
    mesh = world.make_mesh((2, 2), ("a", "b"))
    conv = world.same(lambda: nn.Conv2d(4, 3, 3, padding=1).double())
    full = world.randn(1, 4, 9, 5)
    for placements in ((Replicate(), Shard(2)), (Replicate(), Shard(1)), (Shard(1), Shard(2)), (Shard(3), Shard(2))):
        torch.testing.assert_close(conv(scatter_tensor(full, 0, mesh, placements)).full_tensor(), conv(full), rtol=1e-10, atol=1e-10)


@ranks(4)
def test_reduce_scatter_of_a_pending_sum(world):
    local = world.randn(10, 3, seed=world.rank)
    x = ShardTensor.from_local(local, world.mesh, (Partial(),))
    y = x.redistribute(placements=(Shard(0),))
    torch.testing.assert_close(y.full_tensor(), sum(world.randn(10, 3, seed=r) for r in range(4)))
    assert y._spec.sizes[0] == (3, 3, 3, 1)


@ranks(4)
def test_contradicting_shards_are_refused_on_all_ranks(world):
    with pytest.raises(ValueError, match="dim 1 must be equal"):
        ShardTensor.from_local(torch.zeros(2, 3 + world.rank), world.mesh, (Shard(0),))
    with pytest.raises(ValueError, match="do not fit"):
        shapes = [[3, 2]] * 4
        ShardTensor.from_local(torch.zeros(3 if world.rank else 2, 2), world.mesh, (Shard(0),), sharding_shapes={0: shapes})


@ranks(4)
def test_two_rows_on_four_ranks(world):
    full = world.randn(2, 3)
    x = scatter_tensor(full, 0, world.mesh, (Shard(0),), requires_grad=True)
    (x * x).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * full)


@ranks(4)
def test_parameter_with_adam(world):
    full = world.randn(16, 3)
    ours, theirs = nn.Parameter(shard(full, world.mesh, dim=0, sizes=UNEVEN)), nn.Parameter(full.clone())
    for p in (ours, theirs):
        optimizer = torch.optim.Adam([p], lr=0.1)
        (p * p).sum().backward()
        optimizer.step()
    torch.testing.assert_close(ours.detach().full_tensor(), theirs.detach())


@ranks(4)
def test_values_as_python_numbers(world):
    x = shard(world.randn(16, 3), world.mesh, dim=0, sizes=UNEVEN)
    full = x.full_tensor()
    assert x.sum().item() == pytest.approx(full.sum().item())
    assert float(x.sum()) == pytest.approx(float(full.sum()))
    assert bool((x > 99).any()) is False
    assert x.tolist() == full.tolist()
    assert "ShardTensor" in repr(x) and "ShardTensor" in str(x)
    with pytest.raises(TypeError, match="full_tensor"):
        x.numpy()


@ranks(4)
def test_pickle_save_and_deepcopy(world):
    x = shard(world.randn(16, 3), world.mesh, dim=0, sizes=UNEVEN).requires_grad_()
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    for y in (copy.deepcopy(x), torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(y.full_tensor(), x.full_tensor())
        assert y.requires_grad and y._spec == x._spec


@ranks(4)
def test_the_true_exception_shows(world):
    def broken(op, types, args, kwargs):
        raise TypeError("the true reason")

    x = shard(world.randn(16, 3), world.mesh, dim=0, sizes=UNEVEN)
    from shardwise.shard_tensor import registry

    before = registry.functions[torch.add]
    ShardTensor.register_function_handler(torch.add, broken)
    try:
        with pytest.raises(TypeError, match="the true reason"):
            x + x
    finally:
        registry.functions[torch.add] = before
    torch.testing.assert_close((x + x).full_tensor(), 2 * x.full_tensor())


@ranks(4)
def test_inference_mode_and_no_grad(world):
    x = shard(world.randn(16, 3), world.mesh, dim=0, sizes=UNEVEN)
    layer = world.same(lambda: nn.Linear(3, 2).double())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = layer(x).relu()
            assert not y.requires_grad
            torch.testing.assert_close(y.full_tensor(), layer(x.full_tensor()).relu())


@ranks(4)
def test_autocast(world):
    x = shard(world.randn(16, 8).float(), world.mesh, dim=0, sizes=UNEVEN)
    layer = world.same(lambda: nn.Linear(8, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype is torch.bfloat16
        torch.testing.assert_close(y.full_tensor(), layer(x.full_tensor()))


@ranks(2, processes=True)
def test_one_warning_for_a_gathered_op(world):
    from shardwise import MissingShardPatch, fallback
    from shardwise.shard_tensor.fallback import forget_told

    x = shard(world.randn(16, 3), world.mesh, dim=0, sizes=(11, 5))
    forget_told()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.unique_consecutive(x)
    told = [str(w.message) for w in caught if "no sharded form" in str(w.message)]
    assert len(told) == (world.rank == 0), told
    assert all("unique_consecutive" in text and "bytes" in text for text in told)
    with fallback("error"), pytest.raises(MissingShardPatch, match="unique_consecutive"):
        torch.unique_consecutive(x)


@ranks(4)
def test_products_with_named_operands(world):
    a, b = world.randn(3, 16, 5), world.randn(3, 5, 4)
    x = shard(a, world.mesh, dim=1, sizes=UNEVEN)
    bias = world.randn(4)
    torch.testing.assert_close(
        torch.baddbmm(bias, batch1=x, batch2=b, beta=0.5, alpha=2).full_tensor(), torch.baddbmm(bias, a, b, beta=0.5, alpha=2)
    )
    torch.testing.assert_close(torch.addmm(bias, mat1=x[0], mat2=b[0]).full_tensor(), torch.addmm(bias, a[0], b[0]))


@ranks(2)
def test_sparse_results_are_refused_on_every_rank(world):
    from shardwise import MissingShardPatch

    x = shard(world.randn(4, 3), world.mesh, dim=0, sizes=(3, 1))
    with pytest.raises(MissingShardPatch, match="sparse"):
        x.to_sparse()
    index = torch.arange(4)
    with pytest.raises(MissingShardPatch, match="sparse"):
        torch.sparse_coo_tensor(torch.stack((index, index)), x[:, 0], (4, 4))
    with pytest.raises(MissingShardPatch, match="sparse"):
        torch.sparse_csr_tensor(torch.arange(5), index, x[:, 0], (4, 4))


@ranks(2)
def test_in_place_forms_without_torchs_pointwise_tag_stay_local(world):
    from shardwise import fallback

    x = shard(world.randn(4, 3), world.mesh, dim=0, sizes=(3, 1))
    with fallback("error"):
        for write in (F.hardswish, F.mish):
            write(x.clone(), inplace=True)
        for name in ("abs_", "ge_", "copysign_", "true_divide_", "not_equal_"):
            getattr(x.clone(), name)(*() if name == "abs_" else (0.5,))


@ranks(2)
def test_an_index_out_of_range_of_a_split_table_is_refused(world):
    table = shard(world.randn(5, 2), world.mesh, dim=0, sizes=(3, 2))
    for bad in (5, -1):
        with pytest.raises(IndexError, match="rows 0 to 4"):
            F.embedding(torch.tensor([0, bad]), table)


@ranks(2)
def test_arguments_by_name(world):
    whole = world.randn(4, 3)
    x = shard(whole, world.mesh, dim=0, sizes=(3, 1))
    for call in (
        lambda t: t.flip(dims=(0, 1)), lambda t: torch.flip(t, dims=[0]), lambda t: t.repeat(repeats=(2, 1)),
        lambda t: torch.tile(t, dims=(2,)),
        lambda t: t.mm(mat2=t.T), lambda t: torch.bmm(t[None], mat2=t.T[None]), lambda t: t.mv(vec=t[0]),
    ):  # fmt: skip
        torch.testing.assert_close(call(x).full_tensor(), call(whole))


@ranks(2)
def test_writes_into_a_pending_sum(world):
    def pending():
        return ShardTensor.from_local(
            torch.ones(4, 3) * (world.rank + 1), world.mesh, (Partial(),), sharding_shapes="chunk", global_shape=(4, 3)
        )

    x = pending()
    x.fill_(2.0)
    assert torch.equal(x.full_tensor(), torch.full((4, 3), 2.0))
    x = pending()
    x[1:3] = 5.0
    assert x.full_tensor()[:, 0].tolist() == [3, 5, 5, 3]
    x = pending()
    view = x[1:]
    with pytest.raises(MissingShardPatch, match="of which a view exists"):
        x[1:3] = 5.0
    assert view.full_tensor()[0, 0] == 3
    del view
    x += 1
    assert torch.equal(x.full_tensor(), torch.full((4, 3), 4.0))

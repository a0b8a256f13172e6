"""Limits of other implementations of sharded tensors, each with a check that it does not hold here; `python -m tests.limits` prints
the page `docs/limits.md`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardwise import ShardTensor, scatter_tensor
from shardwise.functional import knn, neighborhood_attention, radius_search, signed_distance
from shardwise.random import use_generator
from shardwise.testing import World, assert_same_as_unsharded, count_communication, shard

UNEVEN, EMPTY, THIN = (5, 3, 6, 2), (6, 0, 7, 3), (13, 1, 1, 1)
SPLITS = (UNEVEN, EMPTY, THIN)
sdpa = F.scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True)
class Limit:
    """op, limit: what does not work elsewhere. check: runs on four ranks and fails if it does not work here."""

    op: str
    limit: str
    check: Callable[[World], None]

    def __str__(self) -> str:
        return f"{self.op}: {self.limit}"


LIMITS: list[Limit] = []


def limit(op: str, text: str) -> Callable:
    def add(check: Callable[[World], None]) -> Callable[[World], None]:
        LIMITS.append(Limit(op=op, limit=text, check=check))
        return check

    return add


def rows_split(op: str, text: str, function: Callable, shape=(2, 4, 16, 6), dim: int = 2, splits=SPLITS, grads: bool = True) -> None:
    """A limit checked by `function(x)` with `dim`, of 16 rows, split in several ways."""

    def check(world: World) -> None:
        for sizes in splits:
            x = shard(world.randn(*shape), world.mesh, dim=dim, sizes=sizes)
            assert_same_as_unsharded(function, x, grads=grads)

    limit(op, text)(check)


def module(op: str, text: str, make: Callable[[], nn.Module], splits=SPLITS, dim: int = 2) -> None:
    """The same with a module, whose weights get gradients too."""

    def check(world: World) -> None:
        for sizes in splits:
            layer = world.same(lambda: make().double())
            assert_same_as_unsharded(layer, shard(world.randn(2, 4, 16, 6), world.mesh, dim=dim, sizes=sizes))

    limit(op, text)(check)


def grid(world: World):
    return world.make_mesh((2, 2), ("a", "b"))


# ---------------------------------------------------------------------- convolution, pooling, resizing

module("convolution", "even kernels other than kernel = stride, padding 0", lambda: nn.Conv2d(4, 3, 4, 2, 1))
module("convolution", "even kernel, stride 1", lambda: nn.Conv2d(4, 3, 2))
module("convolution", "stride where shards do not begin at its multiples", lambda: nn.Conv2d(4, 3, 3, 2, 1))
module("convolution", "padding other than half the kernel", lambda: nn.Conv2d(4, 3, 3, 1, 0))
module("convolution", "a window wider than the neighbour's shard", lambda: nn.Conv2d(4, 3, (9, 1), padding=(4, 0)))
module("convolution", "a rank without rows", lambda: nn.Conv2d(4, 3, 1), splits=(EMPTY,))
module("transposed convolution", "kernel other than stride, with padding", lambda: nn.ConvTranspose2d(4, 3, 4, 2, 1))
module("transposed convolution", "odd kernel, output padding", lambda: nn.ConvTranspose2d(4, 3, 3, 2, 1, output_padding=1))
module("transposed convolution", "dilation", lambda: nn.ConvTranspose2d(4, 3, 3, dilation=2))


@limit("convolution", "sharded channels")
def _(world):
    layer = world.same(lambda: nn.Conv2d(6, 3, 3).double())
    assert_same_as_unsharded(layer, shard(world.randn(2, 6, 8, 8), world.mesh, dim=1, sizes=(1, 3, 0, 2)))


@limit("convolution", "a mesh of two axes of which one replicates or splits the batch")
def _(world):
    layer = world.same(lambda: nn.Conv2d(3, 2, 3, padding=1).double())
    for placements in ((Replicate(), Shard(2)), (Shard(0), Shard(2)), (Shard(2), Shard(2)), (Shard(3), Shard(2))):
        assert_same_as_unsharded(layer, shard(world.randn(3, 3, 7, 6), grid(world), placements=placements))


@limit("convolution", "input without a batch dim")
def _(world):
    layer = world.same(lambda: nn.Conv2d(4, 3, 3, padding=1).double())
    assert_same_as_unsharded(layer, shard(world.randn(4, 16, 6), world.mesh, dim=1, sizes=UNEVEN))


rows_split("pooling", "kernel other than stride, padding", partial(F.max_pool2d, kernel_size=3, stride=2, padding=1))
rows_split("pooling", "shards that do not divide by the stride", partial(F.avg_pool2d, kernel_size=2))
rows_split("pooling", "padding counted or not, ceil mode", partial(F.avg_pool2d, kernel_size=4, padding=2, ceil_mode=True))
rows_split("pooling", "dilation", partial(F.max_pool2d, kernel_size=3, dilation=2, stride=1))
rows_split("pooling", "indices are those of the whole tensor", partial(F.max_pool2d, kernel_size=2, return_indices=True))
rows_split("pooling", "adaptive", partial(F.adaptive_avg_pool2d, output_size=3))
rows_split("interpolate", "an output size", partial(F.interpolate, size=(37, 11), mode="bilinear"))
rows_split("interpolate", "a fractional scale, one for each dim", partial(F.interpolate, scale_factor=(1.7, 0.6), mode="bilinear"))
rows_split("interpolate", "align_corners", partial(F.interpolate, scale_factor=2, mode="bilinear", align_corners=True))
rows_split("interpolate", "a shard narrower than the window", partial(F.interpolate, scale_factor=2, mode="bicubic"))
rows_split("pad", "circular", partial(F.pad, pad=(1, 2, 3, 4), mode="circular"))
rows_split("pad", "reflection wider than the shard at the border", partial(F.pad, pad=(2, 2, 7, 9), mode="reflect"))


@limit("pad", "two axes of the mesh on one dim")
def _(world):
    x = shard(world.randn(2, 3, 10, 6), grid(world), placements=(Shard(2), Shard(2)))
    for mode in ("reflect", "replicate", "circular"):
        assert_same_as_unsharded(partial(F.pad, pad=(1, 1, 3, 2), mode=mode), x)


# ---------------------------------------------------------------------- norms


@limit("group norm", "meshes of several axes; sharded channels; batch shards; a replicated input")
def _(world):
    layer = world.same(lambda: nn.GroupNorm(2, 4).double())
    x = world.randn(3, 4, 6, 5)
    for placements in ((Shard(0), Shard(2)), (Shard(2), Shard(3)), (Shard(1), Shard(2)), (Shard(0), Replicate()), (Replicate(),) * 2):
        assert_same_as_unsharded(layer, shard(x, grid(world), placements=placements))


@limit("group norm", "a large offset: variance as a difference of squares loses all digits")
def _(world):
    layer = nn.GroupNorm(2, 4)
    x = (world.randn(2, 4, 16, 6) + 1e4).float()
    expected = layer.double()(x.double()).float()
    layer.float()
    ours = layer(shard(x, world.mesh, dim=2, sizes=UNEVEN)).full_tensor()
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-3)  # half an ulp of 1e4 is 5e-4 of the deviation


module("batch and instance norm", "statistics over the whole extent", lambda: nn.Sequential(nn.BatchNorm2d(4), nn.InstanceNorm2d(4)))


# ---------------------------------------------------------------------- attention


def attention(text: str, function: Callable, heads: int = 4, kv_heads: int = 4) -> None:
    def check(world: World) -> None:
        for sizes in (UNEVEN, EMPTY):
            q, k, v = (shard(world.randn(1, h, 16, 8), world.mesh, dim=2, sizes=sizes) for h in (heads, kv_heads, kv_heads))
            assert_same_as_unsharded(function, q, k, v)

    limit("attention", text)(check)


MASK = torch.arange(16).unsqueeze(1) % 3 != torch.arange(16) % 4
attention("causal ring", partial(sdpa, is_causal=True))
attention("uneven and empty shards of keys", sdpa)
attention("fewer key heads", partial(sdpa, enable_gqa=True, is_causal=True), kv_heads=2)
attention("a mask of all rows and columns beside sharded keys", partial(sdpa, attn_mask=MASK))


@limit("attention", "dropout")
def _(world):
    q, k, v = (world.randn(1, 4, 16, 8) for _ in range(3))
    results = []
    for sizes in ((4, 4, 4, 4), (13, 1, 1, 1)):
        parts = [shard(x, world.mesh, dim=2, sizes=sizes) for x in (q, k, v)]
        with use_generator(torch.Generator().manual_seed(3)):
            results.append(sdpa(*parts, dropout_p=0.4).full_tensor())
    torch.testing.assert_close(*results)
    assert not torch.allclose(results[0], sdpa(q, k, v))


@limit("attention", "sharded heads, a sharded batch, meshes of several axes")
def _(world):
    q, k, v = (world.randn(2, 4, 9, 8) for _ in range(3))
    for placements in ((Shard(1), Shard(1)), (Shard(0), Shard(2)), (Shard(1), Shard(2)), (Shard(2), Shard(2))):
        assert_same_as_unsharded(partial(sdpa, is_causal=True), *(shard(x, grid(world), placements=placements) for x in (q, k, v)))


@limit("attention", "replicated queries with sharded keys and a mask")
def _(world):
    k, v = (shard(world.randn(1, 4, 16, 8), world.mesh, dim=2, sizes=UNEVEN) for _ in range(2))
    assert_same_as_unsharded(partial(sdpa, attn_mask=MASK), world.randn(1, 4, 16, 8), k, v)


# ---------------------------------------------------------------------- products, sums, shapes


@limit("linear", "sharded features")
def _(world):
    layer = world.same(lambda: nn.Linear(16, 3).double())
    assert_same_as_unsharded(layer, shard(world.randn(2, 16), world.mesh, dim=1, sizes=UNEVEN))


rows_split("sum, mean", "keepdim with a reduced dim before the sharded one", lambda x: (x.sum(0, keepdim=True), x.mean((0, 3), True)))
rows_split("sum, mean", "dtype by keyword; mean with an empty shard", lambda x: (x.float().sum(2, dtype=torch.float64), x.mean()))
rows_split("var, std, max, argmax, topk", "along the sharded dim", lambda x: (x.var(2), x.std(), *x.max(2), x.argmax(2), *x.topk(2, 2)))
rows_split("view, flatten", "a sharded dim that is not the first of those joined", lambda x: x.flatten(1, 2) * 2 + x.view(2, 64, 6))
rows_split("view, unflatten", "a sharded dim cut where shards do not divide", lambda x: (x.unflatten(2, (4, 4)), x.view(8, 2, 8, 6)))
rows_split("view as another dtype", "more than one dim", lambda x: x.view(torch.int64), grads=False)
rows_split(
    "permute, squeeze, stack, repeat",
    "uneven shards",
    lambda x: torch.stack([x.permute(3, 2, 0, 1).unsqueeze(0).squeeze(0)]).repeat(2, 1, 1, 1, 1),
)
rows_split("unbind, select", "the sharded dim, negative dims, x[...]", lambda x: (*x.unbind(2)[3:9], x.select(-2, 7), x[..., 4, 1], x[0]))


@limit("unbind, select", "pending sums")
def _(world):
    x = shard(world.randn(3, 4), world.mesh, placements=(Partial(),))
    assert_same_as_unsharded(lambda t: (*t.unbind(0), t.select(1, -1)), x)


@limit("index_select", "any index on any mesh, without gathering the source")
def _(world):
    index = torch.tensor([3, 15, 0, 3, 9])
    for mesh, placements in ((world.mesh, (Shard(0),)), (grid(world), (Shard(0), Shard(1))), (grid(world), (Shard(0), Shard(0)))):
        x = shard(world.randn(16, 6), mesh, placements=placements)
        assert_same_as_unsharded(lambda t: torch.index_select(input=t, dim=0, index=index), x)
    x = shard(world.randn(1600, 6), world.mesh, dim=0)
    rows = shard(torch.arange(0, 1600, 100), world.mesh, dim=0)
    with count_communication() as sent:
        x.index_select(0, rows)
    assert sent.bytes < 1600 * 6 * 8 / 10


rows_split("cross", "a sharded dim of three", lambda x: torch.linalg.cross(x[:, :3], x[:, 1:].flip(1), dim=1), splits=(UNEVEN,))


@limit("cross", "the dim of the three coordinates sharded; out=")
def _(world):
    x, y = (shard(world.randn(5, 3), world.mesh, dim=1, sizes=(1, 0, 2, 0)) for _ in range(2))
    assert_same_as_unsharded(torch.linalg.cross, x, y)
    out = torch.zeros_like(x)
    torch.cross(x, y, dim=1, out=out)
    torch.testing.assert_close(out.full_tensor(), torch.linalg.cross(x.full_tensor(), y.full_tensor()))


rows_split(
    "indexing", "boolean masks, take_along_dim, cross-shard writes", lambda x: (x[x > 0], torch.take_along_dim(x, x.detach().argsort(2), 2))
)
rows_split("complex numbers, FFT", "along the sharded dim", lambda x: torch.fft.fftn(x, dim=(1, 2)).abs())
rows_split("ops without a rule", "uneven shards", lambda x: torch.linalg.matrix_exp(x[:, :, :, :1] * x[:, :, :, :1].mT))


@limit("scatter_add, index_add", "meshes of several axes, no routing tables")
def _(world):
    index = world.same(lambda: torch.randint(0, 9, (16,)))
    for placements in ((Shard(0), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Shard(0))):
        source = shard(world.randn(16, 4), grid(world), placements=placements)
        nodes = shard(world.randn(9, 4), grid(world), placements=placements)
        assert_same_as_unsharded(lambda n, s: n.index_add(0, index, s), nodes, source)
        assert_same_as_unsharded(lambda n, s: n.scatter_add(0, index.unsqueeze(1).expand(16, 4), s), nodes, source)


# ---------------------------------------------------------------------- points, surfaces, neighbourhoods


def clouds(world, placements=None, mesh=None):
    mesh, placements = mesh or world.mesh, placements or (Shard(0),)
    return tuple(shard(world.randn(n, 3), mesh, placements=placements) for n in (11, 7))


@limit("nearest neighbours", "more neighbours than a shard has points; meshes of several axes; no GPU library; gradients")
def _(world):
    assert_same_as_unsharded(lambda p, q: knn(p, q, 9), *clouds(world))
    assert_same_as_unsharded(lambda p, q: knn(p, q, 9), *clouds(world, (Shard(0), Shard(0)), grid(world)))


@limit("radius search", "without max_points; distances returned; gradients to sharded points; meshes of several axes")
def _(world):
    for points, queries in (clouds(world), clouds(world, (Replicate(), Shard(0)), grid(world))):
        for most in (None, 4):
            assert_same_as_unsharded(lambda p, q, most=most: radius_search(p, q, 1.5, most, True, True), points, queries)


@limit("signed distance", "gradients to the surface; a sharded surface that is not gathered")
def _(world):
    corners, faces = world.randn(8, 3), world.same(lambda: torch.randint(0, 8, (10, 3)))
    faces = shard(faces, world.mesh, dim=0, sizes=(3, 0, 5, 2))
    assert_same_as_unsharded(signed_distance, corners, faces, clouds(world)[1])


@limit("neighbourhood attention", "even kernels, dilation, kernels that differ by dim, plain keys beside sharded queries")
def _(world):
    q, k = (world.randn(1, 16, 6, 2, 4) for _ in range(2))
    function = partial(neighborhood_attention, kernel_size=(4, 3), dilation=(3, 2))
    assert_same_as_unsharded(function, shard(q, world.mesh, dim=1, sizes=UNEVEN), k, k)


# ---------------------------------------------------------------------- the tensor itself


@limit("autograd", "second derivatives")
def _(world):
    def gradient(x):
        (first,) = torch.autograd.grad((x.sin() * x.sum(0)).sum(), x, create_graph=True)
        return first.square().sum(0)

    x = shard(world.randn(16, 3), world.mesh, dim=0, sizes=UNEVEN)
    assert_same_as_unsharded(lambda t: gradient(t.requires_grad_()), x)


@limit("from_local", "shapes that contradict each other pass unnoticed")
def _(world):
    with pytest.raises(ValueError):
        ShardTensor.from_local(torch.ones(2, 3 + (world.rank == 1)), world.mesh, (Shard(0),))
    with pytest.raises(ValueError):
        ShardTensor.from_local(torch.ones(2, 3), world.mesh, (Shard(0),), {0: [(2, 3), (2, 3), (9, 3), (2, 3)]})


@limit("scatter_tensor", "fewer rows than ranks; the whole tensor sent to every rank")
def _(world):
    x = scatter_tensor(world.randn(2, 5), 0, world.mesh, (Shard(0),), requires_grad=True)
    x.square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * x.detach().full_tensor())
    with count_communication() as sent:
        scatter_tensor(world.randn(400, 5), 0, world.mesh, (Shard(0),), global_shape=(400, 5), dtype=torch.float64)
    assert sent.bytes <= 400 * 5 * 8


@limit("redistribute", "from one dim to another with uneven shards; to uneven halves of a two-axis mesh")
def _(world):
    x = shard(world.randn(16, 6), world.mesh, dim=0, sizes=UNEVEN)
    assert_same_as_unsharded(lambda t: t.redistribute(placements=(Shard(1),)) * 2 if isinstance(t, ShardTensor) else t * 2, x)


@limit("values as Python numbers", "of a sharded sum: the shard's, without an error")
def _(world):
    x = shard(torch.arange(16.0), world.mesh, dim=0, sizes=UNEVEN)
    assert float(x.sum()) == x.sum().item() == 120.0
    assert x.tolist() == list(range(16))


@limit("halos and rings", "groups that do not begin at rank 0 send to the wrong ranks")
def _(world):
    mesh = grid(world)
    line = torch.arange(8.0).double() + 100 * mesh.get_local_rank("a")
    x = shard(line.view(1, 1, 8), mesh["b"], dim=2)
    y = F.conv1d(x, torch.ones(1, 1, 3).double(), padding=1).full_tensor()
    torch.testing.assert_close(y, F.conv1d(line.view(1, 1, 8), torch.ones(1, 1, 3).double(), padding=1))


# ---------------------------------------------------------------------- the page


def page() -> str:
    lines = [
        "# Limits of other sharded tensors that do not hold here",
        "",
        "What another implementation of sharded tensors refuses, gets wrong or leaves ranks waiting for, and works here: equal to one",
        "process in output and, where there are any, gradients, on four ranks, mostly with uneven shards (5, 3, 6 and 2 rows), empty ones",
        "and shards of one row.",
        "Each line is a case of `tests/limits.py`, run by `tests/shard_tensor/test_limits.py`; made by `python -m tests.limits`.",
        "`tests/shard_tensor/test_probes.py` has some eighty everyday uses more.",
        "",
        "| op | limit elsewhere |",
        "| --- | --- |",
    ]
    return "\n".join([*lines, *(f"| {case.op} | {case.limit} |" for case in LIMITS), ""])


if __name__ == "__main__":
    print(page(), end="")

"""Convolution on shards equals convolution in one process, and exchanges only the rows that a rank reads and does not own."""

import math
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.shard_tensor.conv_cases import CONVOLUTIONS, random_convolution, random_split
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from shardwise import ShardTensor
from shardwise.collectives.counter import count_communication
from shardwise.testing import assert_same_as_unsharded, ranks, shard
from shardwise.testing.memory import measure_saved_bytes


def check_random(world, seed, count):
    rng = random.Random(seed)
    for number in range(count):
        n, shape, kernel, bias, arguments = random_convolution(rng)
        x = random_split(rng, world.mesh, world.randn(*shape))
        weights = [world.randn(*kernel), *([world.randn(kernel[0])] if bias else [])]
        try:
            assert_same_as_unsharded(CONVOLUTIONS[n], x, *weights, kwargs=arguments)
        except BaseException as error:
            error.add_note(f"case {number}: {x._spec.describe()}, weight {kernel}, {arguments}")
            raise


@ranks(2)
def test_500_random_convolutions_on_two_ranks(world):
    check_random(world, 2, 500)


@ranks(3)
def test_250_random_convolutions_on_three_ranks(world):
    check_random(world, 3, 250)


@ranks(4)
def test_150_random_convolutions_on_four_ranks(world):
    check_random(world, 4, 150)


@ranks(4, mesh={"a": 2, "b": 2})
def test_100_random_convolutions_on_a_mesh_of_two_axes(world):
    check_random(world, 5, 100)


# ---------------------------------------------------------------------- bytes


def rows_read(outputs, stride, padding, dilation, kernel, rows):
    """The rows of the input that these outputs read, by the definition of convolution."""
    places = {o * stride - padding + j * dilation for o in range(*outputs) for j in range(kernel)}
    return {row for row in places if 0 <= row < rows}


def elements_to_fetch(x, y, arguments, kernel):
    """How many elements there are in the rows that this rank reads and does not own; corners belong to rows of both sharded dims."""
    first = x.ndim - len(kernel)
    read, owned = 1, 1
    for dim, (start, stop) in enumerate(x._spec.box()):
        rows = set(range(start, stop))
        wanted = rows
        if Shard(dim) in x.placements:
            i = dim - first
            window = (arguments[name][i] for name in ("stride", "padding", "dilation"))
            wanted = rows_read(y._spec.box()[dim], *window, kernel[i], x.shape[dim])
        read *= len(wanted)
        owned *= len(wanted & rows)
    return read - owned


def check_bytes(world, seed, count, axes_per_dim):
    rng = random.Random(seed)
    exchanged = 0
    for _ in range(count):
        n, shape, kernel, _, arguments = random_convolution(rng)
        if isinstance(arguments["padding"], str):
            continue
        if axes_per_dim > 1:
            arguments["dilation"] = [1] * n
            arguments["stride"] = [1] * n
        x = random_split(rng, world.mesh, world.randn(*shape), dims=range(len(shape) - n, len(shape)))
        with torch.no_grad(), count_communication() as sent:
            y = CONVOLUTIONS[n](x, world.randn(*kernel), **arguments)
        wanted = torch.tensor([elements_to_fetch(x, y, arguments, kernel[2:]) * 8, sent.bytes])
        sharded = len({p.dim for p in x.placements if isinstance(p, Shard)})
        assert sent.calls <= sharded
        dist.all_reduce(wanted)
        assert wanted[0] == wanted[1], (x._spec.describe(), kernel, arguments)
        exchanged += wanted[1].item()
    assert exchanged > 0


@ranks(3)
def test_bytes_exchanged_are_the_rows_read_and_not_owned(world):
    check_bytes(world, 7, 100, 1)


@ranks(4, mesh={"a": 2, "b": 2})
def test_bytes_exchanged_with_two_sharded_dims_are_those_of_the_box(world):
    check_bytes(world, 8, 60, 2)


@ranks(3)
def test_backward_sends_the_halos_back_once(world):
    x = shard(world.randn(2, 3, 12, 5), world.mesh, dim=2).requires_grad_()
    weight = world.randn(4, 3, 5, 3).requires_grad_()
    with count_communication() as sent:
        F.conv2d(x, weight, padding=2).sum().backward()
    (forward,) = sent.only(collective="exchange", direction="forward").records
    (backward,) = sent.only(collective="exchange", direction="backward").records
    assert forward.calls == backward.calls == 1
    total = torch.tensor([forward.bytes, backward.bytes])
    dist.all_reduce(total)
    assert total[0] == total[1] == 4 * 2 * 2 * 3 * 5 * 8  # two rows across each of two borders in both directions


@ranks(3)
def test_batch_shards_exchange_nothing(world):
    x = shard(world.randn(5, 3, 9, 8), world.mesh, dim=0, sizes=(2, 0, 3)).requires_grad_()
    with count_communication() as sent:
        y = F.conv2d(x, world.randn(4, 3, 3, 3), padding=1)
        torch.autograd.grad(y, x, torch.ones_like(y))
    assert sent.calls == 0
    assert y._spec.sizes == ((2, 0, 3), None, None, None)


# ---------------------------------------------------------------------- worked cases


class Stem(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 8, 7, stride=2, padding=3, dtype=torch.float64)


@ranks(3)
def test_strided_stem_on_75_75_74_rows(world):
    x = shard(world.randn(1, 3, 224, 16), world.mesh, dim=2, sizes=(75, 75, 74))
    stem = world.same(Stem)
    assert stem(x).shape == (1, 8, 112, 8)
    assert_same_as_unsharded(stem, x)


@ranks(3)
def test_strided_stem_split_over_the_batch_exchanges_nothing(world):
    x = shard(world.randn(4, 3, 32, 16), world.mesh, dim=0)
    stem = world.same(Stem)
    assert_same_as_unsharded(stem, x)
    with count_communication() as sent:
        stem(x)
    assert sent.bytes == 0


@ranks(2)
def test_patch_embedding_keeps_the_split_of_its_width(world):
    x = shard(world.randn(1, 3, 8, 16), world.mesh, dim=3).requires_grad_()
    patches = world.same(lambda: nn.Conv2d(3, 6, 4, stride=4, dtype=torch.float64))
    with count_communication() as sent:
        y = patches(x)
    assert sent.calls == 0
    y.sum().backward()
    patches.zero_grad()
    assert x.grad.placements == (Shard(3),)
    assert x.grad._spec.sizes[3] == (8, 8)
    assert_same_as_unsharded(patches, x)


@pytest.mark.parametrize("axis", ["domain", "ddp"])
@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_groups_of_a_mesh_do_not_mix(world, axis):
    mesh = world.mesh[axis]
    other = world.mesh.get_local_rank("ddp" if axis == "domain" else "domain")
    row = torch.arange(8.0).reshape(1, 1, 8) + 100 * other
    y = F.conv1d(shard(row, mesh, dim=2), torch.ones(1, 1, 3), padding=1)
    expected = [[1, 3, 6, 9, 12, 15, 18, 13], [201, 303, 306, 309, 312, 315, 318, 213]][other]
    assert y.full_tensor().flatten().tolist() == expected


# ---------------------------------------------------------------------- layouts


@ranks(3)
def test_padding_before_a_convolution_does_not_move_the_split(world):
    x = shard(world.randn(1, 2, 12), world.mesh, dim=2)
    weight = world.randn(2, 2, 5)
    for pads in ((4, 0), (0, 4), (2, 2)):
        y = x
        for _ in range(4):
            y = F.conv1d(F.pad(y, pads), weight)
        assert y._spec.sizes[2] == (4, 4, 4)
    strided = F.conv1d(F.pad(x, (3, 0)), weight, stride=2)
    assert strided._spec.sizes[2] == (2, 2, 2)
    assert_same_as_unsharded(lambda x, w: F.conv1d(F.pad(x, (4, 0), mode="replicate"), w), x, weight)


@ranks(4, mesh={"a": 2, "b": 2})
def test_corners_come_right_and_both_axes_on_one_dim(world):
    weight = world.randn(3, 2, 3, 5)
    x = world.randn(2, 2, 9, 8)
    for placements in ((Shard(2), Shard(3)), (Shard(3), Shard(2)), (Shard(2), Shard(2)), (Shard(0), Shard(2)), (Replicate(), Shard(2))):
        split = shard(x, world.mesh, placements=placements)
        assert F.conv2d(split, weight, padding=(1, 2)).placements == placements
        assert_same_as_unsharded(F.conv2d, split, weight, kwargs={"padding": (1, 2)})
    pending = shard(x, world.mesh, placements=(Partial(), Shard(2)))
    assert_same_as_unsharded(F.conv2d, pending, weight, kwargs={"padding": (1, 2)})


@ranks(3)
def test_channel_shards(world):
    x, bias = world.randn(2, 6, 7), world.randn(6)
    for groups, sizes in ((1, (3, 0, 3)), (1, (2, 2, 2)), (3, (1, 3, 2)), (3, (2, 2, 2)), (6, (0, 5, 1))):
        split = shard(x, world.mesh, dim=1, sizes=sizes)
        weight = world.randn(6, 6 // groups, 3)
        y = F.conv1d(split, weight, bias, padding=1, groups=groups)
        assert y.placements == ((Partial(),) if groups == 1 else (Shard(1),))
        assert_same_as_unsharded(F.conv1d, split, weight, bias, kwargs={"padding": 1, "groups": groups})


@ranks(4)
def test_depthwise_convolution_of_sharded_channels_exchanges_nothing(world):
    x = shard(world.randn(2, 8, 7, 6), world.mesh, dim=1)
    with count_communication() as sent:
        y = F.conv2d(x, world.randn(8, 1, 3, 3), padding="same", groups=8)
    assert sent.calls == 0
    assert y._spec.sizes[1] == (2, 2, 2, 2)


@ranks(3)
def test_sharded_weights(world):
    x, weight, bias = world.randn(2, 3, 9), world.randn(6, 3, 3), world.randn(6)
    split = shard(x, world.mesh, dim=2, sizes=(4, 1, 4))
    for dim in (0, 1, 2):
        kernel = shard(weight, world.mesh, dim=dim)
        assert_same_as_unsharded(F.conv1d, split, kernel, shard(bias, world.mesh, dim=0), kwargs={"padding": 2})
        assert_same_as_unsharded(F.conv1d, x, kernel, bias)


@ranks(3)
def test_shards_narrower_than_the_halo_and_ranks_without_output(world):
    for sizes in ((1, 1, 10), (0, 12, 0), (5, 0, 7), (0, 0, 12), (11, 1, 0)):
        x = shard(world.randn(2, 2, 12), world.mesh, dim=2, sizes=sizes)
        assert_same_as_unsharded(F.conv1d, x, world.randn(3, 2, 9), world.randn(3), kwargs={"padding": 4})
        assert_same_as_unsharded(F.conv1d, x, world.randn(3, 2, 9), kwargs={"stride": 7, "dilation": 1, "padding": 1})


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@ranks(3)
def test_padding_modes_of_the_module(world, mode):
    module = world.same(lambda: nn.Conv2d(2, 3, (3, 4), padding="same", padding_mode=mode, dtype=torch.float64))
    assert_same_as_unsharded(module, shard(world.randn(2, 2, 8, 9), world.mesh, dim=2, sizes=(1, 4, 3)), step=True)


@ranks(2)
def test_second_derivatives(world):
    plain = world.randn(1, 2, 9)
    weight = world.randn(2, 2, 3).requires_grad_()
    gradients = []
    for x in (plain.requires_grad_(), shard(plain, world.mesh, dim=2, sizes=(6, 3)).requires_grad_()):
        y = F.conv1d(x, weight, padding=1, stride=2)
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        second = torch.autograd.grad((first**2).sum(), (x, weight))
        gradients.append([g.full_tensor() if isinstance(g, ShardTensor) else g for g in second])
    for ours, theirs in zip(*gradients):
        assert torch.allclose(ours, theirs, atol=1e-10, rtol=1e-10)


@ranks(4, mesh={"a": 2, "b": 2})
def test_second_derivatives_with_two_sharded_dims_and_a_rank_without_output(world):
    plain, weight = world.randn(2, 2, 7, 6), world.randn(2, 2, 3, 3).requires_grad_()
    for sizes in ({2: (4, 3), 3: (1, 5)}, {2: (7, 0), 3: (5, 1)}):
        gradients = []
        for x in (plain.requires_grad_(), shard(plain, world.mesh, placements=(Shard(2), Shard(3)), sizes=sizes).requires_grad_()):
            y = F.conv2d(x, weight, padding=1)
            (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
            second = torch.autograd.grad((first**2).sum(), (x, weight))
            gradients.append([g.full_tensor() if isinstance(g, ShardTensor) else g for g in second])
        for ours, theirs in zip(*gradients):
            assert torch.allclose(ours, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("pool", [False, True], ids=["conv", "pool"])
@ranks(2)
def test_what_is_kept_for_backward_is_the_rows_and_the_halo(world, pool):
    x = shard(world.randn(1, 4, 64, 32), world.mesh, dim=2).requires_grad_()
    weight = world.randn(4, 4, 3, 3)
    with measure_saved_bytes([weight]) as saved:
        y = F.max_pool2d(x.relu(), 3, stride=1, padding=1) if pool else F.conv2d(x.relu(), weight, padding=1)
    rows = 4 * 32 * 8
    assert saved.peak == (64 * rows if pool else 34 * rows)  # of the pool the places, as large as its output
    y.sum().backward()


@ranks(3, processes=True)
def test_gloo_processes(world):
    """Backward runs in a thread of its own there, and a rank that waits for another hangs."""
    x = shard(world.randn(2, 3, 13, 6), world.mesh, dim=2, sizes=(9, 1, 3))
    net = world.same(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.ConvTranspose2d(4, 2, 4, 2, 1), nn.AdaptiveAvgPool2d((5, 1))
        ).double()
    )
    assert_same_as_unsharded(net, x, step=True)


@ranks(2)
def test_channels_last_and_autocast(world):
    x = shard(world.randn(2, 4, 8, 6, dtype=torch.float32), world.mesh, dim=2)
    x._local_tensor = x._local_tensor.contiguous(memory_format=torch.channels_last)
    weight = world.randn(3, 4, 3, 3, dtype=torch.float32)
    assert_same_as_unsharded(F.conv2d, x, weight, kwargs={"padding": 1})
    with torch.autocast("cpu", torch.bfloat16):
        y = F.conv2d(x, weight, padding=1)
    assert y.dtype is y._local_tensor.dtype is torch.bfloat16


@ranks(2)
def test_complex_numbers_and_activation_checkpoints(world):
    def numbers(*shape):
        return torch.complex(world.randn(*shape), world.randn(*shape))

    x = shard(numbers(1, 2, 9, 6), world.mesh, dim=2)
    assert_same_as_unsharded(F.conv2d, x, numbers(3, 2, 3, 3), kwargs={"padding": 1})
    assert_same_as_unsharded(F.conv_transpose2d, x, numbers(2, 3, 3, 3))

    def recomputed(x, weight):
        return checkpoint(lambda x, w: F.max_pool2d(F.conv2d(x, w, padding=1).relu(), 3, 1, 1), x, weight, use_reentrant=False)

    assert_same_as_unsharded(recomputed, shard(world.randn(1, 2, 9, 6), world.mesh, dim=2), world.randn(3, 2, 3, 3))


@ranks(3)
def test_bad_arguments_raise_what_torch_raises(world):
    x = shard(world.randn(2, 3, 9), world.mesh, dim=2)
    for weight, arguments in ((world.randn(4, 2, 3), {}), (world.randn(4, 3, 12), {}), (world.randn(4, 3, 3), {"stride": 0})):
        with pytest.raises(RuntimeError) as ours:
            F.conv1d(x, weight, **arguments)
        with pytest.raises(RuntimeError) as theirs:
            F.conv1d(x.full_tensor(), weight, **arguments)
        assert str(ours.value) == str(theirs.value)


def test_cases_are_not_all_alike():
    drawn = [random_convolution(random.Random(seed)) for seed in range(200)]
    assert {n for n, *_ in drawn} == {1, 2, 3}
    assert any(math.prod(shape) > 1000 for _, shape, *_ in drawn)

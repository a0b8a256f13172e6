"""Random numbers: the same whatever the split, agreed by all ranks, repeated by checkpoints, and of the right distribution."""

import functools
import math
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from shardwise import ShardTensor, fallback, parallelize, random, scatter_tensor
from shardwise.testing import count_communication, ranks, shard
from shardwise.testing.threads import run_in_threads
from shardwise.testing.world import World

WORLDS = [
    (1, None, (Replicate(),), None),
    (2, None, (Shard(0),), None),
    (2, None, (Shard(1),), {1: (31, 1)}),
    (3, None, (Shard(0),), {0: (0, 30, 2)}),
    (4, None, (Shard(0),), None),
    (4, None, (Shard(1),), None),
    (4, {"a": 2, "b": 2}, (Shard(1), Shard(0)), None),
    (4, {"a": 2, "b": 2}, (Replicate(), Shard(0)), None),
    (2, None, (Partial(),), None),
]

DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout2d": lambda x: F.dropout2d(x.unsqueeze(-1), 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 1000),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "normal of tensors": lambda x: torch.normal(x, torch.full_like(x, 2.0)),
    "xavier": lambda x: nn.init.xavier_uniform_(torch.empty_like(x)),
    "kaiming": lambda x: nn.init.kaiming_normal_(torch.empty_like(x)),
    "trunc_normal": lambda x: nn.init.trunc_normal_(torch.empty_like(x), std=0.02),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "multinomial": lambda x: torch.multinomial(x.exp(), 3),
    "poisson": lambda x: torch.poisson(x.exp()),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 9.0), x.sigmoid()),
    "random_": lambda x: torch.empty_like(x, dtype=torch.int32).random_(),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


def drawn(draw, size, axes, placements, sizes):
    """The whole result on every rank of a fresh world; the same seed for each world."""

    def rank_function(rank):
        world = World(device=torch.device("cpu"), axes=axes)
        x = shard(world.randn(32, 32, seed=5), world.mesh, placements=placements, sizes=sizes)
        return [draw(x).full_tensor(), draw(x).full_tensor()]

    return run_in_threads(size, rank_function, 30)


@pytest.mark.filterwarnings("ignore:.*has no sharded form")
@pytest.mark.parametrize("name", DRAWS)
def test_numbers_do_not_depend_on_the_split(name):
    (one,) = drawn(DRAWS[name], *WORLDS[0])
    assert not torch.equal(*one)
    for world in WORLDS[1:]:
        for first, second in drawn(DRAWS[name], *world):
            torch.testing.assert_close(first, one[0], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(second, one[1], rtol=1e-12, atol=1e-12)


def test_dropout_of_1024_elements_has_one_mask_on_one_two_and_four_ranks_along_either_dim():
    def mask(size, dim):
        def rank_function(rank):
            world = World(device=torch.device("cpu"))
            x = shard(torch.ones(32, 32), world.mesh, dim=dim)
            return F.dropout(x, 0.5).full_tensor() != 0

        return run_in_threads(size, rank_function, 30)

    (expected,) = mask(1, 0)
    assert 400 < expected.sum() < 624
    for size, dim in [(2, 0), (2, 1), (4, 0), (4, 1)]:
        for found in mask(size, dim):
            assert torch.equal(found, expected)


@ranks(4, mesh={"a": 2, "b": 2})
def test_replicated_ranks_agree_and_shards_differ(world):
    x = shard(torch.ones(64, 16), world.mesh, placements=(Replicate(), Shard(0)))
    y = F.dropout(x, 0.5)
    halves = (y != 0).full_tensor().split(32)
    assert 0.3 < (halves[0] == halves[1]).float().mean() < 0.7
    everyone = shard(torch.ones(64, 16), world.mesh, placements=(Replicate(), Replicate()))
    masks = [torch.empty_like(everyone.to_local()) for _ in range(4)]
    torch.distributed.all_gather(masks, F.dropout(everyone, 0.5).to_local())
    assert all(torch.equal(mask, masks[0]) for mask in masks)


@ranks(3)
def test_dropout_sends_nothing_and_keeps_only_a_mask(world):
    x = shard(world.randn(30, 8), world.mesh, dim=0).requires_grad_()
    with count_communication() as counted, fallback("error"):
        y = F.dropout(x, 0.4)
        y.backward(torch.ones_like(y))
    assert counted.calls == 0
    kept = y.full_tensor() != 0
    torch.testing.assert_close(y.full_tensor(), torch.where(kept, x.full_tensor() / 0.6, 0))
    torch.testing.assert_close(x.grad.full_tensor(), kept.double() / 0.6)


@ranks(2)
def test_channel_dropout_drops_whole_channels(world):
    x = shard(torch.ones(8, 16, 6), world.mesh, dim=2, sizes=(5, 1))
    for dropped in (F.dropout1d(x, 0.5), F.dropout2d(x.unsqueeze(-1), 0.5), F.dropout3d(x[..., None, None], 0.5)):
        whole = dropped.full_tensor().reshape(8, 16, 6)
        assert ((whole == 0).all(2) | (whole == 2).all(2)).all()
        assert 0.2 < (whole == 0).float().mean() < 0.8
    single = F.dropout1d(x[0], 0.5).full_tensor()
    assert ((single == 0).all(1) | (single == 2).all(1)).all()


@ranks(2)
def test_distributions(world):
    like = shard(torch.empty(200_000, dtype=torch.float64), world.mesh, dim=0)
    expected = {  # mean, variance
        "uniform": (torch.rand_like(like), 1 / 2, 1 / 12),
        "normal": (torch.randn_like(like), 0, 1),
        "uniform between": (torch.empty_like(like).uniform_(2, 5), 3.5, 9 / 12),
        "bernoulli": (torch.bernoulli(like, 0.2), 0.2, 0.16),
        "exponential": (torch.empty_like(like).exponential_(4), 1 / 4, 1 / 16),
        "geometric": (torch.empty_like(like).geometric_(0.25), 4, 12),
        "log-normal": (torch.empty_like(like).log_normal_(0, 0.5), math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25)),
        "integers": (torch.randint_like(like, 10), 4.5, 8.25),
        "complex": (torch.randn_like(like, dtype=torch.complex128), 0, 1),
    }
    for name, (x, mean, variance) in expected.items():
        deviation = math.sqrt(variance / 200_000)
        assert abs(x.mean().item() - mean) < 5 * deviation, name
        assert x.var().item() == pytest.approx(variance, rel=0.03), name
    assert torch.rand_like(like).amax().item() < 1
    normal = torch.randn_like(like)
    assert (normal**4).mean().item() == pytest.approx(3, rel=0.05)
    assert torch.empty_like(like).cauchy_().abs().full_tensor().median().item() == pytest.approx(1, rel=0.03)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert torch.rand_like(like, dtype=dtype).amax().item() < 1


def test_bits_are_balanced_and_keys_are_independent():
    shape = (1 << 16,)
    first, second = (random.random_bits(torch.tensor(key), ((0, shape[0]),), shape) for key in (7, 8))
    for bit in range(64):
        for bits in (first, first ^ second, first ^ first.roll(1)):
            share = ((bits >> bit) & 1).double().mean().item()
            assert abs(share - 0.5) < 5 * 0.5 / 256, bit
    assert first.unique().numel() == shape[0]


@ranks(2, processes=True)
def test_ranks_seeded_differently_agree(world):
    torch.manual_seed(world.rank)
    x = shard(torch.ones(64, 4), world.mesh, placements=(Replicate(),))
    for _ in range(3):
        mine = F.dropout(x, 0.5).to_local()
        both = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(both, mine)
        assert torch.equal(*both)


@ranks(2, processes=True)
def test_a_seed_starts_the_numbers_again(world):
    x = shard(torch.ones(64, 4), world.mesh, dim=0)
    results = []
    for _ in range(2):
        torch.manual_seed(11)
        results.append((F.dropout(x, 0.5).full_tensor(), torch.randn_like(x).full_tensor()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    state = torch.get_rng_state()
    first = F.dropout(x, 0.5).full_tensor()
    torch.set_rng_state(state)
    assert torch.equal(first, F.dropout(x, 0.5).full_tensor())


@pytest.mark.parametrize("reentrant", [False, True])
@ranks(2, processes=True)
def test_activation_checkpoints_repeat_the_masks(world, reentrant):
    block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5)).double()
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(world.randn(*p.shape))
    gradients = []
    random.synchronize(world.mesh)
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        x = shard(world.randn(10, 6, seed=1), world.mesh, dim=0).requires_grad_()
        run(x).sum().backward()
        gradients.append(x.grad.full_tensor())
    torch.testing.assert_close(gradients[0], gradients[1])


@ranks(2, processes=True)
def test_a_rank_that_draws_alone_is_found_out_on_all_ranks(world):
    x = shard(torch.ones(8), world.mesh, dim=0)
    F.dropout(x, 0.5)
    if world.rank == 1:
        torch.rand(1)
    with pytest.raises(RuntimeError, match=r"synchronize\(mesh\)"):
        for _ in range(random.COMPARE_EVERY):
            F.dropout(x, 0.5)
    random.synchronize(world.mesh)
    for _ in range(random.COMPARE_EVERY):
        F.dropout(x, 0.5)


@ranks(2, processes=True)
def test_a_data_loader_on_the_source_alone_does_no_harm(world):
    for _ in range(2):
        batch = None
        if world.rank == 0:
            (batch,) = torch.utils.data.DataLoader([torch.ones(64, 4)], batch_size=None, shuffle=True)
        x = scatter_tensor(batch, 0, world.mesh, (Shard(0),))
        for _ in range(5):
            F.dropout(x, 0.5)
    everyone = shard(torch.ones(64), world.mesh, placements=(Replicate(),))
    mine = F.dropout(everyone, 0.5).to_local()
    both = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(both, mine)
    assert torch.equal(*both)


@ranks(2)
def test_generators_given_by_the_user_are_followed(world):
    x = shard(torch.empty(32), world.mesh, dim=0)
    first = x.clone().normal_(generator=torch.Generator().manual_seed(1)).full_tensor()
    second = x.clone().normal_(generator=torch.Generator().manual_seed(1)).full_tensor()
    third = x.clone().normal_(generator=torch.Generator().manual_seed(2)).full_tensor()
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@ranks(2)
def test_wrong_arguments_are_refused_on_all_ranks(world):
    x = shard(torch.zeros(4), world.mesh, dim=0, sizes=(4, 0))
    assert isinstance(x, ShardTensor)
    for call, error in [
        (lambda: F.dropout(x, 1.5), "between 0 and 1"),
        (lambda: x.normal_(0, -1), "std"),
        (lambda: x.bernoulli_(2.0), "p"),
        (lambda: torch.randint_like(x, 5, 5), "from"),
    ]:
        with pytest.raises((RuntimeError, ValueError), match=error):
            call()


@ranks(4, processes=True)
def test_slices_of_a_mesh_taken_anew_share_one_state(world):
    """Agreed once, whatever the mesh object: ranks are seeded differently, and only the first op sends the state."""
    torch.manual_seed(world.rank)
    mesh = world.make_mesh((2, 2), ("ddp", "domain"))
    calls = []
    for _ in range(4):
        x = shard(torch.ones(64, 4), mesh["domain"], dim=0)
        with count_broadcasts() as sent:
            mask = F.dropout(x, 0.5)
        calls.append(len(sent))
        assert_equal_over(mesh["domain"], mask.full_tensor())
    assert calls == [1, 0, 0, 0]
    everyone = F.dropout(shard(torch.ones(64, 4), mesh, placements=(Replicate(), Shard(0))), 0.5)
    assert_equal_over(mesh["domain"], everyone.full_tensor())


@ranks(2, processes=True)
def test_a_wrapped_model_has_agreed_before_compiled_or_recomputed_code_draws(world):
    """The first random op lies in an activation checkpoint, or in compiled code: neither could send the state."""
    torch.manual_seed(world.rank)
    mesh = world.make_mesh((1, 2), ("ddp", "domain"))
    for wrap in (
        lambda block: functools.partial(checkpoint, block, use_reentrant=False),
        lambda block: torch.compile(block, backend="aot_eager", dynamic=False),
    ):
        block = parallelize(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), mesh)
        x = shard(torch.ones(64, 4), mesh["domain"], placements=(Replicate(),))
        out = wrap(block)(x)
        assert_equal_over(mesh["domain"], out.to_local().detach())
        out.sum().backward()
        assert_equal_over(mesh["domain"], block[0].weight.grad)


@contextmanager
def count_broadcasts():
    """Broadcasts of plain torch, which the counter of communication does not see."""
    calls, broadcast = [], torch.distributed.broadcast

    def counted(*args, **kwargs):
        calls.append(args)
        return broadcast(*args, **kwargs)

    torch.distributed.broadcast = counted
    try:
        yield calls
    finally:
        torch.distributed.broadcast = broadcast


def assert_equal_over(mesh, mine):
    everyone = [torch.empty_like(mine) for _ in range(mesh.size())]
    torch.distributed.all_gather(everyone, mine.contiguous(), group=mesh.get_group())
    assert all(torch.equal(other, mine) for other in everyone)

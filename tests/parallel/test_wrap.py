"""One model, one loop, every combination of axes and wrappers: the same training as in one process."""

import functools

import pytest
import torch
import torch.nn.functional as F
from tests.parallel.training import LAYOUTS, Setup, build, data, full, furthest, train_alone, train_split
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardwise import DistributedManager, parallelize
from shardwise.errors import InputError
from shardwise.testing import ranks, shard

STEPS = 20
TOLERANCE = 1e-6
SMOKE = (
    *LAYOUTS,
    Setup(ddp=1, domain=4, accumulate=4),
    Setup(ddp=2, domain=2, accumulate=4),
    Setup(ddp=2, domain=2, fsdp=True, accumulate=2),
    Setup(ddp=2, domain=2, fsdp=True, spatial="auto", accumulate=2),
)
COMPILED = (  # `python -m benchmarks.smoke_matrix` compiles every setup, with accumulation too
    Setup(ddp=4, domain=1, compiled="aot_eager"),
    Setup(ddp=1, domain=4, compiled="aot_eager", accumulate=4),
    Setup(ddp=2, domain=2, compiled="aot_eager"),
    Setup(ddp=1, domain=4, fsdp=True, compiled="aot_eager"),
    Setup(ddp=2, domain=2, fsdp=True, compiled="aot_eager"),
    Setup(ddp=2, domain=2, fsdp=True, spatial="auto", compiled="aot_eager"),
)


def _compare(world, setups, dtype, steps, tolerance):
    reference = train_alone(dtype, steps)
    problems = []
    for setup in setups:
        mesh = world.make_mesh((setup.ddp, setup.domain), ("ddp", "domain"))
        far = furthest(train_split(setup, mesh, dtype, steps), reference)
        problems += [f"{setup}: {name} differ by {value:.2e}" for name, value in far.items() if not value <= tolerance]
    assert problems == []


@ranks(4, processes=True, timeout=300)
def test_training_equals_one_process(world):
    _compare(world, SMOKE, torch.float32, STEPS, TOLERANCE)


@ranks(4, processes=True, timeout=300)
def test_compiled_training_equals_one_process(world):
    _compare(world, COMPILED, torch.float32, 5, TOLERANCE)
    reference = train_alone(torch.float32, 5)
    assert all(far <= TOLERANCE for far in furthest(train_alone(torch.float32, 5, "aot_eager", 4), reference).values())


@ranks(4, processes=True, timeout=120)
def test_what_else_a_wrapped_model_does(world):
    """Inference without a wrapper; activation checkpointing and dropout under DDP; bf16 under FSDP2."""
    dtype = torch.float64
    x, y = data(dtype)
    alone = build(dtype)
    mesh = world.make_mesh((1, 4), ("ddp", "domain"))
    expected = alone(x).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = parallelize(build(dtype), mesh)(shard(x, mesh["domain"], dim=2))
            torch.testing.assert_close(full(out), expected, rtol=1e-10, atol=1e-10)

    mesh = world.make_mesh((2, 2), ("ddp", "domain"))
    mine = slice(*(len(x) // 2 * (mesh.get_local_rank("ddp") + i) for i in range(2)))
    xs, ys = shard(x[mine], mesh["domain"], dim=2), y[mine]

    F.mse_loss(alone(x), y).backward()
    recomputed = build(dtype)
    for block in recomputed.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    wrapped = parallelize(recomputed, mesh)
    F.mse_loss(wrapped(xs), ys).backward()
    for mine_, theirs in zip(recomputed.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine_.grad, theirs.grad, rtol=1e-9, atol=1e-12)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    low = parallelize(build(torch.float32), mesh, fsdp=True, mp_policy=policy)
    F.mse_loss(low(xs.bfloat16()), ys.float()).backward()
    for mine_, theirs in zip(low.parameters(), alone.parameters(), strict=True):
        assert mine_.grad.dtype == torch.float32
        assert (full(mine_.grad) - theirs.grad).norm() <= 0.05 * theirs.grad.norm() + 1e-3


@ranks(4, processes=True, timeout=120)
def test_dropout_in_a_wrapped_model_is_that_of_any_other_split(world):
    gradients = []
    for domain in (1, 2, 4):
        mesh = world.make_mesh((4 // domain, domain), ("ddp", "domain"))
        model = parallelize(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).double(), mesh)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(world.randn(*p.shape, seed=4))
        torch.manual_seed(11)
        x = shard(world.randn(64, 16, 8, seed=5), mesh["domain"], dim=domain % 2)
        out = model(x)
        out.square().mean().backward()
        gradients.append([out.full_tensor() == 0, *(p.grad for p in model.parameters())])
    for other in gradients[1:]:
        for mine, theirs in zip(other, gradients[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    assert 0.4 < float(gradients[0][0].double().mean()) < 0.6


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_what_cannot_be_wrapped_is_refused_with_every_reason(world):
    with pytest.raises(InputError, match="multiply to 6, the world has 4 ranks"):
        DistributedManager().initialize_mesh((2, 3), ["ddp", "domain"])
    with pytest.raises(InputError, match=r"axes without names"):
        parallelize(build(torch.float32), init_device_mesh("cpu", (4,)))
    with pytest.raises(InputError, match=r"axes without names"):
        parallelize(build(torch.float32), init_device_mesh("cpu", (2, 2)), fsdp=True)
    with pytest.raises(InputError, match=r"\('rows', 'cols'\)"):
        parallelize(build(torch.float32), world.make_mesh((2, 2), ("rows", "cols")))
    with pytest.raises(InputError, match="without fsdp=True") as error:
        parallelize(build(torch.float32), world.mesh, spatial_params={"nowhere": 0, "pos_embed": 5})
    assert "'nowhere', which is not a parameter" in str(error.value)
    assert "dim 5 of 'pos_embed', whose shape is (1, 60, 8)" in str(error.value)
    with pytest.raises(InputError, match="already wrapped"):
        parallelize(nn.Sequential(DistributedDataParallel(build(torch.float32))), world.mesh)


@ranks(2, processes=True)
def test_fsdp1_is_refused_with_the_reason(world):
    mesh = world.make_mesh((1, 2), ("ddp", "domain"))
    old = FullyShardedDataParallel(build(torch.float32), device_id=torch.device("cpu"))
    for model in (old, nn.Sequential(old)):
        with pytest.raises(InputError, match=r"FSDP1.*it flattens parameters.*fsdp=True, which uses FSDP2") as error:
            parallelize(model, mesh, fsdp=True)
        assert "already wrapped" not in str(error.value)


@ranks(4, processes=True, timeout=120)
def test_inference_before_and_after_a_training_step(world):
    """In inference mode too FSDP2 must gather into memory that training can use later, and from a data axis of one rank."""
    x, y = data(torch.float64)
    expected = build(torch.float64)(x).detach()
    for setup in (Setup(ddp=1, domain=4, fsdp=True), Setup(ddp=2, domain=2, fsdp=True), Setup(ddp=2, domain=2, fsdp=True, spatial="auto")):
        mesh = world.make_mesh((setup.ddp, setup.domain), ("ddp", "domain"))
        model = parallelize(build(torch.float64), mesh, fsdp=True, spatial_params=setup.spatial)
        xs, ys, theirs = (part.chunk(setup.ddp)[mesh.get_local_rank("ddp")] for part in (x, y, expected))
        xs = shard(xs, mesh["domain"], dim=2)
        for _ in range(2):
            with torch.inference_mode():
                torch.testing.assert_close(full(model(xs)), theirs, rtol=1e-10, atol=1e-10)
            F.mse_loss(model(xs), ys).backward()


@ranks(4, processes=True, timeout=120)
def test_first_step_of_a_fresh_wrapper_rounds_like_any_later_step(world):
    """The same batch, weights and layout: the same bits, whether the wrapper has run before or not."""
    mesh = world.make_mesh((4, 1), ("ddp", "domain"))
    model = parallelize(build(torch.float32), mesh)
    x, y = data(torch.float32)
    gradients = []
    for _ in range(3):
        F.mse_loss(model(x[world.rank, None]), y[world.rank, None]).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    for later in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], later, strict=True))


@ranks(2, processes=True)
def test_wrapping_leaves_gradients_that_exist(world):
    model = build(torch.float32)
    for p in model.parameters():
        p.grad = torch.full_like(p, float(world.rank))
    wrapped = parallelize(model, world.make_mesh((2, 1), ("ddp", "domain")))
    assert all(torch.equal(p.grad, torch.full_like(p, float(world.rank))) for p in wrapped.parameters())

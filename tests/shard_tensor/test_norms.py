"""Norms: what they communicate, running buffers, second derivatives, and digits kept under large offsets."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardwise import MissingShardPatch, ShardTensor, fallback
from shardwise.testing import assert_same_as_unsharded, count_communication, measure_saved_bytes, ranks, shard

ROWS = (5, 0, 3)


@ranks(3)
def test_norms_of_whole_rows_send_nothing_forward(world):
    image = shard(world.randn(8, 6, 4, 5), world.mesh, dim=0, sizes=ROWS)
    tokens = shard(world.randn(2, 8, 6), world.mesh, dim=1, sizes=ROWS)
    norms = [
        (nn.LayerNorm(6).double(), tokens),
        (nn.RMSNorm(6).double(), tokens),
        (nn.GroupNorm(3, 6).double(), image),
        (nn.InstanceNorm2d(6, affine=True).double(), image),
        (nn.BatchNorm2d(6).double().eval(), image),
        (nn.LocalResponseNorm(3), image),
    ]
    for norm, x in norms:
        with count_communication() as counted, fallback("error"):
            y = norm(x)
        assert counted.calls == 0, norm
        assert y.placements == x.placements
        assert y._spec.sizes == x._spec.sizes


@ranks(3)
def test_norms_over_shards_send_statistics_only(world):
    x = shard(world.randn(2, 6, 8, 5), world.mesh, dim=2, sizes=ROWS).requires_grad_()
    groups = 2 * 3
    for norm, statistics in [(nn.GroupNorm(3, 6, affine=False), groups), (nn.BatchNorm2d(6, affine=False), 6)]:
        norm.double()
        with fallback("error"):
            with count_communication() as forward:
                y = norm(x)
            with count_communication() as backward:
                y.backward(torch.ones_like(y))
        assert (forward.calls, backward.calls) == (2, 1)
        assert forward.bytes == backward.bytes == 2 * (2 * 2 * statistics * 8 // 3)


NORMS = [
    (lambda: nn.GroupNorm(2, 4), (2, 4, 8), 2),
    (lambda: nn.GroupNorm(2, 4), (2, 4, 8), 1),
    (lambda: nn.BatchNorm1d(4), (8, 4, 3), 0),
    (lambda: nn.BatchNorm1d(8), (3, 8), 1),
    (lambda: nn.BatchNorm2d(4, momentum=None), (3, 4, 8, 2), 2),
    (lambda: nn.BatchNorm3d(2, affine=False), (2, 2, 8, 2, 2), 2),
    (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (2, 4, 8), 2),
    (lambda: nn.InstanceNorm2d(4), (8, 4, 3, 2), 0),
    (lambda: nn.LayerNorm(5), (8, 5), 0),
    (lambda: nn.LayerNorm(8), (5, 8), 1),
    (lambda: nn.RMSNorm(8), (5, 8), 1),
    (lambda: nn.RMSNorm((8, 2)), (5, 8, 2), 1),
    (lambda: nn.LocalResponseNorm(3), (2, 8, 3, 3), 1),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (8, 4), 0),
    (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), (8, 4), 0),
]


@pytest.mark.parametrize("number", range(len(NORMS)))
@ranks(3)
def test_modules_equal_one_process_after_a_step(world, number):
    build, shape, dim = NORMS[number]
    module = world.same(lambda: build().double())
    with torch.no_grad():
        for p in module.parameters():
            p.add_(world.randn(*p.shape) * 0.3)
    x = shard(world.randn(*shape), world.mesh, dim=dim, sizes=ROWS if shape[dim] == 8 else None).requires_grad_()
    assert_same_as_unsharded(module, x, step=any(True for _ in module.parameters()))


@ranks(4, mesh={"a": 2, "b": 2})
def test_several_sharded_dims(world):
    whole = world.randn(3, 4, 7, 5)
    weights = world.randn(4), world.randn(4)
    for placements in [(Shard(2), Shard(3)), (Shard(3), Shard(2)), (Shard(2), Shard(2)), (Shard(0), Shard(2)), (Replicate(), Shard(2)),
                       (Shard(1), Shard(2)), (Partial(), Shard(3)), (Shard(0), Shard(1))]:  # fmt: skip
        x = shard(whole, world.mesh, placements=placements).requires_grad_()
        for norm in (
            lambda x, w, b: F.group_norm(x, 2, w, b),
            lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
            lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
            lambda x, w, b: F.layer_norm(x, (7, 5)) * w.view(-1, 1, 1) + b.view(-1, 1, 1),
        ):
            w, b = (t.clone().requires_grad_() for t in weights)
            assert_same_as_unsharded(norm, x, w, b)


@ranks(3)
def test_running_buffers_are_equal_on_all_ranks_and_as_in_one_process(world):
    norm = nn.BatchNorm1d(8, dtype=torch.float64)
    oracle = nn.BatchNorm1d(8, dtype=torch.float64)
    for dim, sizes in [(0, (1, 0, 3)), (1, (2, 5, 1)), (2, ROWS)]:
        whole = world.randn(4, 8, 8)
        norm(shard(whole, world.mesh, dim=dim, sizes=sizes))
        oracle(whole)
        for name, value in norm.named_buffers():
            torch.testing.assert_close(value, dict(oracle.named_buffers())[name], rtol=1e-12, atol=1e-12)


@ranks(2)
def test_second_derivatives(world):
    def second_order(function, wanted):
        def run(*inputs):
            grads = torch.autograd.grad((function(*inputs) ** 3).sum(), [inputs[i] for i in wanted], create_graph=True)
            return sum((g**2).sum() for g in grads)

        return run

    cases = [
        (lambda x, w: F.layer_norm(x, (4,), w), (6, 4), 0),
        (lambda x, w: F.layer_norm(x, (6, 4)) * w, (2, 6, 4), 1),
        (lambda x, w: F.rms_norm(x, (4,), w), (6, 4), 0),
        (lambda x, w: F.rms_norm(x, (4,), w), (6, 4), 1),
        (lambda x, w: F.group_norm(x, 2, w), (2, 4, 6), 2),
        (lambda x, w: F.batch_norm(x, None, None, w, w * 2, training=True), (6, 4), 0),
    ]
    for function, shape, dim in cases:
        x = shard(world.randn(*shape), world.mesh, dim=dim).requires_grad_()
        w = world.randn(4).requires_grad_()
        for wanted in ((0, 1), (0,), (1,)):
            assert_same_as_unsharded(second_order(function, wanted), x, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks(3)
def test_large_offsets_cost_no_digits(world, dtype):
    whole = (world.randn(2, 4, 30) + 1000).to(dtype)
    x = shard(whole, world.mesh, dim=2, sizes=(1, 20, 9))
    exact = whole.double()
    tolerance = 2e-4 if dtype is torch.float32 else 2e-2
    for norm in (
        lambda x: F.group_norm(x, 2),
        lambda x: F.instance_norm(x),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.layer_norm(x, (4, 30)),
    ):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            y = norm(x)
        assert y.dtype is dtype
        torch.testing.assert_close(y.full_tensor().double(), norm(exact), rtol=tolerance, atol=tolerance)


@ranks(4)
def test_only_the_shard_is_kept_for_backward(world):
    x = shard(torch.randn(2, 8, 64), world.mesh, dim=2).requires_grad_()
    whole = torch.randn(2, 8, 64, requires_grad=True)
    for norm in (nn.GroupNorm(4, 8), nn.BatchNorm1d(8), nn.LayerNorm(64)):
        with measure_saved_bytes(norm.parameters()) as here:
            y = norm(x)
        with measure_saved_bytes(norm.parameters()) as once:
            z = norm(whole)
        statistics = 2 * 2 * 8 * 4
        assert here.bytes <= once.bytes / 4 + statistics
        assert y.shape == z.shape


@ranks(2)
def test_refusals_name_the_remedy_on_all_ranks(world):
    x = shard(torch.randn(1, 4, 2), world.mesh, dim=2)
    with pytest.raises(MissingShardPatch, match="BatchNorm"):
        torch.batch_norm_stats(x, 1e-5)
    with pytest.raises(RuntimeError, match="divisible by num_groups"):
        F.group_norm(x, 3)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.layer_norm(x, (4, 3))
    one = shard(torch.randn(1, 4, 1), world.mesh, dim=2)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(one, None, None, training=True)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        F.instance_norm(one)


@ranks(2)
def test_a_norm_of_a_leaf_gives_gradients_to_input_and_weights_once(world):
    x = shard(world.randn(4, 6), world.mesh, dim=0).requires_grad_()
    assert isinstance(x, ShardTensor)
    norm = nn.LayerNorm(6).double()
    with count_communication() as counted:
        norm(x).backward(torch.ones_like(x))
    assert [(r.collective, r.direction, r.calls) for r in counted.records] == [("all_reduce", "backward", 1)]
    assert x.grad.placements == x.placements


@ranks(2)
def test_evaluation_batch_norm_of_one_sample_takes_a_transposed_gradient(world):
    """Not compared with one process, which plain torch 2.13 gets wrong: the gradient of the bias is the sum of what arrives."""
    norm, w = world.same(lambda: nn.BatchNorm2d(4).double().eval()), world.randn(1, 64, 4)
    x = shard(world.randn(1, 4, 8, 8), world.mesh, dim=2, sizes=(5, 3)).requires_grad_()
    (norm(x).flatten(2).transpose(1, 2) * w).sum().backward()
    torch.testing.assert_close(norm.bias.grad, w.sum((0, 1)))
    torch.testing.assert_close(x.grad.full_tensor(), w.transpose(1, 2).reshape(1, 4, 8, 8) / (1 + norm.eps) ** 0.5)

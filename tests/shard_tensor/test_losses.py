"""Losses: the mean over the whole tensor on worked cases, what they communicate, half types, refusals."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardwise import fallback
from shardwise.testing import assert_same_as_unsharded, count_communication, ranks, shard


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_token_mean_over_data_and_domain_ranks(world):
    """Losses per token: rank 0 [1, 2, 3], rank 1 [6], rank 2 [2, 4], rank 3 [0, 6]; the mean of all is 3."""
    losses = torch.tensor([1.0, 2, 3, 6, 2, 4, 0, 6], dtype=torch.float64)
    rows = {0: (3, 1, 2, 2)}
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    x = shard(losses, world.mesh, placements=(Shard(0), Shard(0)), sizes=rows)
    loss = (x * scale).mean()
    loss.backward()
    assert loss.item() == 3.0
    assert scale.grad.item() == 3.0


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_token_mean_of_cross_entropy_ignores_what_is_ignored(world):
    """As above, with the losses as negative log-probabilities of two classes and other positions ignored."""
    losses = torch.tensor([[1.0, 2, 3], [6, 9, 9], [2, 4, 9], [0, 6, 9]], dtype=torch.float64)
    targets = torch.tensor([[0, 0, 0], [0, -100, -100], [0, 0, -100], [0, 0, -100]])
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    scores = torch.stack((-losses, torch.zeros_like(losses)), 1)
    x = shard(scores, world.mesh, placements=(Shard(0), Shard(0)))
    t = shard(targets, world.mesh, placements=(Shard(0), Shard(0)))
    for target in (targets, t):
        weight.grad = None
        loss = F.nll_loss(x * weight, target)
        loss.backward()
        assert loss.item() == 3.0
        assert weight.grad.item() == 3.0


@ranks(2)
def test_class_weighted_mean_divides_by_the_global_sum_of_weights(world):
    whole, targets, weight = world.randn(6, 3), torch.tensor([0, 0, 0, 2, 1, 2]), torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    log = whole.log_softmax(1)
    expected = sum(-log[i, t] * weight[t] for i, t in enumerate(targets)) / weight[targets].sum()
    x = shard(whole, world.mesh, dim=0, sizes=(4, 2))
    torch.testing.assert_close(F.cross_entropy(x, targets, weight).full_tensor(), expected)
    torch.testing.assert_close(F.nll_loss(x.log_softmax(1), shard(targets, world.mesh, dim=0), weight).full_tensor(), expected)


@ranks(3)
def test_an_empty_shard_never_makes_a_loss_nan(world):
    x = shard(world.randn(4, 3), world.mesh, dim=0, sizes=(0, 4, 0)).requires_grad_()
    targets = torch.tensor([0, 2, 1, 1])
    for loss in (
        F.cross_entropy(x, targets),
        F.cross_entropy(x, targets, reduction="sum"),
        F.cross_entropy(x, torch.tensor([-100, 1, -100, -100])),
        F.cross_entropy(x, F.one_hot(targets, 3).double()),
        F.mse_loss(x, world.randn(4, 3)),
        F.kl_div(x.log_softmax(1), world.randn(4, 3).softmax(1), reduction="batchmean"),
        F.binary_cross_entropy_with_logits(x, world.randn(4, 3).sigmoid()),
    ):
        x.grad = None
        loss.backward()
        assert loss.isfinite().item()
        assert x.grad.isfinite().all().item()
        assert x.grad.placements == (Shard(0),)


@ranks(3)
def test_what_losses_send(world):
    x = shard(world.randn(7, 5), world.mesh, dim=0).requires_grad_()
    classes = shard(world.randn(7, 5), world.mesh, dim=1).requires_grad_()
    y = shard(world.randn(7, 5), world.mesh, dim=0)
    targets = torch.arange(7) % 5
    cases = [
        (lambda: F.mse_loss(x, y), 0, (Partial(),)),
        (lambda: F.l1_loss(x, y, reduction="sum"), 0, (Partial(),)),
        (lambda: F.huber_loss(x, y, reduction="none"), 0, (Shard(0),)),
        (lambda: F.cross_entropy(x, targets), 1, (Replicate(),)),
        (lambda: F.cross_entropy(x, targets, reduction="sum"), 0, (Partial(),)),
        (lambda: F.cross_entropy(x, targets, reduction="none"), 0, (Shard(0),)),
        (lambda: F.cross_entropy(classes, targets, label_smoothing=0.1), 2, (Replicate(),)),
        (lambda: F.nll_loss(classes, targets), 1, (Replicate(),)),
    ]
    for loss_of, calls, placements in cases:
        with fallback("error"):
            with count_communication() as forward:
                loss = loss_of()
            assert (forward.calls, loss.placements) == (calls, placements)
            if loss.ndim == 0:
                loss = loss.redistribute(placements=(Replicate(),))
                with count_communication() as backward:
                    loss.backward()
                assert backward.calls == 0


@ranks(3)
def test_vocabulary_parallel_scores_are_never_gathered(world):
    scores = shard(world.randn(4, 300), world.mesh, dim=1).requires_grad_()
    targets = torch.tensor([299, 0, 101, 7])
    with count_communication() as counted, fallback("error"):
        F.cross_entropy(scores, targets).backward()
    row = 4 * 8
    assert counted.bytes <= 2 * 2 * (row + 2 * row) // 3  # the maxima, then two sums, of each row


@ranks(2)
def test_second_derivatives(world):
    def second_order(loss):
        def run(x, t):
            (first,) = torch.autograd.grad(loss(x, t), x, create_graph=True)
            return (first**2).sum()

        return run

    targets = shard(torch.arange(6) % 4, world.mesh, dim=0)
    for dim in (0, 1):
        x = shard(world.randn(6, 4), world.mesh, dim=dim).requires_grad_()
        for loss in (F.cross_entropy, lambda x, t: F.cross_entropy(x, t, label_smoothing=0.3, reduction="sum")):
            assert_same_as_unsharded(second_order(loss), x, targets)
        y = shard(world.randn(6, 4), world.mesh, dim=dim)
        for loss in (F.mse_loss, F.binary_cross_entropy_with_logits, F.smooth_l1_loss):
            assert_same_as_unsharded(second_order(loss), x, y.sigmoid())


@ranks(4)
def test_half_types_are_summed_in_float32(world):
    whole = world.randn(4096, 8).float().to(torch.bfloat16)
    targets = torch.arange(4096) % 8
    x = shard(whole, world.mesh, dim=0)
    for reduction in ("mean", "sum"):
        exact = F.cross_entropy(whole.double(), targets, reduction=reduction).item()
        loss = F.cross_entropy(x, targets, reduction=reduction)
        assert loss.dtype is torch.bfloat16
        assert loss.item() == pytest.approx(exact, rel=2**-7)
        error = F.mse_loss(x, x * 0.5, reduction=reduction)
        assert error.item() == pytest.approx(
            (whole.double() * 0.5).square().sum().item() / (whole.numel() if reduction == "mean" else 1), rel=2**-7
        )


@ranks(2)
def test_all_ranks_refuse_alike(world):
    x = shard(world.randn(6, 4), world.mesh, dim=0)
    with pytest.raises(ValueError, match="global shape"):
        F.cross_entropy(x, torch.zeros(3, dtype=torch.int64))  # a shard's target, plain
    with pytest.raises(ValueError, match="reduction"):
        F.cross_entropy(x, torch.zeros(6, dtype=torch.int64), reduction="average")
    with pytest.raises(ValueError, match="reduction"):
        F.mse_loss(x, x, reduction="average")


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "classes"])
@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
@ranks(3)
def test_a_target_that_is_no_class_is_refused_on_every_rank_that_can_know(world, loss, dim):
    x = shard(world.randn(7, 5), world.mesh, dim=dim, sizes=(4, 2, 1) if dim == 0 else (2, 2, 1)).requires_grad_()
    for bad in (5, -1):
        target = torch.tensor([0, 1, bad, 3, 4, -100, 0])
        for reduction in ("mean", "sum", "none"):
            with pytest.raises(IndexError, match="1 targets for 5 classes are out of bounds"):
                loss(x, target, reduction=reduction)
        split = shard(target, world.mesh, dim=0, sizes=(4, 2, 1)) if dim == 0 else shard(target, world.mesh, placements=(Replicate(),))
        with pytest.raises(IndexError, match="1 targets for 5 classes" if dim == 0 else "targets for 5 classes"):
            loss(x, split)
    loss(x, shard(target.clamp(min=0), world.mesh, dim=0, sizes=(4, 2, 1))).backward()

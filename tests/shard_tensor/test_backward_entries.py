"""The entries to autograd: what gradients they take, and that handlers serve the forward passes run again inside backward."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import MissingShardPatch, ShardTensor
from shardwise.testing import assert_same_as_unsharded, ranks, shard


@ranks(2)
def test_gradients_given_plain_sharded_or_not_at_all(world):
    x = shard(world.randn(4, 3), world.mesh, dim=0).requires_grad_()
    whole = world.randn(4, 3)
    for gradient in (whole, shard(whole, world.mesh, dim=0), shard(whole, world.mesh, dim=1)):
        x.grad = None
        (x * 2).backward(gradient)
        torch.testing.assert_close(x.grad.full_tensor(), 2 * whole)
        assert x.grad.placements == x.placements
        (found,) = torch.autograd.grad(x * 2, x, gradient)
        torch.testing.assert_close(found.full_tensor(), 2 * whole)
    x.grad = None
    torch.autograd.backward([x.sum(), x * 3], [None, whole])
    torch.testing.assert_close(x.grad.full_tensor(), 1 + 3 * whole)


@ranks(2)
def test_unused_inputs(world):
    x = shard(world.randn(4), world.mesh, dim=0).requires_grad_()
    y = shard(world.randn(4), world.mesh, dim=0).requires_grad_()
    first, second = torch.autograd.grad(x.sum(), [x, y], allow_unused=True)
    assert isinstance(first, ShardTensor) and second is None
    _, zeros = torch.autograd.grad(x.sum(), [x, y], materialize_grads=True)
    assert not zeros.any()
    with pytest.raises(RuntimeError, match="unused"):
        torch.autograd.grad(x.sum(), [x, y])


@ranks(2)
def test_wrong_gradients_are_refused_on_all_ranks(world):
    x = shard(world.randn(4, 3), world.mesh, dim=0).requires_grad_()
    for call, error in [
        (lambda: (x * 2).backward(), "scalar outputs"),
        (lambda: (x * 2).backward(world.randn(2, 3)), "shape"),
        (lambda: torch.autograd.backward([x.sum(), x.sum()], [None]), "2 tensors and 1 gradients"),
        (lambda: x.detach().sum().backward(), "does not require grad"),
    ]:
        with pytest.raises(RuntimeError, match=error):
            call()
    with pytest.raises(MissingShardPatch, match="batched"):
        torch.autograd.grad(x * 2, x, torch.ones(5, 4, 3), is_grads_batched=True)


@pytest.mark.parametrize("reentrant", [False, True])
@ranks(2)
def test_handlers_serve_a_forward_pass_run_again_in_backward(world, reentrant):
    """Without them the weights' gradients would miss the sum over ranks, or be tensors of another kind."""
    block = world.same(lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Conv1d(5, 4, 3, padding=1)).double())

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant, preserve_rng_state=False)

    x = shard(world.randn(3, 5, 6), world.mesh, dim=0, sizes=(2, 1)).requires_grad_()
    assert_same_as_unsharded(Checkpointed(), x)

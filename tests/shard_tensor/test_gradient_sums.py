"""Gradients of plain weights: one bucketed sum, complete before anything reads them, in every way a weight is used."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.shard_tensor import promote
from shardwise.testing import assert_same_as_unsharded, count_communication, ranks, shard

SIZES = (4, 0, 5)


def model(world):
    return world.same(lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 6)).double())


def split(world, seed=1):
    return shard(world.randn(2, 9, 6, seed=seed), world.mesh, dim=1, sizes=SIZES)


@ranks(3)
def test_one_collective_for_all_weights(world):
    net, x = model(world), split(world)
    loss = net(x).sum()
    with count_communication() as sent:
        loss.backward()
    assert sent.calls == 1
    assert sent.by_axis == {"domain": sum(p.numel() for p in net.parameters()) * 8 * 2 * 2 // 3}


@ranks(3)
def test_full_buckets_travel_while_backward_goes_on(world, monkeypatch):
    monkeypatch.setattr(promote, "BUCKET_BYTES", 300)
    net, x = model(world), split(world)
    loss = net(x).sum()
    with count_communication() as sent:
        loss.backward()
    assert sent.calls > 1
    assert_same_as_unsharded(net, x.detach(), step=True)


@ranks(3)
def test_hooks_see_complete_gradients(world):
    net, x = model(world), split(world)
    seen = {}
    for name, p in net.named_parameters():
        p.register_hook(lambda g, name=name: seen.setdefault(name, []).append(g.clone()))
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.setdefault(name, []).append(p.grad.clone()))
    net(x).pow(2).sum().backward()
    whole = model(world)
    whole(x.full_tensor()).pow(2).sum().backward()
    for name, p in whole.named_parameters():
        assert len(seen[name]) == 2
        for grad in seen[name]:
            torch.testing.assert_close(grad, p.grad)


@ranks(3)
def test_a_weight_used_twice_and_in_different_kinds_of_ops(world):
    w = world.randn(6, 6).requires_grad_()
    assert_same_as_unsharded(lambda x, w: F.linear(F.linear(x, w), w) + (x @ w) * w[0], split(world), w)


@ranks(3)
def test_tied_weights_of_an_embedding_and_a_head(world):
    """The embedding keeps nothing of the weight for backward, the head does: two uses, one gradient."""
    table = world.randn(7, 6).requires_grad_()
    indices = shard(torch.arange(18).view(2, 9) % 7, world.mesh, dim=1, sizes=SIZES)
    assert_same_as_unsharded(lambda i, w: F.linear(F.embedding(i, w).tanh(), w), indices, table)
    square = world.randn(6, 6).requires_grad_()
    rows = shard(torch.arange(18).view(2, 9) % 6, world.mesh, dim=1, sizes=SIZES)
    assert_same_as_unsharded(lambda i, w: F.linear(F.linear(F.embedding(i, w), w).tanh(), w) + F.embedding(i, w) @ w, rows, square)


@ranks(3)
def test_accumulation_over_several_backwards(world):
    ours, theirs = model(world), model(world)
    for seed in range(3):
        x = split(world, seed=seed + 1)
        ours(x).pow(2).sum().backward()
        theirs(x.full_tensor()).pow(2).sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@ranks(3)
def test_two_forwards_before_one_backward_and_a_retained_graph(world):
    ours, theirs = model(world), model(world)
    a, b = split(world, 1), split(world, 2)
    for net, x, y in ((ours, a, b), (theirs, a.full_tensor(), b.full_tensor())):
        loss = net(x).pow(2).sum() + net(y).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@ranks(3)
def test_a_backward_that_skips_the_weights_leaves_nothing_behind(world):
    ours, theirs = model(world), model(world)
    a = split(world).requires_grad_()
    b = a.detach().full_tensor().requires_grad_()
    for net, x in ((ours, a), (theirs, b)):
        loss = net(x).pow(2).sum()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@ranks(3)
def test_autograd_grad_of_chosen_weights(world):
    ours, theirs = model(world), model(world)
    x = split(world)
    mine = torch.autograd.grad(ours(x).pow(2).sum(), [ours[0].weight, ours[3].bias])
    other = torch.autograd.grad(theirs(x.full_tensor()).pow(2).sum(), [theirs[0].weight, theirs[3].bias])
    for g, h in zip(mine, other, strict=True):
        assert type(g) is torch.Tensor
        torch.testing.assert_close(g, h)


@ranks(3)
def test_second_order_gradients_of_weights(world):
    x = split(world)
    results = []
    for value in (x.requires_grad_(), x.detach().full_tensor().requires_grad_()):
        net = model(world)
        (g,) = torch.autograd.grad(net(value).pow(2).sum(), value, create_graph=True)
        g.pow(2).sum().backward()
        results.append([p.grad for p in net.parameters()])
    for g, h in zip(*results, strict=True):
        if h is None:
            assert g is None or not g.any()
        else:
            torch.testing.assert_close(g, h)


@ranks(3)
def test_a_plain_tensor_that_is_no_leaf(world):
    w = world.randn(6).requires_grad_()
    assert_same_as_unsharded(lambda x, w: x * w.exp() + F.linear(x, torch.diag(w)), split(world), w)


@ranks(3)
def test_weights_changed_in_place_or_replaced_between_steps(world):
    ours, theirs = model(world), model(world)
    x = split(world)
    for net, value in ((ours, x), (theirs, x.full_tensor())):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            net(value)  # a forward without backward
            net(value).pow(2).mean().backward()
            optimizer.step()
            if step == 1:
                net[0].weight.data = net[0].weight.data * 2
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@ranks(4, processes=True, mesh={"ddp": 2, "domain": 2})
def test_a_ddp_reducer_reads_complete_gradients(world):
    """DDP over the data axis alone, as in a script that wraps by hand: the domain's sum is done before it averages."""
    ours, theirs = model(world), model(world)
    full = world.randn(2, 2, 9, 6)
    replica = world.mesh.get_local_rank("ddp")
    wrapped = DistributedDataParallel(ours, process_group=world.mesh["ddp"].get_group())
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(shard(full[replica], world.mesh["domain"], dim=1, sizes=(7, 2))).pow(2).sum().backward()
    (sum(theirs(full[i]).pow(2).sum() for i in range(2)) / 2).backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("reentrant", [False, True])
@ranks(3)
def test_activation_checkpointing(world, reentrant):
    net, whole = model(world), model(world)
    torch.distributed.barrier()  # a checkpoint sets the random state that all ranks of one process share while others build
    x = split(world).requires_grad_()
    assert_same_as_unsharded(lambda x: torch.utils.checkpoint.checkpoint(net, x, use_reentrant=reentrant), x)
    net.zero_grad()
    torch.utils.checkpoint.checkpoint(net, x, use_reentrant=reentrant).pow(2).sum().backward()
    whole(x.detach().full_tensor()).pow(2).sum().backward()
    for p, q in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)

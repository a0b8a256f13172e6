"""The loss and gradient of a step do not depend on the layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwise.collectives.functional import all_gather
from shardwise.parallel.token_loss import IGNORED, token_loss
from shardwise.parallel.topology import connect
from shardwise.spec.layout import Layout
from shardwise.spec.sequence import even_sizes
from shardwise.testing import ranks
from shardwise.train.batches import Samples, counted_tokens, micro_batches, packed_samples


@ranks(3)
def test_loss_over_a_split_vocabulary(world):
    logits = world.randn(2, 5, 10).float()
    labels = torch.tensor([[1, 9, IGNORED, 4, 0], [7, 7, 3, IGNORED, 2]])
    start = sum(even_sizes(10, 3)[: world.rank])
    own = logits[..., start : start + even_sizes(10, 3)[world.rank]].clone().requires_grad_()
    loss = token_loss(own, labels, 10, dist.group.WORLD)
    loss.backward()
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(own.grad, whole.grad[..., start : start + own.shape[-1]])


@ranks(3)
def test_loss_where_a_rank_has_no_vocabulary(world):
    logits = world.randn(1, 4, 2).float()
    sizes = even_sizes(2, 3)
    start = sum(sizes[: world.rank])
    loss = token_loss(logits[..., start : start + sizes[world.rank]], torch.tensor([[0, 1, 1, 0]]), 2, dist.group.WORLD)
    torch.testing.assert_close(loss, F.cross_entropy(logits[0], torch.tensor([0, 1, 1, 0]), reduction="sum"))


class _Weighted(nn.Module):
    """The loss of a token is w times its number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("accumulation", [1, 2])
@ranks(4)
def test_worked_case_of_uneven_tokens(world, accumulation):
    """Per-token losses [1, 2, 3], [6] in one replica and [2, 4], [0, 6] in the other, all else ignored: loss 3.0 and dL/dw 3.0."""
    topology = connect(Layout(cp=2, dp=2, mbs=1, gbs=2 * accumulation))
    # zigzag over two ranks of 8 rows: rank 0 holds rows 0, 1, 6, 7 and rank 1 rows 2, 3, 4, 5
    rows = torch.tensor([[1, 2, 6, -1, -1, -1, 3, -1], [2, 4, 0, 6, -1, -1, -1, -1]])[topology.dp_rank : topology.dp_rank + 1]
    empty = torch.full((accumulation - 1, 8), -1)
    values = torch.cat([rows, empty])
    labels = torch.where(values < 0, IGNORED, values)
    samples = Samples(tokens=values.clamp(min=0), labels=labels, positions=torch.arange(8).expand_as(values))
    model = _Weighted()
    batches = micro_batches(samples, topology, 1)
    assert len(batches) == accumulation
    count = torch.tensor(counted_tokens(batches))
    dist.all_reduce(count)
    total = torch.zeros(())
    for batch in batches:
        counted = batch.labels != IGNORED
        loss = (model.w * batch.labels[counted]).sum() / int(count)
        if counted.any():
            loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    grad = torch.zeros(()) if model.w.grad is None else model.w.grad
    dist.all_reduce(grad)
    assert int(count) == 8 and float(total) == 3.0 and float(grad) == 3.0


@pytest.mark.parametrize("length", [1, 2, 7, 8, 13])
@ranks(3)
def test_every_token_is_on_one_rank(world, length):
    topology = connect(Layout(cp=3))
    tokens = torch.arange(length).unsqueeze(0)
    samples = Samples(tokens=tokens, labels=tokens.clone(), positions=tokens.clone())
    (batch,) = micro_batches(samples, topology, 1)
    assert batch.tokens.shape[1] >= 1
    sizes = all_gather(torch.tensor([batch.labels.shape[1]]), 0, [1] * 3, dist.group.WORLD).tolist()
    labels = all_gather(batch.labels, 1, sizes, dist.group.WORLD)
    assert sorted(labels[labels != IGNORED].tolist()) == list(range(length))


def test_packed_samples_restart_after_the_end_of_a_document():
    samples = packed_samples(torch.tensor([[5, 6, 9, 1, 9, 2, 3]]), end=9)
    assert samples.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert samples.segments is not None and samples.segments.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert samples.labels.tolist() == [[6, 9, 1, 9, 2, 3]]

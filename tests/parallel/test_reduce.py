"""Data parallel sums in the middle of the backward: the same numbers, never early, in one order, every byte once."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.parallel import cases
from tests.parallel.test_parity import hold

from shardwise.collectives.counter import Communication, count_communication
from shardwise.errors import ShardwiseError
from shardwise.parallel import reduce
from shardwise.parallel.build import parallelize_model
from shardwise.parallel.step_optimizer import StepOptimizer
from shardwise.parallel.topology import connect
from shardwise.testing import ranks
from shardwise.train.step import Trainer
from shardwise.train.verify import Rules, make_adamw

SMALL = 12_000  # bytes: two or three matrices of the test's models
SCHEDULES = ("pp=2", "pp=2 vpp=2", "pp=2 schedule=gpipe", "pp=2 schedule=zb-h1", "pp=2 vpp=2 schedule=zbv", "pp=2 vpp=2 schedule=dualpipev")


def small_buckets():
    return mock.patch.object(reduce, "BUCKET_BYTES", SMALL)


def trainer(family: str, words: str, *, gbs: int = 8) -> Trainer:
    layout = cases.layout(dist.get_world_size(), words, gbs=gbs)
    model = parallelize_model(cases.config(family), connect(layout), seed=3, device=torch.device("cpu"))
    return Trainer(model, StepOptimizer(model, lambda groups: make_adamw(Rules(mbs=1), groups), 1.0))


def train(run: Trainer, *, step: int = 0) -> None:
    layout = run.topology.layout
    each = layout.gbs // layout.dp
    run.train(cases.samples(step, gbs=layout.gbs, length=13).rows(run.topology.dp_rank * each, (run.topology.dp_rank + 1) * each))


@ranks(2, processes=True, timeout=400)
def test_many_buckets_equal_one_process_on_two_ranks(world):
    with small_buckets():
        hold("llama", ["dp=2", "dp=2 sharding=none", "cp=2", "cp=2 sharding=none", "dp=2 recompute=full:uniform:3"])
        hold("qwen3_moe", ["ep=2", "dp=2 sharding=none"])


@ranks(4, processes=True, timeout=400)
def test_many_buckets_equal_one_process_on_four_ranks(world):
    with small_buckets():
        hold("llama", ["tp=2 sp=true", "tp=4 sp=true sharding=none", "cp=2", *SCHEDULES, "pp=2 schedule=zb-h1 sharding=none"])
        hold("qwen3_moe", ["ep=2", "tp=2 ep=2 sp=true", "tp=2 ep=2 sharding=none", "ep=2 etp=2"])


def starts(words: str) -> tuple[list[int], int, int]:
    """Train a step. Of the sums that start while gradients are still to come: how often each of their gradients had come, and their
    number; between these the number of micro batches."""
    with small_buckets():
        layout = cases.layout(dist.get_world_size(), words, gbs=16)
        model = parallelize_model(cases.config("qwen3"), connect(layout), seed=3, device=torch.device("cpu"))
        arrived: Counter[torch.nn.Parameter] = Counter()
        for parameter, _ in model.parameters:
            parameter.register_post_accumulate_grad_hook(lambda each: arrived.update([each]))
        run = Trainer(model, StepOptimizer(model, lambda groups: make_adamw(Rules(mbs=1), groups), 1.0))
    plain, counts, sums = run.optimizer.sums._start, [], 0
    expected = layout.microbatches * len(model.parameters)

    def start(parameters, group):
        nonlocal sums
        if arrived.total() < expected:
            counts.extend(arrived[each] for each in parameters)
            sums += 1
        return plain(parameters, group)

    run.optimizer.sums._start = start
    train(run)
    assert arrived.total() == expected
    return counts, layout.microbatches, sums


@ranks(4, processes=True, timeout=400)
def test_a_sum_starts_with_the_last_gradient_of_its_bucket_and_not_earlier(world):
    torch.set_num_threads(1)
    for words in ("sharding=none", *SCHEDULES):
        counts, microbatches, sums = starts(words)
        assert set(counts) == {microbatches}, words
        assert sums > 5, words


@ranks(2, processes=True, timeout=300)
def test_gradients_that_never_come_are_zeros_and_the_order_stays(world):
    """Rank 1 does not use one layer's weights in any micro batch, rank 0 not those of another in the last."""
    torch.set_num_threads(1)
    for words in ("sharding=none", "sharding=distributed_optimizer"):
        found = []
        for overlap in ("true", "false"):
            with small_buckets():
                run = trainer("llama", f"{words} overlap_grad_reduce={overlap}")
            layers, calls = run.model.stages[0].model.model.layers, []
            mlp = layers[2 - world.rank].mlp
            plain = mlp.forward

            def forward(x, plain=plain, calls=calls):
                calls.append(1)
                return x * 0 if world.rank or len(calls) == 4 else plain(x)

            mlp.forward = forward
            train(run)
            assert len(calls) == 4
            found.append([each.value.grad for each in run.optimizer.updated])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), words


@ranks(2, processes=True, timeout=300)
def test_bytes_do_not_depend_on_buckets_or_overlap(world):
    torch.set_num_threads(1)
    for words, collective in (("sharding=none", "all_reduce"), ("sharding=distributed_optimizer", "reduce_scatter")):
        sent = []
        for limit, overlap in ((SMALL, "true"), (2**30, "true"), (SMALL, "false")):
            with mock.patch.object(reduce, "BUCKET_BYTES", limit):
                run = trainer("qwen3", f"{words} overlap_grad_reduce={overlap}")
            with count_communication() as counted:
                train(run)
            sent.append((_by_collective(counted), counted.only(axis="shardwise_dp_cp_gradients")))
        elements = sum(parameter.numel() for parameter, _ in run.model.parameters)
        if collective == "reduce_scatter":
            elements -= sum(each.value.numel() for each in run.optimizer.updated)
        assert sent[0][0] == sent[1][0] == sent[2][0]
        assert all(own.bytes == own.only(collective=collective).bytes == 4 * elements for _, own in sent)
        assert sent[0][1].calls > 10 and sent[1][1].calls == 2  # matrices and vectors
        assert sent[0][1].only(direction="backward").calls > 10 and sent[2][1].only(direction="backward").calls == 0


def _by_collective(counted: Communication) -> Counter[tuple[str, str]]:
    result: Counter[tuple[str, str]] = Counter()
    for each in counted.records:
        result[each.collective, each.axis] += each.bytes
    return result


@ranks(2, processes=True, timeout=300)
def test_a_backward_after_the_last_one_is_refused(world):
    run = trainer("llama", "dp=2")
    step = run.optimizer.step
    run.optimizer.step = lambda: 0.0
    train(run)
    run.optimizer.zero_grad = lambda: None
    with pytest.raises(ShardwiseError, match=r"Call step\(\)"):
        train(run)
    del run.optimizer.zero_grad
    run.optimizer.step = step
    train(run)

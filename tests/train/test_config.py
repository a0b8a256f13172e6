"""Overrides, the judged plan, the learning rate, the log line."""

from __future__ import annotations

import re

import pytest

from shardwise.errors import LayoutError, ModelError
from shardwise.recipes.pretrain import RECIPES, TABLE, recipe
from shardwise.spec.ranks import min_world
from shardwise.train.config import RunConfig, SchedulerConfig, TrainConfig
from shardwise.train.log import iteration_line
from shardwise.train.overrides import apply, keys
from shardwise.train.plan import layout_of, model_fields, plan
from shardwise.train.scale import RANKS, scaled_down
from shardwise.train.schedule import learning_rate

TINY = "llama32_1b_tiny_pretrain_config"


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("model.tensor_model_parallel_size=2", lambda c: c.model.tensor_model_parallel_size == 2),
        ("model.transformer.tensor_model_parallel_size=2", lambda c: c.model.tensor_model_parallel_size == 2),
        ("++model.sequence_parallel=True", lambda c: c.model.sequence_parallel is True),
        ("optimizer.lr=1e-4", lambda c: c.optimizer.lr == 1e-4),
        ("optimizer.lr=1", lambda c: c.optimizer.lr == 1.0),
        ("validation.eval_interval=null", lambda c: c.validation.eval_interval is None),
        ("model.cp_comm_type=a2a+p2p", lambda c: c.model.cp_comm_type == "a2a+p2p"),
        ("model.hierarchical_context_parallel_sizes=[2,2]", lambda c: c.model.hierarchical_context_parallel_sizes == [2, 2]),
        ("dataset.data_path=a.txt", lambda c: c.dataset.data_path == ["a.txt"]),
        ("dataset.seq_length=128", lambda c: c.model.seq_length == 128),
        ("model.hf.rms_norm_eps=1e-6", lambda c: c.model.hf["rms_norm_eps"] == 1e-6),
    ],
)
def test_overrides_are_read(word, read):
    before = recipe(TINY)
    assert read(apply(before, [word])) and before == recipe(TINY)


def test_every_wrong_override_is_reported_with_what_to_write():
    words = [
        "model.tensor_parallel_size=2",
        "train.train_iters=three",
        "optimizer.lr=None",
        "optimizer.optimizer=lion",
        "train",
        "nonsense=1",
    ]
    with pytest.raises(LayoutError) as error:
        apply(RunConfig(), words)
    by_word = {finding.given: finding for finding in error.value.findings}
    assert set(by_word) == set(words)
    assert "model.tensor_model_parallel_size" in by_word["model.tensor_parallel_size=2"].try_
    assert "whole number" in by_word["train.train_iters=three"].why and "adam or sgd" in by_word["optimizer.optimizer=lion"].why


def test_every_key_is_listed_once():
    assert len(keys(RunConfig())) == len(set(keys(RunConfig()))) > 80


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_legal_on_its_smallest_world(name):
    config = RECIPES[name]()
    world = min_world(layout_of(config, 1))
    assert plan(config, world).layout.world == world


@pytest.mark.parametrize("name", TABLE)
def test_scaled_down_recipes_are_legal_on_one_machine(name):
    config = scaled_down(recipe(f"{name}_pretrain_config"))
    world = min_world(layout_of(config, 1))
    planned = plan(config, world)
    assert world <= RANKS and planned.spec is not None and planned.spec.total_params < 200_000


def test_all_findings_come_at_once():
    words = [
        "model.tensor_model_parallel_size=3", "model.expert_model_parallel_size=5", "model.pipeline_model_parallel_size=2",
        "train.global_batch_size=7", "train.micro_batch_size=2",
    ]  # fmt: skip
    config = apply(recipe("qwen3_30b_a3b_tiny_pretrain_config"), words)
    with pytest.raises(LayoutError) as error:
        plan(config, 8)
    assert {"W1", "T1", "E2"} <= {finding.rule for finding in error.value.findings}
    assert all(finding.why and finding.try_ for finding in error.value.findings)


def test_a_key_the_family_lacks_is_refused():
    with pytest.raises(ModelError, match="num_moe_experts"):
        model_fields(apply(recipe(TINY), ["model.num_moe_experts=8"]))


def test_layout_line():
    config = apply(
        recipe(TINY), ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2", "model.sequence_parallel=true"]
    )
    assert plan(config, 4).layout_line == "TP=2 PP=2 CP=1 EP=1 ETP=1 DP=1 (4 ranks)"


def test_learning_rate_warms_up_and_decays():
    config = RunConfig(train=TrainConfig(train_iters=110), scheduler=SchedulerConfig(lr_warmup_iters=10))
    rates = [learning_rate(config, step) for step in range(1, 121)]
    assert rates[4] == pytest.approx(1.5e-4) and rates[9] == pytest.approx(3e-4)
    assert rates[59] == pytest.approx((3e-4 + 3e-5) / 2) and rates[109] == rates[119] == pytest.approx(3e-5)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_warmup_longer_than_the_run_is_cut():
    config = RunConfig(train=TrainConfig(train_iters=3), scheduler=SchedulerConfig(lr_warmup_iters=500))
    assert learning_rate(config, 2) == pytest.approx(3e-4) and learning_rate(config, 3) == pytest.approx(3e-5)


def test_iteration_line_has_bridges_format():
    line = iteration_line(
        {
            "iteration": 3, "train_iters": 3, "consumed_samples": 24, "elapsed_ms": 123.44, "learning_rate": 3e-4, "global_batch_size": 8,
            "lm loss": 10.03808, "routers": {"z_loss": 0.5}, "grad_norm": 1.2344,
        }
    )  # fmt: skip
    pattern = (
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration        3/       3 \| consumed samples:           24 \| "
        r"elapsed time per iteration \(ms\): 123\.4 \| learning rate: 3\.000000E-04 \| global batch size:     8 \| "
        r"lm loss: 1\.003808E\+01 \| z_loss: 5\.000000E-01 \| loss scale: 1\.0 \| grad norm: 1\.234 \| "
        r"number of skipped iterations:   0 \| number of nan iterations:   0 \|"
    )
    assert re.fullmatch(pattern, line)

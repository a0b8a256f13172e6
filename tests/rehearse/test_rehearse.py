"""A rehearsal against real ranks, against the descriptions, and against itself with more micro batches."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from shardwise.cli import main
from shardwise.parallel.topology import connect
from shardwise.parallel.weights import materialize
from shardwise.recipes.pretrain import recipe
from shardwise.rehearse import step
from shardwise.rehearse.ledger import CATEGORIES, Ledger
from shardwise.spec.stages import rank_params
from shardwise.testing import ranks
from shardwise.train.overrides import apply
from shardwise.train.plan import RunPlan, plan

TINY = ("model.num_layers=2", "model.seq_length=16", "model.vocab_size=64")
TP2_DP2 = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true", "train.global_batch_size=4", *TINY)


def planned(name: str, world: int, *words: str) -> RunPlan:
    config = apply(recipe(name), words)
    config.mixed_precision = "bf16_mixed"
    return plan(config, world)


class RealLedger(Ledger):
    """Reads what tensors hold."""

    def _read(self, tensor: Tensor) -> float:
        return torch.ops.aten._local_scalar_dense(tensor)


def differences(real: step.RankRehearsal, rehearsed: step.RankRehearsal) -> dict[tuple[str, str], tuple[int, int]]:
    pairs = ((phase, name) for phase in step.PHASES for name in CATEGORIES)
    both = {each: tuple(found.peaks[each[0]].categories[each[1]] for found in (real, rehearsed)) for each in pairs}
    return {each: (a, b) for each, (a, b) in both.items() if a != b}


@pytest.fixture(scope="module")
def rehearsed() -> step.RankRehearsal:
    return step.rehearse_rank(planned("llama32_1b_tiny_pretrain_config", 4, *TP2_DP2), 0)


@ranks(4, processes=True, timeout=200)
def test_real_ranks_hold_and_send_what_was_rehearsed(world, rehearsed):
    chosen = planned("llama32_1b_tiny_pretrain_config", 4, *TP2_DP2)
    real = step.account(
        chosen, connect(chosen.layout), RealLedger(), nullcontext(), fill=materialize, microbatches=chosen.layout.microbatches
    )
    assert real.parameters == rehearsed.parameters
    if world.rank == 0:
        assert real.traffic == rehearsed.traffic
        assert differences(real, rehearsed) == {}


def test_memory_repeats_itself_and_traffic_is_counted_for_all_micro_batches(monkeypatch):
    words = ("model.pipeline_model_parallel_size=2", "train.global_batch_size=6", *TINY)
    chosen = planned("llama32_1b_tiny_pretrain_config", 2, *words)
    short = [step.rehearse_rank(chosen, rank) for rank in step.distinct_ranks(chosen.layout)]
    monkeypatch.setattr(step, "enough_microbatches", lambda layout, _: layout.microbatches)
    for each in short:
        whole = step.rehearse_rank(chosen, each.rank)
        assert each.microbatches < whole.microbatches == 6
        assert whole.traffic == each.traffic
        for phase in ("forward", "backward"):
            assert whole.peaks[phase] == each.peaks[phase]


def test_parameters_of_every_stage_of_a_mixture_are_those_described():
    words = ("model.pipeline_model_parallel_size=2", "model.expert_model_parallel_size=4", "model.tensor_model_parallel_size=2")
    chosen = planned("deepseek_v3_tiny_pretrain_config", 16, *words, "model.sequence_parallel=true", "model.seq_length=32")
    assert chosen.spec is not None
    described = rank_params(chosen.spec.replace(vocab_divisor=1), chosen.layout)
    for found in step.rehearse(chosen, processes=2):
        assert found.parameters == described[found.pp_rank].total
        assert {each.axis for each in found.traffic if each.collective == "all_to_all"} == {"ep"}


def test_command_prints_terms_beside_the_prediction(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["rehearse", "--recipe", "llama32_1b_tiny_pretrain_config", *TINY, "--gpus", "8", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    (rank,) = answer["ranks"]
    assert rank["parameters"] == rank["expected_parameters"]
    terms = {each["term"]: each for each in rank["terms"]}
    assert terms["weights"]["rehearsed_gib"] == pytest.approx(terms["weights"]["predicted_gib"], rel=1e-3)  # tables of rotary positions
    assert {each["axis"] for each in rank["messages"]} == {"dp"}


def test_what_cannot_be_rehearsed_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["rehearse", "--recipe", "llama32_1b_tiny_pretrain_config", "ddp.use_torch_fsdp2=true", *TINY])
    assert ended.value.code == 2
    assert "FSDP2 is not rehearsed" in capsys.readouterr().err

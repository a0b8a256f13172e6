"""A rehearsal against real ranks, against the descriptions, and against itself with more micro batches."""

from __future__ import annotations

import csv
import json
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.cli import main
from shardwise.mesh.leaving import wait_for_gloo
from shardwise.parallel.topology import connect
from shardwise.parallel.weights import materialize
from shardwise.recipes.pretrain import recipe
from shardwise.rehearse import step
from shardwise.rehearse.compare import Comparer, Comparison
from shardwise.rehearse.ledger import CATEGORIES, Ledger
from shardwise.spec.catalog.hardware import cluster
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
    """Reads what tensors hold. gloo lets go of what it has sent a little late, which must not count as kept."""

    @contextmanager
    def loss(self):
        with super().loss():
            yield
            wait_for_gloo()

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


SPLIT = (
    "model.tensor_model_parallel_size=2",
    "model.sequence_parallel=true",
    "model.pipeline_model_parallel_size=2",
    "train.global_batch_size=8",
    "model.seq_length=32",
    "model.vocab_size=64",
)


def compared(chosen: RunPlan) -> list[Comparison]:
    comparer = Comparer(chosen, cluster("h100-sxm", chosen.layout.world))
    return [comparer.compare(step.rehearse_rank(chosen, rank)) for rank in step.distinct_ranks(chosen.layout)]


def test_messages_are_those_the_planner_counts():
    for name, more in (("llama32_1b", ()), ("qwen3_30b_a3b", ("model.expert_model_parallel_size=4",))):
        for each in compared(planned(f"{name}_tiny_pretrain_config", 8, *SPLIT, *more)):
            assert each.same_parameters
            found = {(sent.collective, sent.axis): sent for sent in each.sent if sent.predicted is not None}
            assert {axis for _, axis in found} == {"tp", "pp", "dp"} | ({"ep"} if more else set())
            for (collective, _), sent in found.items():
                numbers = 16 / 1024 if collective == "all_to_all" else 0  # of experts: 8 bytes beside rows of 64 features, one way of four
                assert sent.predicted <= sent.bytes <= sent.predicted * (1 + 2 * numbers), sent
            small = sum(sent.bytes for sent in each.sent if sent.predicted is None)
            assert small < 0.1 * sum(sent.bytes for sent in each.sent)


def test_activations_are_those_the_planner_counts():
    """Of real layers: norms, norms of heads, attention with fewer key heads, gated products, under sequence parallelism."""
    plain = ("model.virtual_pipeline_model_parallel_size=null", "model.context_parallel_size=1", "model.pipeline_model_parallel_size=1")
    words = ("model.num_layers=6", *SPLIT[:2], *plain, "model.seq_length=4096", "model.vocab_size=256", "train.global_batch_size=2")
    for name in ("llama31_70b", "qwen3_8b"):
        (each,) = compared(planned(f"{name}_pretrain_config", 2, *words))
        term = next(term for term in each.terms if term.name == "activations")
        assert each.rank.peaks["forward"].categories["activations"] == pytest.approx(term.predicted, rel=0.03), name


def test_memory_is_that_of_measured_runs():
    """Runs of the table whose framework stores and keeps what this runtime does (docs/rehearsal.md says which and why): dropless or evenly
    routed bf16, float32 gradients, sharded optimizer, no recompute; peak allocated memory over all ranks, measured by its authors."""
    with (Path(__file__).parents[2] / "benchmarks/data/published_runs.csv").open() as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    for name in ("simumax-005", "simumax-006"):
        row = rows[name]
        chosen = planned(
            "deepseek_v2_pretrain_config",
            int(row["gpus"]),
            f"model.num_layers={row['num_layers']}",
            f"model.vocab_size={row['vocab']}",
            f"model.seq_length={row['seq_len']}",
            f"model.expert_model_parallel_size={row['ep']}",
            f"model.pipeline_model_parallel_size={row['pp']}",
            f"train.micro_batch_size={row['mbs']}",
            f"train.global_batch_size={row['gbs']}",
        )
        peak = max(step.rehearse_rank(chosen, rank).peak.total for rank in step.distinct_ranks(chosen.layout))
        assert peak / 2**30 == pytest.approx(float(row["peak_mem_gib"]), rel=0.05), name


def test_plans_are_rehearsed(capsys, tmp_path):
    fields = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**fields, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 256}))
    words = ["--gpus", "4", "--seq-len", "64", "--global-batch", "8", "--top", "1", "--rehearse", "1", "tp=2", "pp=2", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", str(path), *words])
    answer = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    found = answer["plans"][0]["rehearsal"]
    assert found["peak_gib"] > 0 and found["pp_rank"] == answer["plans"][0]["memory"]["stage"]
    sent = {(each["collective"], each["axis"]): each for each in found["messages"]}
    assert sent["send", "pp"]["bytes"] == sent["send", "pp"]["predicted"]


def test_what_cannot_be_rehearsed_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["rehearse", "--recipe", "llama32_1b_tiny_pretrain_config", "ddp.use_torch_fsdp2=true", *TINY])
    assert ended.value.code == 2
    assert "FSDP2 is not rehearsed" in capsys.readouterr().err


def test_a_plan_the_runtime_has_not_is_not_rehearsed_as_another(capsys):
    words = ["--model", "llama-3.2-1b", "--gpus", "2", "--seq-len", "64", "--global-batch", "4", "--top", "1", "--rehearse", "1"]
    for given in ("peft=lora", "optimizer=sgd", "sharding=zero2"):
        with pytest.raises(SystemExit):
            main(["plan", *words, "tp=1", given, "--json"])
        (plan,) = json.loads(capsys.readouterr().out)["plans"]
        assert given in plan["rehearsal"]["why_not"]

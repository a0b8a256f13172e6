"""Published recipes are judged, and the sizing tables of Megatron Bridge's guide advise what they say."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from shardwise.planner.recipe_table import judge_rows
from shardwise.planner.rules.sizing import DENSE, MOE, SEQUENCE, departures, suggestions, table_findings
from shardwise.spec import catalog
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec
from shardwise.spec.ranks import min_world

# Megatron Bridge main@067f987 (2026-08-22): every recipe marked infeasible in its own notes, and a random sample of the others
SAMPLE = Path(__file__).parent / "data" / "recipes.csv"


def rows() -> list[dict[str, str]]:
    with SAMPLE.open(newline="") as file:
        return list(csv.DictReader(file))


def test_infeasible_recipes_are_refused_for_the_stated_reason() -> None:
    marked = [row for row in rows() if row["notes"]]
    assert len(marked) == 27
    for row, judged in zip(marked, judge_rows(marked)):
        reason = "W2" if "gpus/pp not multiple of ep*etp" in row["notes"] else "B1"
        assert reason in {finding.rule for finding in judged.findings if finding.severity == "error"}, judged
        assert not judged.legal


def test_other_recipes_are_legal() -> None:
    others = [row for row in rows() if not row["notes"]]
    refused = [judged for judged in judge_rows(others) if not judged.legal]
    assert len(refused) <= 0.05 * len(others), [(each.recipe, [str(finding) for finding in each.findings]) for each in refused]


def test_legal_recipes_fit_or_say_from_how_many_gpus() -> None:
    legal = [judged for judged in judge_rows(rows()) if judged.legal and judged.memory]
    assert legal and all(judged.fits or judged.fits_from for judged in legal), [each.recipe for each in legal if not each.fits]
    assert sum(judged.fits is True for judged in legal) >= 0.95 * len(legal)


def recipe_row(words: str) -> dict[str, str]:
    """A row of the table that says only what `words` do."""
    given = dict(word.split("=") for word in words.split())
    return {**dict.fromkeys(rows()[0], ""), "recompute": "none", "mbs": "1", **given}


def test_recipes_are_read_as_their_framework_runs_them() -> None:
    row = recipe_row("model=llama-3.1-8b gpu_type=B200 gpus=8 tp=1 pp=1 cp=1 gbs=128 seq=8192 sp=False use_megatron_fsdp=False")
    (plain,) = judge_rows([{**row, "precision": "fp8-mx", "kind": "library", "task": "pretrain"}])
    (tuned,) = judge_rows([{**row, "precision": "fp8-mx", "kind": "perf", "task": "peft"}])
    assert plain.legal and plain.fits and tuned.fits
    assert plain.layout and (plain.layout.param_dtype, plain.layout.grad_dtype, plain.layout.peft) == ("fp8", "fp32", None)
    assert tuned.layout and (tuned.layout.grad_dtype, tuned.layout.cross_entropy, tuned.layout.peft) == ("bf16", "te", "lora")
    (crowded,) = judge_rows([{**row, "precision": "bf16", "gpu_type": "H100", "gpus": "1"}])
    assert crowded.legal and crowded.fits is False and crowded.memory and crowded.memory.needed_gib > 100


LLAMA = "model=llama-3.1-8b gpu_type=H100 tp=2 pp=1 cp=1 seq=4096 sp=False precision=bf16 recompute=none"


def test_library_recipes_are_judged_on_whole_nodes() -> None:
    row = recipe_row(f"{LLAMA} gpus=2 gbs=8 task=sft")
    (library,) = judge_rows([{**row, "kind": "library"}])
    assert (library.gpus, library.fits, library.fits_named, library.fits_from) == (8, True, False, None)
    (named,) = judge_rows([{**row, "kind": ""}])
    assert (named.gpus, named.fits, named.fits_named, named.fits_from) == (2, False, None, 4)
    (perf,) = judge_rows([{**row, "kind": "perf"}])
    assert (perf.gpus, perf.fits) == (2, True)  # gradients in bf16
    (small,) = judge_rows([{**row, "kind": "library", "gbs": "1"}])  # its one sample cannot be split over more ranks
    assert (small.gpus, small.fits, small.fits_from) == (2, False, None)
    (spread,) = judge_rows([{**row, "kind": "library", "gpus": "32", "gbs": "16"}])
    assert spread.gpus == 32 and spread.fits


def test_a_recipe_that_does_not_fit_says_what_it_would_need() -> None:
    row = {**recipe_row(f"{LLAMA} gpus=8 gbs=24 kind=library"), "model": "llama-3.1-70b", "pp": "2"}
    (judged,) = judge_rows([row])
    assert judged.fits is False and judged.fits_from is None and judged.most and judged.memory
    assert judged.most[0] == 4 * 24 and not judged.most[1].fits  # gradients and weights are not shared
    assert judged.most[1].terms["optimizer"] < judged.memory.terms["optimizer"] / 10
    (judged,) = judge_rows([{**row, "pp": "4"}])
    assert judged.fits is False and judged.fits_from and judged.most is None
    worlds = {8 * times: judge_rows([{**row, "pp": "4", "gpus": str(8 * times)}])[0] for times in (1, 2, 3, 4, 6, 8, 12, 24)}
    assert judged.fits_from == min(world for world, grown in worlds.items() if grown.fits)


def test_samples_that_are_not_padded_may_be_short_enough() -> None:
    row = {**recipe_row(f"{LLAMA} gpus=1 gbs=32 mbs=4 task=peft kind=library"), "tp": "1"}
    (tuned,) = judge_rows([{**row, "recipe": "llama3_8b_peft_1gpu_h100_bf16_config"}])
    (seeing,) = judge_rows([{**row, "recipe": "some_vl_8b_peft_1gpu_h100_bf16_config"}])
    assert tuned.fits is seeing.fits is False and tuned.longest is None and seeing.longest and seeing.longest < 4096
    for length, fits in ((seeing.longest, True), (seeing.longest + 128, False)):
        (judged,) = judge_rows([{**row, "recipe": "some_vl_8b_peft_1gpu_h100_bf16_config", "seq": str(length)}])
        assert judged.fits is fits


def test_a_row_without_a_length_takes_the_one_it_is_named_after() -> None:
    row = {**recipe_row(f"{LLAMA} gpus=8 gbs=8"), "cp": "4"}
    named = {**row, "seq": "", "recipe": "llama3_8b_sft_8gpu_h100_bf16_yarn_32k_config"}
    given, taken, unnamed = judge_rows([{**row, "seq": "32768"}, named, {**named, "recipe": "llama3_8b_sft_config"}])
    assert given.memory and taken.memory == given.memory and unnamed.memory is None
    (both,) = judge_rows([{**named, "seq": "4096"}])
    assert both.memory and both.memory.allocated_gib < given.memory.allocated_gib


@pytest.mark.parametrize(
    ("recipe", "kind", "found"),
    [
        ("llama31_8b_pretrain_2gpu_h100_bf16_config", "library", {"cross_entropy": "te", "grad_dtype": "fp32"}),
        ("llama31_8b_sft_2gpu_h100_bf16_config", "library", {"cross_entropy": "fused"}),
        ("qwen3_235b_a22b_pretrain_128gpu_b200_bf16_deepep_dev_config", "perf", {"moment_dtype": "bf16", "grad_dtype": "bf16"}),
        ("qwen3_235b_a22b_pretrain_128gpu_b200_bf16_config", "perf", {"moment_dtype": "fp32"}),
        ("deepseek_v3_pretrain_1024gpu_h100_bf16_config", "library", {"moment_dtype": "bf16", "master_dtype": "fp32"}),
        ("deepseek_v4_flash_sft_32gpu_h100_bf16_config", "library", {"moment_dtype": "fp32", "optimizer": "adam"}),
        ("deepseek_v4_flash_pretrain_32gpu_h100_bf16_muon_config", "library", {"optimizer": "muon", "sharding": "none"}),
        ("nemotron_3_super_sft_16gpu_h100_bf16_config", "library", {"master_dtype": "fp16", "moment_dtype": "bf16", "grad_dtype": "bf16"}),
    ],
)
def test_what_recipes_set_and_a_table_does_not_show(recipe: str, kind: str, found: dict[str, str]) -> None:
    (judged,) = judge_rows([{**recipe_row(f"{LLAMA} gpus=8 gbs=8"), "recipe": recipe, "kind": kind}])
    assert judged.layout and {name: getattr(judged.layout, name) for name in found} == found


def test_the_model_is_the_one_a_recipe_builds() -> None:
    def model(recipe: str, words: str) -> ModelSpec:
        (judged,) = judge_rows([{**recipe_row(f"{LLAMA} gpus=8 gbs=8"), **recipe_row(words), "recipe": recipe, "kind": "library"}])
        assert judged.model
        return judged.model

    full = catalog.model("deepseek-v3")
    assert model("deepseek_v3_sft_config", "model=deepseek-v3") == full
    assert model("deepseek_v3_pretrain_config", "model=deepseek-v3").vocab == 32000
    assert len(full.mtp) == len(model("deepseek_v3_sft_config", "model=deepseek-v3 mtp_num_layers=1").mtp) == 1
    for recipe, words in (("deepseek_v3_sft_config", "mtp_num_layers=0"), ("deepseek_v3_no_mtp_sft_config", "mtp_num_layers=")):
        assert model(recipe, f"model=deepseek-v3 {words}").mtp == ()


def test_adapters_keep_the_inputs_of_what_they_adapt() -> None:
    """LoRA sits on all linears of a layer: Transformer Engine keeps no input of a frozen weight, but its adapter keeps the same one."""
    row = recipe_row(f"{LLAMA} gpus=8 gbs=32 kind=library")
    (tuned,), (trained,) = (judge_rows([{**row, "task": task}]) for task in ("peft", "sft"))
    assert tuned.memory and trained.memory and tuned.memory.terms["activations"] == trained.memory.terms["activations"]
    assert tuned.memory.terms["optimizer"] == tuned.memory.terms["gradients"] == 0.0 < trained.memory.terms["optimizer"]


def test_vision_language_pretraining_freezes_the_language_model_where_its_recipe_does() -> None:
    row = recipe_row("gpu_type=H100 gpus=16 tp=4 pp=4 cp=1 gbs=32 seq=4096 sp=False precision=bf16 task=pretrain")

    def frozen(recipe: str, model: str, kind: str) -> bool:
        (judged,) = judge_rows([{**row, "recipe": recipe, "model": model, "kind": kind}])
        assert judged.memory
        return judged.memory.terms["optimizer"] == judged.memory.terms["gradients"] == 0.0

    assert frozen("qwen35_vl_27b_pretrain_16gpu_h100_bf16_mock_config", "qwen3.5-27b", "library")
    assert frozen("qwen3_vl_8b_pretrain_16gpu_h100_bf16_config", "qwen3-8b", "perf")
    assert not frozen("qwen35_vl_27b_pretrain_16gpu_h100_bf16_config", "qwen3.5-27b", "perf")
    assert not frozen("qwen3_8b_pretrain_16gpu_h100_bf16_config", "qwen3-8b", "library")
    assert frozen("step37_sft_4gpu_h100_bf16_flickr8k_smoke_config", "qwen3-8b", "library")
    assert not frozen("step37_sft_64gpu_h100_bf16_flickr8k_config", "qwen3-8b", "library")


def test_experts_without_a_tensor_size_are_whole_but_launched_as_split() -> None:
    row = recipe_row("model=gpt-oss-120b gpu_type=H100 gpus=48 tp=2 pp=6 cp=4 ep=4 gbs=4 seq=32768 sp=True precision=bf16")
    (judged,) = judge_rows([row])
    assert judged.legal and judged.layout and judged.layout.etp == 1  # the bias of its experts could not be split
    (whole,) = judge_rows([{**row, "ep": "1", "tp": "2", "pp": "4", "gpus": "32"}])
    assert whole.layout and whole.layout.etp == 2  # without expert parallelism they are split like everything else
    (judged,) = judge_rows([{**row, "ep": "8"}])
    assert "W2" in {finding.rule for finding in judged.findings}  # 48 GPUs hold pp=6 ep=8, but not with two ranks per expert


def test_models_the_catalog_does_not_describe_are_judged_by_the_other_rules() -> None:
    good = next(row for row in rows() if not row["notes"])
    for name in ("a_model_nobody_knows", "llama-3.1-nemotron-ultra-253b"):
        (judged,) = judge_rows([{**good, "model": name}])
        assert judged.model is None and judged.layout is not None


def test_unreadable_rows_are_findings() -> None:
    good = rows()[-1]
    for field, value in [
        ("tp", "two"),
        ("gpus", ""),
        ("gpus", "-8"),
        ("gpu_type", "H42"),
        ("pp_layout", "Ex"),
        ("recompute", "selective:x"),
    ]:
        (judged,) = judge_rows([{**good, field: value}])
        assert not judged.legal and judged.findings[0].why


@pytest.mark.parametrize(
    ("model", "title", "inside", "outside"),
    [  # one model of each size class
        ("qwen3-0.6b", "< 1B", Layout(dp=8), Layout(tp=2)),
        ("llama-3.1-8b", "1-10B", Layout(tp=2, dp=4), Layout(tp=1)),
        ("qwen2.5-32b", "10-70B", Layout(tp=4, pp=2), Layout(tp=2, pp=8)),
        ("llama-3.1-70b", "70-175B", Layout(tp=8, pp=4), Layout(tp=4, pp=4)),
        ("llama-3.1-405b", "175-500B", Layout(tp=8, pp=8, cp=2), Layout(tp=8, pp=4, cp=1)),
    ],
)
def test_dense_sizes(model: str, title: str, inside: Layout, outside: Layout) -> None:
    (first, *_) = suggestions(catalog.model(model), catalog.cluster("h100", 512), seq_len=1024)
    assert first.rule == "S1" and title in first.title
    assert departures(inside, (first,)) == ()
    assert departures(outside, (first,))


def test_rows_of_the_dense_table() -> None:
    assert [(row[1], row[2:]) for row in DENSE] == [
        ("< 1B", ((1, 8), (1, 1), (1, 1), (1, 1))),
        ("1-10B", ((8, 16), (2, 4), (1, 1), (1, 1))),
        ("10-70B", ((16, 64), (4, 8), (2, 4), (1, 1))),
        ("70-175B", ((64, 256), (8, 8), (4, 8), (1, 1))),
        ("175-500B", ((256, 1024), (8, 8), (8, 16), (2, 2))),
    ]


@pytest.mark.parametrize(
    ("model", "name", "degrees"),
    [
        ("olmoe-1b-7b", "OLMoE 7B", {"tp": 1, "pp": 1, "ep": 8}),
        ("moonlight-16b-a3b", "Moonlight 16B", {"tp": 2, "pp": 1, "ep": 8}),
        ("deepseek-v2", "DeepSeek-V2 236B", {"tp": 1, "pp": 4, "ep": 32}),
        ("glm-4.5-air", "GLM-4.5 Air 106B", {"tp": 1, "pp": 4, "ep": 8}),
        ("qwen3-30b-a3b", "Qwen3 30B-A3B", {"tp": 4, "pp": 2, "ep": 4}),
        ("glm-4.5", "GLM-4.5 355B", {"tp": 2, "pp": 8, "ep": 16}),
        ("qwen3-235b-a22b", "Qwen3 235B-A22B", {"tp": 4, "pp": 16, "ep": 8}),
        ("deepseek-v3", "DeepSeek-V3 671B", {"tp": 2, "pp": 16, "ep": 64}),
        ("kimi-k2", "Kimi-K2 1T", {"tp": 2, "pp": 16, "ep": 32}),
    ],
)
def test_every_expert_model_finds_its_row(model: str, name: str, degrees: dict[str, int]) -> None:
    (first, *_) = suggestions(catalog.model(model), catalog.cluster("h100", 1024), seq_len=4096)
    assert first.advice.startswith(f"as {name}:")
    assert {field: first.ranges[field][0] for field in degrees} == degrees
    assert len(MOE) == 9


def test_deepseek_v3_needs_a_thousand_gpus() -> None:
    """The table names 256 GPUs for a layout that needs 1024."""
    (first, *_) = suggestions(catalog.model("deepseek-v3"), catalog.cluster("h100", 256), seq_len=4096)
    assert "needs 1024 GPUs, which 256 GPUs do not give" in first.advice
    assert min_world(Layout(tp=2, pp=16, ep=64)) == 1024


@pytest.mark.parametrize(
    ("seq_len", "cp", "sp"),
    [(1024, (1, 1), False), (2048, (1, 1), True), (4096, (1, 1), True), (8192, (2, 2), True), (65536, (4, 8), True)],
)
def test_sequence_lengths(seq_len: int, cp: tuple[int, int], sp: bool) -> None:
    last = suggestions(catalog.model("llama-3.1-70b"), catalog.cluster("h100", 64), seq_len=seq_len)[-1]
    assert last.ranges["cp"] == cp and ("sp" in last.ranges) is sp
    assert len(SEQUENCE) == 4


def test_topology() -> None:
    model = catalog.model("llama-3.1-70b")

    def most(**where: str | int) -> int:
        return suggestions(model, catalog.cluster("h100", 64, **where), seq_len=4096)[1].ranges["tp"][1]

    assert most() == 8
    assert most(gpus_per_node=4) == 4
    assert most(interconnect="ethernet-100") == 4


def test_departures_say_what_the_table_would_write() -> None:
    model, cluster = catalog.model("llama-3.1-70b"), catalog.cluster("h100", 64)
    found = table_findings(model, cluster, seq_len=8192, layout=Layout(tp=4, pp=4, cp=1, dp=4, sp=False))
    assert [finding.rule for finding in found] == ["S1", "S3", "S4"]
    assert "tp=8" in found[0].try_ and "tp=4" in found[0].given
    assert found[1].try_ == ""
    assert "cp=2" in found[2].try_ and "sp=true" in found[2].try_
    assert all(finding.severity == "info" for finding in found)
    assert [finding.try_ for finding in table_findings(model, cluster, seq_len=8192)] == ["", "", ""]

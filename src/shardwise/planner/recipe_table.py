"""Judging a table of published layouts, one row per recipe, all rows at once: legal, and does it fit its hardware.

Columns: recipe, model, hf_id, gpus, gpu_type, precision, tp, pp, vpp, cp, ep, etp, sp, mbs, gbs, seq, recompute, use_megatron_fsdp,
pp_layout, and, where the table has them, kind, task, offload and mtp_num_layers. What such tables leave out is filled in with what
Megatron Bridge does: `SETTINGS`, `FROZEN` and `MOCK_VOCABULARY` below; an expert tensor size that is not given is 1 when the model is built
with expert parallelism, TP without it and when the launcher sizes the world; fine-tuning of adapters is LoRA; the communication of context
parallelism follows the model.

The GPUs a performance recipe names are those it is run on. Those a library recipe names are the ranks of one model copy, computed from its
degrees; it is run on whole nodes, and more nodes share its optimizer state (Megatron Bridge, skills/adding-model-support/recipe-patterns.md
and skills/mbridge-recipe-recommender/SKILL.md, where the column is called "GPUs (min)"). So a library recipe is judged on whole nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from shardwise.errors import Finding, ShardwiseError
from shardwise.planner.estimator import Estimator
from shardwise.planner.memory import MemoryEstimate
from shardwise.planner.rates import DEFAULT_PROFILE
from shardwise.planner.rules import check_layout, is_legal
from shardwise.planner.rules.alternatives import natural_cp_comm
from shardwise.planner.runs import parse_offload
from shardwise.planner.space import number_formats
from shardwise.spec import catalog, grammar
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec

COLUMNS = ("recipe", "model", "gpus", "gpu_type", "tp", "pp", "cp", "ep", "etp", "mbs", "gbs")
# Below, patterns match "kind recipe"; the files are those of Megatron Bridge under src/megatron/bridge.
# What recipes set and the table does not show; all that match apply.
SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    # perf_recipes/_common.py, `_benchmark_common`
    ("perf ", {"grad_dtype": "bf16", "cross_entropy": "te"}),
    # `cross_entropy_fusion_impl` in recipes/llama, deepseek, minimax and nemotronh; the other families' is Megatron Core's own
    (r"library (llama\w+|nemotron_3_(super|ultra))_pretrain_|library (deepseek_v4|minimax_m3)_", {"cross_entropy": "te"}),
    # `exp_avg_dtype`: recipes and perf_recipes of deepseek, kimi and moonlight; perf_recipes/qwen/common.py for the tuned Qwen3 ones
    (r"\w+ (deepseek_v[23]|kimi|moonlight)|perf (deepseek|qwen3_\w+_dev_)|library deepseek_v4_\w+_fp8mx_", {"moment_dtype": "bf16"}),
    # recipes/deepseek: the library's MXFP8 keeps BF16 parameters, and Muon runs without the distributed optimizer
    (r"library deepseek_v4_\w+_fp8mx_", {"param_dtype": "bf16"}),
    (r"library deepseek_v4_\w+_muon_", {"optimizer": "muon", "sharding": "none"}),
    # "reduced-memory optimizer state" in recipes/nemotronh/h100/nemotron_3_super.py; recipes/nemotron_omni; recipes/minimax
    (
        r"library nemotron_(3_super_(pretrain|sft)_16gpu|omni_\w+_long_context_sft)_",
        {"grad_dtype": "bf16", "master_dtype": "fp16", "moment_dtype": "bf16"},
    ),
    (r"library minimax_m3_pretrain_", {"grad_dtype": "bf16", "moment_dtype": "bf16"}),
)
# Vision-language pretraining on mock data freezes the language model (`freeze_language_model` in recipes/qwen_vl); performance recipes of
# Qwen3-VL start from it and leave it so, those of Qwen3.5-VL train everything (perf_recipes/qwen_vl/common.py). The smoke test of Step 3.7
# freezes it too, against its own docstring (recipes/stepfun/h100/step37.py).
FROZEN = re.compile(r"\w+ (qwen3_vl_\w+_pretrain_|qwen35_vl_\w+_pretrain_\w+_mock_|step37_sft_\w+_smoke_config)")
# Pretraining on mock data takes its vocabulary from the null tokenizer (`use_tokenizer_vocab_size` in recipes/common.py, 32,000 words;
# pull request 4996). Performance recipes turn that off; other families give the tokenizer their model's vocabulary.
MOCK_VOCABULARY = re.compile(r"library (llama|qwen2|gemma3_1b|glm45|gpt_oss|deepseek_v[23])\w*_pretrain_"), 32000
# No multi-token prediction whatever the model has: the name says so, or GLM-4.5V, which is GLM-4.5-Air without (recipes/glm_vl).
WITHOUT_MTP = re.compile(r"\w+ (\w+_no_mtp_|glm_45v_)")
# Samples of vision-language fine-tuning are packed, or padded to the longest of their batch, not to the printed length
# (`_sft_common_vlm` in recipes/common.py, data/packing/in_batch.py); the printed length is the longest sample they accept.
UNPADDED = re.compile(r"library (\w+_vl_\w+|glm_45v|qwen3_omni\w+|nemotron_omni\w+)_(sft|peft)_")
SAMPLE_STEP = 128  # lengths are padded to a multiple of it
NAMED_LENGTH = re.compile(r"_(\d+)k_config$")  # of a row without one: thousands (1,024) of tokens


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A row with its findings and the memory of its heaviest rank.

    `model` is None when the catalog does not know it: rules about the model kept silent and memory is not predicted. gpus: the world
    judged. fits_named: whether it also fits the GPUs it names, where those are fewer. Of a row that does not fit, fits_from: the least
    world its batch allows that does, as a multiple of its GPUs; most: the largest world its batch allows and the memory there, when that
    does not fit either; longest: the longest sample that fits, where samples may be shorter than the table says.
    """

    recipe: str
    model: ModelSpec | None
    layout: Layout | None
    findings: tuple[Finding, ...]
    memory: MemoryEstimate | None = None
    gpus: int = 0
    fits_named: bool | None = None
    fits_from: int | None = None
    most: tuple[int, MemoryEstimate] | None = None
    longest: int | None = None

    @property
    def legal(self) -> bool:
        return is_legal(self.findings)

    @property
    def fits(self) -> bool | None:
        """None where memory is not predicted."""
        return self.memory.fits if self.memory else None


def _key(row: Mapping[str, str]) -> str:
    return f"{row.get('kind', '')} {row.get('recipe', '')}"


def _model(row: Mapping[str, str]) -> ModelSpec | None:
    """The model as the recipe builds it."""
    names = (catalog.find_model(name) for name in (row.get("model"), row.get("hf_id")) if name)
    found = next((catalog.model(str(key)) for key in names if key in catalog.model_names()), None)
    if found is None:
        return None
    pattern, words = MOCK_VOCABULARY
    if pattern.match(_key(row)):
        found = replace(found, vocab=words)
    depth = row.get("mtp_num_layers", "")
    if depth.isascii() and depth.isdigit():  # more than the model has: its layer is applied again
        found = replace(found, mtp=found.mtp[: int(depth)])
    return replace(found, mtp=()) if WITHOUT_MTP.match(_key(row)) else found


def _words(row: Mapping[str, str], model: ModelSpec | None) -> list[str]:
    words = [f"{name}={row[name]}" for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "sp", "mbs", "gbs", "precision") if row.get(name)]
    if model and model.moe and not row.get("etp") and row.get("ep") in (None, "", "1"):
        words.append(f"etp={row.get('tp')}")
    if row.get("pp_layout"):
        words.append(f"pipeline_layout={row['pp_layout']}")
    if row.get("use_megatron_fsdp") == "True":
        words.append("sharding=megatron_fsdp")
    recompute = row.get("recompute", "").replace("?", "").replace("(default)", "")
    if recompute not in ("", "none", "selective:none"):
        words.append(f"recompute={recompute}")
    if model:
        words.append(f"cp_comm={natural_cp_comm(model)}")
    return words


def _base(row: Mapping[str, str]) -> Layout:
    """What the row does not say."""
    precision = grammar.read_values([f"precision={row.get('precision') or 'bf16'}"])["precision"]
    fields: dict[str, Any] = number_formats("bridge", precision)
    for pattern, settings in SETTINGS:
        if re.match(pattern, _key(row)):
            fields |= settings
    if row.get("task") == "peft" or FROZEN.match(_key(row)):
        fields["peft"] = "lora"  # a frozen model has no gradients and no optimizer state, with or without adapters
    return Layout(offload=parse_offload(row.get("offload", "")), **fields)


def _length(row: Mapping[str, str]) -> int | None:
    seq, named = row.get("seq", ""), NAMED_LENGTH.search(row.get("recipe", ""))
    if seq.isascii() and seq.isdigit() and int(seq):
        return int(seq)
    return 1024 * int(named[1]) if named else None


def _judge(row: Mapping[str, str], framework: str) -> Judgement:
    """Findings of a row on the GPUs it names; what cannot be read is a finding too."""
    name, model = row.get("recipe", ""), _model(row)
    try:
        gpus = grammar.read_values([f"dp={row.get('gpus', '')}"])["dp"]  # a count, read and refused like one
        layout = grammar.parse(_words(row, model), world=gpus, base=_base(row))
        cluster = catalog.cluster(row.get("gpu_type", ""), gpus)
        seq_len = _length(row)
        findings = check_layout(model, layout, cluster, seq_len=seq_len, framework=framework)
        if layout.ep > 1 and not row.get("etp"):  # benchmark_parallelism.data_parallel_size reads it as TP
            launched = check_layout(model, layout.replace(etp=layout.tp), cluster, seq_len=seq_len, framework=framework)
            findings += tuple(finding for finding in launched if finding.rule == "W2" and finding not in findings)
        memory = None
        if model and seq_len and is_legal(findings):
            memory = Estimator(model, cluster, seq_len=seq_len, stack=DEFAULT_PROFILE).memory(layout)
    except ShardwiseError as error:
        found = getattr(error, "findings", None)
        unread = Finding(rule="G0", severity="error", given=name, why=str(error), try_="a row the catalog can read", source="recipe table")
        return Judgement(recipe=name, model=model, layout=None, findings=found or (unread,))
    return Judgement(recipe=name, model=model, layout=layout, findings=findings, memory=memory, gpus=gpus)


def judge_row(row: Mapping[str, str], framework: str = "bridge") -> Judgement:
    """Findings of one row and whether it fits; a library recipe on whole nodes where its batch allows that."""
    judged = _judge(row, framework)
    if row.get("kind") == "library" and judged.legal:
        whole = lcm(judged.gpus, catalog.cluster(row["gpu_type"], judged.gpus).gpus_per_node)
        grown = _judge({**row, "gpus": str(whole)}, framework)
        if grown.legal:
            judged = replace(grown, fits_named=judged.fits)
    return _outlook(row, judged, framework) if judged.fits is False else judged


def _outlook(row: Mapping[str, str], judged: Judgement, framework: str) -> Judgement:
    """What a row that does not fit would need: more GPUs, shorter samples."""
    assert judged.layout and judged.memory
    replicas = judged.layout.microbatches
    most = (judged.gpus, judged.memory)
    for times in (times for times in range(2, replicas + 1) if replicas % times == 0):
        grown = _judge({**row, "gpus": str(times * judged.gpus)}, framework)
        if not grown.legal or grown.memory is None:
            break
        most = (grown.gpus, grown.memory)
        if grown.fits:
            judged = replace(judged, fits_from=grown.gpus)
            break
    longest = _longest(row, judged, framework) if UNPADDED.match(_key(row)) else None
    return replace(judged, most=None if judged.fits_from else most, longest=longest)


def _longest(row: Mapping[str, str], judged: Judgement, framework: str) -> int | None:
    """The longest sample of a row with which its batches fit, or None if no length does."""
    short, long = 0, (_length(row) or 0) // SAMPLE_STEP  # the longest is known not to fit
    while long - short > 1:
        middle = (short + long) // 2
        fits = _judge({**row, "gpus": str(judged.gpus), "seq": str(middle * SAMPLE_STEP)}, framework).fits
        short, long = (middle, long) if fits else (short, middle)
    return short * SAMPLE_STEP or None


def judge_rows(rows: Iterable[Mapping[str, str]], framework: str = "bridge") -> tuple[Judgement, ...]:
    return tuple(judge_row(row, framework) for row in rows)

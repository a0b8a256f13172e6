"""Judging a table of published layouts, one row per recipe, all rows at once: legal, and does it fit its hardware.

Columns: recipe, model, hf_id, gpus, gpu_type, precision, tp, pp, vpp, cp, ep, etp, sp, mbs, gbs, seq, recompute, use_megatron_fsdp,
pp_layout, and, where the table has them, kind, task and offload. What such tables leave out is filled in with what Megatron Bridge
does: an expert tensor size that is not given is 1 when the model is built but TP when the launcher sizes the world, performance recipes
reduce gradients in bf16 and use the loss of Transformer Engine (`_benchmark_common`), fine-tuning of adapters is LoRA, pretraining of
Qwen's vision-language models on mock data freezes the language model, the DeepSeek family keeps bf16 moments, and the communication of
context parallelism follows the model's attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
# Vision-language pretraining on mock data freezes the language model (`freeze_language_model` in Megatron Bridge's recipes/qwen_vl);
# performance recipes of Qwen3-VL start from it and leave it so, those of Qwen3.5-VL train everything (perf_recipes/qwen_vl/common.py).
FROZEN = re.compile(r"^qwen3_vl_\w+_pretrain_|^qwen35_vl_\w+_pretrain_\w+_mock_")
BF16_MOMENTS = re.compile("deepseek|moonlight|kimi", re.I)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A row with its findings and the memory of its heaviest rank.

    `model` is None when the catalog does not know it: rules about the model kept silent and memory is not predicted.
    """

    recipe: str
    model: ModelSpec | None
    layout: Layout | None
    findings: tuple[Finding, ...]
    memory: MemoryEstimate | None = None

    @property
    def legal(self) -> bool:
        return is_legal(self.findings)

    @property
    def fits(self) -> bool | None:
        """None where memory is not predicted."""
        return self.memory.fits if self.memory else None


def _model(row: Mapping[str, str]) -> ModelSpec | None:
    for name in (row.get("model"), row.get("hf_id")):
        key = catalog.find_model(name) if name else None
        if key in catalog.model_names():
            return catalog.model(str(key))
    return None


def _words(row: Mapping[str, str], model: ModelSpec | None) -> list[str]:
    words = [f"{name}={row[name]}" for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "sp", "mbs", "gbs", "precision") if row.get(name)]
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
    if row.get("kind") == "perf":
        fields |= {"grad_dtype": "bf16", "cross_entropy": "te"}
    if row.get("task") == "peft" or FROZEN.search(row.get("recipe", "")):
        fields["peft"] = "lora"  # a frozen model has no gradients and no optimizer state, with or without adapters
    if BF16_MOMENTS.search(row.get("model", "")):
        fields["moment_dtype"] = "bf16"
    return Layout(offload=parse_offload(row.get("offload", "")), **fields)


def judge_row(row: Mapping[str, str], framework: str = "bridge") -> Judgement:
    """Findings of one row; what cannot be read is a finding too."""
    name, model = row.get("recipe", ""), _model(row)
    try:
        gpus = grammar.read_values([f"dp={row.get('gpus', '')}"])["dp"]  # a count, read and refused like one
        layout = grammar.parse(_words(row, model), world=gpus, base=_base(row))
        cluster = catalog.cluster(row.get("gpu_type", ""), gpus)
        seq = row.get("seq", "")
        seq_len = int(seq) if seq.isascii() and seq.isdigit() and int(seq) else None
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
    return Judgement(recipe=name, model=model, layout=layout, findings=findings, memory=memory)


def judge_rows(rows: Iterable[Mapping[str, str]], framework: str = "bridge") -> tuple[Judgement, ...]:
    return tuple(judge_row(row, framework) for row in rows)

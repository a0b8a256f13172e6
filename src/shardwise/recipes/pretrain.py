"""Pretraining recipes under the alias names of Megatron Bridge, and a tiny variant of each that runs on a CPU in seconds.

A recipe is a function without arguments that returns a `RunConfig`. Layouts, batches and schedules are those of Bridge's recipes, the
architectures those of the model catalog, the data mock data with a vocabulary of 32,000 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardwise.errors import InputError
from shardwise.spec.catalog.tables import table
from shardwise.train.config import (
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
    TrainConfig,
    ValidationConfig,
)
from shardwise.train.model import trainable_fields

Recipe = Callable[[], RunConfig]
_LLAMA3_ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
_LLAMA32_ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_LLAMA31_ROPE = {**_LLAMA32_ROPE, "factor": 8.0}
# transformers fields that the tiny variants shrink; those a model has
_TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "moe_intermediate_size": 32, "num_local_experts": 8, "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """One row of the table. layout: keys of the model section. hf: transformers fields beyond those of the catalog."""

    catalog: str
    layout: Mapping[str, Any] = field(default_factory=dict)
    hf: Mapping[str, Any] = field(default_factory=dict)
    seq_length: int = 4096
    global_batch_size: int = 512
    micro_batch_size: int = 1
    warmup: int = 2000
    iterations: int = 1_168_251
    lr: float = 3e-4


def _layout(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, *, sp: bool = False, vpp: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "sequence_parallel": sp,
        "virtual_pipeline_model_parallel_size": vpp,
        **more,
    }


_AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.001}
_SEQ_AUX = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.001}
_BIAS = {**_SEQ_AUX, "moe_aux_loss_coeff": 0.0001, "moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 0.001}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
_LLAMA3 = {"hf": {"rope_parameters": _LLAMA3_ROPE}, "seq_length": 8192}
_LLAMA31 = {"hf": {"rope_parameters": _LLAMA31_ROPE}}
_LLAMA32 = {"hf": {"rope_parameters": _LLAMA32_ROPE}, "seq_length": 8192}
_QWEN3 = {"hf": {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}, "global_batch_size": 32, "warmup": 500}

TABLE: dict[str, Pretraining] = {
    "llama2_7b": Pretraining(catalog="llama-2-7b", layout=_layout(2)),
    "llama3_8b": Pretraining(catalog="llama-3-8b", layout=_layout(1, 1, 2), **_LLAMA3),
    "llama3_70b": Pretraining(catalog="llama-3-70b", layout=_layout(4, 4, 2, sp=True, vpp=5), **_LLAMA3),
    "llama31_8b": Pretraining(catalog="llama-3.1-8b", layout=_layout(1, 1, 2), seq_length=8192, **_LLAMA31),
    "llama31_70b": Pretraining(catalog="llama-3.1-70b", layout=_layout(4, 4, 2, sp=True, vpp=5), seq_length=8192, **_LLAMA31),
    "llama31_405b": Pretraining(catalog="llama-3.1-405b", layout=_layout(8, 8, 4, sp=True, vpp=2, **_ENDS), seq_length=131_072, **_LLAMA31),
    "llama32_1b": Pretraining(catalog="llama-3.2-1b", **_LLAMA32),
    "llama32_3b": Pretraining(catalog="llama-3.2-3b", **_LLAMA32),
    "qwen25_500m": Pretraining(catalog="qwen2.5-0.5b", **_QWEN3),
    "qwen25_7b": Pretraining(catalog="qwen2.5-7b", layout=_layout(2), **_QWEN3),
    "qwen3_600m": Pretraining(catalog="qwen3-0.6b", micro_batch_size=2, **_QWEN3),
    "qwen3_8b": Pretraining(catalog="qwen3-8b", layout=_layout(4), micro_batch_size=2, **_QWEN3),
    "qwen3_30b_a3b": Pretraining(catalog="qwen3-30b-a3b", layout=_layout(4, 2, 1, 4, sp=True, **_AUX), micro_batch_size=2, **_QWEN3),
    "qwen3_235b_a22b": Pretraining(catalog="qwen3-235b-a22b", layout=_layout(4, 16, 2, 8, sp=True, **_AUX, **_ENDS), **_QWEN3),
    "mistral_7b": Pretraining(catalog="mistral-7b", layout=_layout(2)),
    "gemma_2b": Pretraining(catalog="gemma-2b", layout=_layout(1)),
    "gemma_7b": Pretraining(catalog="gemma-7b", layout=_layout(4)),
    "mixtral_8x7b": Pretraining(catalog="mixtral-8x7b", layout=_layout(1, 4, 1, 8, **{**_AUX, "moe_aux_loss_coeff": 0.02})),
    "olmoe_7b": Pretraining(
        catalog="olmoe-1b-7b",
        layout=_layout(1, 1, 1, 8, **{**_SEQ_AUX, "moe_aux_loss_coeff": 0.01}),
        hf={"norm_topk_prob": False},
        global_batch_size=2048,
        iterations=500_000,
    ),
    "moonlight_16b": Pretraining(
        catalog="moonlight-16b-a3b",
        layout=_layout(2, 1, 1, 8, sp=True, **_BIAS),
        hf={"q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446},
        global_batch_size=2048,
        iterations=500_000,
    ),
    "deepseek_v2_lite": Pretraining(
        catalog="deepseek-v2-lite", layout=_layout(1, 1, 1, 8, **_SEQ_AUX, **_FULL), hf={"q_lora_rank": None}, iterations=1_000_000
    ),
    "deepseek_v2": Pretraining(catalog="deepseek-v2", layout=_layout(1, 4, 1, 32, **_SEQ_AUX)),
    "deepseek_v3": Pretraining(
        catalog="deepseek-v3",
        layout=_layout(2, 16, 1, 64, sp=True, **_BIAS),
        hf={"routed_scaling_factor": 2.5},
        global_batch_size=4096,
    ),
    "glm45_air_106b": Pretraining(catalog="glm-4.5-air", layout=_layout(1, 4, 1, 8, **_BIAS), global_batch_size=2048, lr=1e-4),
}


def _fields(row: Pretraining) -> dict[str, Any]:
    return trainable_fields({**table("models")[row.catalog]["config"], **row.hf})


def pretrain_config(name: str) -> RunConfig:
    """The full-size recipe of a row of the table."""
    row = TABLE[name]
    fields = _fields(row)
    return RunConfig(
        model=ModelConfig(model_type=fields.pop("model_type"), hf=fields, seq_length=row.seq_length, **row.layout),
        train=TrainConfig(train_iters=row.iterations, global_batch_size=row.global_batch_size, micro_batch_size=row.micro_batch_size),
        validation=ValidationConfig(),
        optimizer=OptimizerConfig(lr=row.lr, min_lr=row.lr / 10),
        scheduler=SchedulerConfig(lr_warmup_iters=row.warmup),
    )


def tiny_config(name: str) -> RunConfig:
    """The same family, small: one rank, 4 layers of 64 features, sequences of 64 tokens. Ratios that layouts depend on are kept small."""
    row = TABLE[name]
    fields = _fields(row)
    heads, key_heads = fields["num_attention_heads"], fields.get("num_key_value_heads", fields["num_attention_heads"])
    small = {key: value for key, value in _TINY.items() if fields.get(key) is not None}
    small["num_key_value_heads"] = 4 if key_heads == heads else 1 if key_heads == 1 else 2
    if fields.get("n_group") == 1:
        small["n_group"] = 1
    if isinstance(fields.get("rope_parameters"), dict):
        small["rope_parameters"] = {"rope_type": "default", "rope_theta": fields["rope_parameters"]["rope_theta"]}
    fields.update(small)
    routing = {key: value for key, value in row.layout.items() if key.startswith("moe_")}
    return RunConfig(
        model=ModelConfig(model_type=fields.pop("model_type"), hf=fields, seq_length=64, **routing),
        train=TrainConfig(train_iters=10, global_batch_size=8, micro_batch_size=1),
        validation=ValidationConfig(eval_iters=1, eval_interval=None),
        scheduler=SchedulerConfig(lr_warmup_iters=2),
    )


def _named() -> dict[str, Recipe]:
    result: dict[str, Recipe] = {}
    for name in TABLE:
        result[f"{name}_pretrain_config"] = partial(pretrain_config, name)
        result[f"{name}_tiny_pretrain_config"] = partial(tiny_config, name)
    return result


RECIPES: dict[str, Recipe] = _named()


def recipe(name: str) -> RunConfig:
    """The configuration of a recipe. Raises `InputError` with the nearest names."""
    if name not in RECIPES:
        from difflib import get_close_matches

        near = get_close_matches(name, RECIPES, n=3, cutoff=0.5)
        raise InputError(given=f"--recipe {name}", why="there is no such recipe", try_=" or ".join(near) or "shardwise recipes lists them")
    return RECIPES[name]()

"""Tiny models of every family, and layouts that span the axes."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.spec.layout import Layout
from shardwise.train.batches import Samples, packed_samples, simple_samples
from shardwise.train.model import transformers_config

VOCAB = 61  # odd: it splits unevenly over tensor parallel ranks
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_SIZES},
    "qwen3": {"model_type": "qwen3", **_SIZES, "head_dim": 8},
    "mistral": {"model_type": "mistral", **_SIZES, "head_dim": 8, "sliding_window": 5},
    "gemma": {"model_type": "gemma", **_SIZES, "head_dim": 8, "num_key_value_heads": 1},
    "olmo": {"model_type": "olmo", **_SIZES},
    "olmo2": {"model_type": "olmo2", **_SIZES},
    "phi": {"model_type": "phi", **_SIZES, "num_key_value_heads": 4},
    "gpt_neox": {"model_type": "gpt_neox", **_SIZES},
    "mixtral": {"model_type": "mixtral", **_SIZES, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe", **_SIZES, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "olmoe": {"model_type": "olmoe", **_SIZES, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", **_SIZES, **_MLA, "n_group": 2, "topk_group": 1},
}  # fmt: skip
# families whose plans or attention have something of their own, with the layouts that show it
SPECIAL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "deepseek_v2": (
        {"model_type": "deepseek_v2", **_SIZES, **_MLA, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
        ("tp=2 sp=true ep=2", "cp=2"),
    ),
    "qwen2_moe": (
        {
            "model_type": "qwen2_moe", **_SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1,
        },
        ("tp=2 sp=true ep=2",),
    ),
    "gpt2": (
        {
            "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
        ("pp=2", "cp=2", "tp=2"),
    ),
    "gemma2": ({"model_type": "gemma2", **_SIZES, "head_dim": 8, "sliding_window": 5}, ("tp=2 sp=true", "pp=2")),
    "gemma3_text": (
        {
            "model_type": "gemma3_text", **_SIZES, "head_dim": 8, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        ("pp=2", "cp=2"),
    ),
    "phi3": ({"model_type": "phi3", **_SIZES}, ("tp=2 sp=true",)),
    "gpt_oss": (
        {"model_type": "gpt_oss", **_SIZES, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        ("tp=2 sp=true ep=2", "pp=2"),
    ),
}  # fmt: skip
DENSE = ("llama", "qwen3", "gemma")
MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3")


def config(family: str, **changes: Any) -> Any:
    fields = FAMILIES[family] if family in FAMILIES else SPECIAL[family][0]
    return transformers_config({**fields, **changes})


def samples(step: int, *, gbs: int, length: int, packed: bool = False, vocab: int = VOCAB) -> Samples:
    """The same on every rank."""
    tokens = torch.randint(0, vocab, (gbs, length + 1), generator=torch.Generator().manual_seed(100 + step))
    return packed_samples(tokens, end=7) if packed else simple_samples(tokens)


def steps(count: int = 5, *, gbs: int = 4, length: int = 13, packed: bool = False) -> list[Samples]:
    return [samples(step, gbs=gbs, length=length, packed=packed) for step in range(count)]


def layout(world: int, words: str, *, gbs: int = 4) -> Layout:
    """`tp=2 sp=true ...` on `world` ranks."""
    from shardwise.spec import grammar

    return grammar.parse([*words.split(), f"gbs={gbs}", "precision=fp32", "param_dtype=fp32", "master_dtype=none"], world=world)

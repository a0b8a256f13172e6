"""Options of a training framework that are not part of a layout, as words: `moe_shared_expert_overlap=true nccl_ub=true`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from shardwise.errors import InputError
from shardwise.spec import grammar

# Every option a rule reads, by its Megatron name without section, and environment variables.
NAMES = frozenset({
    "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "NCCL_GRAPH_REGISTER", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_CPU_OFFLOAD_V1",
    "PYTORCH_CUDA_ALLOC_CONF", "average_in_collective", "batch_invariant_mode", "batch_p2p_comm", "bf16", "bucket_size",
    "calculate_per_token_loss", "ckpt_format", "compile", "cp_comm_type", "cross_entropy_fusion_impl", "cross_entropy_loss_fusion",
    "cuda_graph_scope", "dataset.seq_length", "decrease_batch_size_if_needed", "defer_embedding_wgrad_compute",
    "delay_wgrad_compute", "deterministic_mode", "distribute_saved_activations", "eval_context_parallel_size",
    "eval_global_batch_size", "eval_micro_batch_size", "expert_tensor_parallel_size", "finetuning", "fp16", "fp4", "fp8",
    "fsdp_manual_registration", "gradient_accumulation_fusion", "hybrid_context_parallel", "lr_decay_iters", "lr_decay_samples",
    "lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples", "max_steps", "megatron_fsdp_version", "mla_down_proj_fusion",
    "moe_aux_loss_coeff", "moe_flex_dispatcher_backend", "moe_grouped_gemm", "moe_router_dtype", "moe_router_force_load_balancing",
    "moe_router_load_balancing_type", "moe_router_padding_for_quantization", "moe_shared_expert_overlap",
    "moe_token_dispatcher_type", "nccl_ub", "num_buckets", "num_epochs", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "order", "overlap_p2p_comm", "overlap_p2p_comm_warmup_flush",
    "overlap_param_gather_with_optimizer_step", "pack_sequences_in_batch", "packed_sequence_size", "pad_seq_to_mult",
    "pipeline_dtype", "pipeline_model_parallel_comm_backend", "pipeline_model_parallel_layout", "rampup_batch_size",
    "reuse_grad_buf_for_mxfp8_param_ag", "seed", "tensor_parallel_num_weight_shards", "train_iters", "train_samples",
    "transformer_impl", "use_decentralized_pg", "use_gloo_process_groups", "use_megatron_fsdp", "use_precision_aware_optimizer",
    "use_te_rng_tracker", "use_torch_fsdp2", "use_tp_pp_dp_mapping", "variable_seq_lengths",
})  # fmt: skip
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}


def option_of(key: str) -> str | None:
    """The option a key names: with `--`, dashes, or the section of an override in front. None if it names none."""
    bare = key.strip().lstrip("+-")
    for name in (bare, bare.replace("-", "_"), bare.replace("-", "_").rsplit(".", 1)[-1]):
        if name in NAMES:
            return name
    return None


def value_of(text: str) -> Any:
    """true, false, none, whole numbers, numbers, [lists], and words."""
    text = text.strip().strip("'\"")
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if text.startswith("[") and text.endswith("]"):
        return [value_of(part) for part in text[1:-1].split(",") if part.strip()]
    if re.fullmatch(r"[+-]?[0-9]{1,15}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[+-]?[0-9]{0,15}\.?[0-9]{1,15}(e[+-]?[0-9]{1,2})?", text, re.I) else text


def split_options(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """(words of the layout, options).

    A word that names both is both; the flexible dispatcher is in a layout by its backend. Raises `InputError` for a word that is
    neither but near an option.
    """
    layout: list[str] = []
    options: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for word in words:
        key, _, text = word.partition("=")
        option, field = option_of(key), grammar.field_of(key)
        if option is not None:
            options[option] = value_of(text)
        if field is not None and not (field == "dispatcher" and text.strip().lower() == "flex"):
            layout.append(word)
        elif option is None:
            near = get_close_matches(key.strip().lstrip("+-").replace("-", "_").rsplit(".", 1)[-1], NAMES, n=1, cutoff=0.8)
            if near and not get_close_matches(near[0], grammar.names(), n=1, cutoff=0.9):
                unknown[word] = near[0]
            else:
                layout.append(word)  # the grammar says what is wrong with it
    if unknown:
        why = "there is no such layout field or framework option"
        raise InputError(given=" ".join(unknown), why=why, try_=" ".join(f"{name}=VALUE" for name in unknown.values()))
    if options.get("moe_token_dispatcher_type") == "flex" and not any(
        grammar.field_of(word.partition("=")[0]) == "dispatcher" for word in layout
    ):
        layout.append(f"dispatcher={options.get('moe_flex_dispatcher_backend') or 'deepep'}")
    return layout, options

"""Options of a training framework that are not part of a layout, as words: `moe_shared_expert_overlap=true nccl_ub=true`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from shardwise.errors import Finding
from shardwise.spec import grammar

Reader = Callable[[str], Any]
_FLAGS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError("true or false")
    return _FLAGS[text.lower()]


def _whole(least: int, most: int = 10**12) -> Reader:
    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,15}", text) or not least <= int(text) <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return int(text)

    return read


def _number(least: float, most: float) -> Reader:
    def read(text: str) -> float:
        if not re.fullmatch(r"[+-]?[0-9]{0,15}\.?[0-9]{1,15}(e[+-]?[0-9]{1,2})?", text, re.I) or not least <= float(text) <= most:
            raise ValueError(f"a number from {least:g} to {most:g}")
        return float(text)

    return read


def _word(*known: str) -> Reader:
    def read(text: str) -> str:
        if text.lower() not in known:
            near = get_close_matches(text.lower(), known, n=1, cutoff=0.6)
            raise ValueError(f"{near[0]} (or any of {', '.join(known)})" if near else f"one of {', '.join(known)}")
        return text.lower()

    return read


def _shape(pattern: str, example: str) -> Reader:
    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(example)
        return text

    return read


def _list(each: Reader, *, length: int | None = None) -> Reader:
    def read(text: str) -> list[Any]:
        items = [each(part.strip().strip("'\"")) for part in text.strip("[]() ").split(",") if part.strip()]
        if not text.startswith("[") or not text.endswith("]") or not items or (length and len(items) != length):
            raise ValueError("[" + ",".join(["VALUE"] * (length or 2)) + "]")
        return items

    return read


def _either(*readers: Reader) -> Reader:
    def read(text: str) -> Any:
        wanted = []
        for each in readers:
            try:
                return each(text)
            except ValueError as error:
                wanted.append(str(error))
        raise ValueError(" or ".join(wanted))

    return read


_count, _bit = _whole(1), _whole(0, 1)
_balance = _word("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
_dtype = _word("fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "torch.float32", "torch.float16", "torch.bfloat16")

# Every option a rule reads, by its Megatron name without section, and environment variables, with how its value is read. A layout field
# that is an option too is read by the layout grammar.
_SWITCHES = (
    "average_in_collective", "batch_invariant_mode", "batch_p2p_comm", "bf16", "calculate_per_token_loss", "compile",
    "cross_entropy_loss_fusion", "decrease_batch_size_if_needed", "defer_embedding_wgrad_compute", "delay_wgrad_compute",
    "deterministic_mode", "distribute_saved_activations", "finetuning", "fp16", "fsdp_manual_registration", "gradient_accumulation_fusion",
    "hybrid_context_parallel", "mla_down_proj_fusion", "moe_grouped_gemm", "moe_router_force_load_balancing",
    "moe_router_padding_for_quantization", "moe_shared_expert_overlap", "nccl_ub", "overlap_p2p_comm_warmup_flush",
    "overlap_param_gather_with_optimizer_step", "pack_sequences_in_batch", "reuse_grad_buf_for_mxfp8_param_ag", "use_decentralized_pg",
    "use_gloo_process_groups", "use_megatron_fsdp", "use_precision_aware_optimizer", "use_te_rng_tracker", "use_torch_fsdp2",
    "use_tp_pp_dp_mapping", "variable_seq_lengths",
)  # fmt: skip
_COUNTS = (
    "bucket_size", "dataset.seq_length", "eval_context_parallel_size", "eval_global_batch_size", "eval_micro_batch_size", "lr_decay_iters",
    "lr_decay_samples", "max_steps", "num_buckets", "num_epochs", "num_layers_per_virtual_pipeline_stage", "pad_seq_to_mult",
    "tensor_parallel_num_weight_shards", "train_iters", "train_samples",
)  # fmt: skip
_LAYOUT_FIELDS = (
    "expert_tensor_parallel_size", "num_virtual_stages_per_pipeline_rank", "overlap_p2p_comm", "pipeline_model_parallel_layout",
)  # fmt: skip
_READERS: dict[str, Reader] = {
    **dict.fromkeys(_SWITCHES, _flag),
    **dict.fromkeys(_COUNTS, _count),
    **dict.fromkeys(_LAYOUT_FIELDS, str),
    "CUDA_DEVICE_MAX_CONNECTIONS": _whole(1, 32),
    "NCCL_ALGO": _shape(r"\^?[A-Za-z0-9_]+([,:;^]+[A-Za-z0-9_]+)*", "words like Ring or ^NVLS"),
    "NCCL_GRAPH_REGISTER": _bit,
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": _bit,
    "NVTE_CPU_OFFLOAD_V1": _bit,
    "PYTORCH_CUDA_ALLOC_CONF": _shape(r"[a-z0-9_]+:[^:,]+(:[^:,]+)*(,[a-z0-9_]+:[^,]+)*", "NAME:VALUE pairs like expandable_segments:True"),
    "ckpt_format": _word("torch", "torch_dist", "torch_dcp", "zarr", "fsdp_dtensor"),
    "cp_comm_type": str,
    "cross_entropy_fusion_impl": _word("native", "te", "linear"),
    "cuda_graph_scope": _either(_list(_shape(r"\w+", "names")), _shape(r"\w+(,\w+)*", "names like full_iteration, attn or moe")),
    "fp4": _either(_flag, _word("e2m1")),
    "fp8": _either(_flag, _word("e4m3", "hybrid")),
    "lr_warmup_fraction": _number(0, 1),
    "lr_warmup_iters": _whole(0),
    "lr_warmup_samples": _whole(0),
    "megatron_fsdp_version": _whole(1, 2),
    "moe_aux_loss_coeff": _either(_number(0, 1e6), _list(_number(0, 1e6))),
    "moe_flex_dispatcher_backend": _word("deepep", "hybridep"),
    "moe_router_dtype": _word("fp32", "fp64"),
    "moe_router_load_balancing_type": _either(_balance, _list(_balance)),
    "moe_token_dispatcher_type": _word("allgather", "alltoall", "flex", "deepep", "hybridep"),
    "order": _shape(r"(tp|cp|ep|dp|pp)(-(tp|cp|ep|dp|pp))*", "axes joined by dashes, like tp-cp-ep-dp-pp"),
    "packed_sequence_size": _whole(-1),
    "pipeline_dtype": _dtype,
    "pipeline_model_parallel_comm_backend": _shape(r"\w+", "nccl or ucc"),
    "rampup_batch_size": _list(_count, length=3),
    "seed": _whole(-(2**63), 2**63),
    "transformer_impl": _word("local", "transformer_engine", "inference_optimized"),
}
NAMES = frozenset(_READERS)


def option_of(key: str) -> str | None:
    """The option a key names: with `--`, dashes, or the section of an override in front. None if it names none."""
    bare = key.strip().lstrip("+-")
    for name in (bare, bare.replace("-", "_"), bare.replace("-", "_").rsplit(".", 1)[-1]):
        if name in NAMES:
            return name
    return None


def _value(option: str, text: str) -> Any:
    """The value of an option, None where it is written as none. Raises `ValueError` with what to write."""
    text = text.strip().strip("'\"")
    if text.lower() in ("none", "null"):
        return None
    return _READERS[option](text)


def _problem(rule: str, word: str, why: str, try_: str) -> Finding:
    return Finding(rule=rule, severity="error", given=repr(word), why=why, try_=try_, source="framework options")


def split_options(words: Sequence[str]) -> tuple[list[str], dict[str, Any], list[Finding]]:
    """(words of the layout, options, what is wrong with the options).

    A word that names both is both; the flexible dispatcher is in a layout by its backend. A word that is neither but near an option is a
    problem, and so is an option of two values.
    """
    layout: list[str] = []
    options: dict[str, Any] = {}
    problems: list[Finding] = []
    for word in words:
        key, _, text = word.partition("=")
        option, field = option_of(key), grammar.field_of(key)
        if option is not None:
            try:
                value = _value(option, text)
            except ValueError as error:
                if field is None:  # the grammar says what is wrong with a layout field
                    problems.append(_problem("G4", word, f"{text!r} is no value for {option}", f"{option}= {error}"))
                value = None
            if field is None and option in options and options[option] != value:
                problems.append(_problem("G3", word, f"{option} was already given as {options[option]}", "each option once"))
            options[option] = value
        if field is not None and not (field == "dispatcher" and text.strip().lower() == "flex"):
            layout.append(word)
        elif option is None:
            near = get_close_matches(key.strip().lstrip("+-").replace("-", "_").rsplit(".", 1)[-1], NAMES, n=1, cutoff=0.8)
            if near and not get_close_matches(near[0], grammar.names(), n=1, cutoff=0.9):
                problems.append(_problem("G2", word, "there is no such layout field or framework option", f"{near[0]}=VALUE"))
            else:
                layout.append(word)  # the grammar says what is wrong with it
    if options.get("moe_token_dispatcher_type") == "flex" and not any(
        grammar.field_of(word.partition("=")[0]) == "dispatcher" for word in layout
    ):
        layout.append(f"dispatcher={options.get('moe_flex_dispatcher_backend') or 'deepep'}")
    return layout, options, problems

"""Layouts as words: `tp=4 pp=2 sp=true recompute=selective`, Megatron's long names and Megatron Bridge's keys.

Reading reports every problem of every word at once, each with the nearest known spelling. Writing gives words that read back to the
same layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_args

from shardwise.errors import Finding, LayoutError
from shardwise.spec import layout as spec
from shardwise.spec import pipeline_layout
from shardwise.spec.layout import Layout, Offload, Recompute
from shardwise.spec.ranks import min_world

RECOMPUTE_MODULES = (
    "core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts", "mhc", "gdn_norm_out", "op",
)  # fmt: skip
OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp")
_MAX = 10**9
_MOST_RANKS = 1 << 20  # of a degree
_DEGREES = ("tp", "cp", "dp", "pp", "ep", "etp", "vpp")

# other spellings of a field: Megatron Core and Megatron-LM names, then everyday ones
_ALIASES: dict[str, tuple[str, ...]] = {
    "tp": ("tensor_model_parallel_size", "tensor_parallel_degree"),
    "cp": ("context_parallel_size", "context_parallel_degree"),
    "dp": ("data_parallel_size",),
    "pp": ("pipeline_model_parallel_size", "pipeline_parallel_degree"),
    "ep": ("expert_model_parallel_size", "expert_parallel_degree"),
    "etp": ("expert_tensor_parallel_size",),
    "vpp": ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"),
    "sp": ("sequence_parallel",),
    "cp_comm": ("cp_comm_type",),
    "cp_sizes": ("hierarchical_context_parallel_sizes",),
    "mbs": ("micro_batch_size", "micro_batch"),
    "gbs": ("global_batch_size", "global_batch"),
    "vpp_group": ("microbatch_group_size_per_vp_stage",),
    "first_stage_layers": ("num_layers_in_first_pipeline_stage", "decoder_first_pipeline_num_layers"),
    "last_stage_layers": ("num_layers_in_last_pipeline_stage", "decoder_last_pipeline_num_layers"),
    "account_for_embedding": ("account_for_embedding_in_pipeline_split",),
    "account_for_loss": ("account_for_loss_in_pipeline_split",),
    "pipeline_layout": ("pipeline_model_parallel_layout",),
    "sharding": ("data_parallel_sharding_strategy",),
    "grad_dtype": ("main_grads_dtype",),
    "master_dtype": ("main_params_dtype",),
    "moment_dtype": ("exp_avg_dtype",),
    "overlap_p2p": ("overlap_p2p_comm",),
    "overlap_tp": ("tp_comm_overlap",),
    "overlap_moe": ("overlap_moe_expert_parallel_comm",),
    "dispatcher": ("moe_token_dispatcher_type",),
    "capacity_factor": ("moe_expert_capacity_factor",),
    "pad_to_capacity": ("moe_pad_expert_input_to_capacity",),
}
_FIELDS = {field.name: field for field in fields(Layout)}
_FIELD_OF = {name: name for name in _FIELDS} | {alias: name for name, aliases in _ALIASES.items() for alias in aliases}

_WORDS: dict[str, tuple[Any, Mapping[str, str]]] = {
    "cp_comm": (spec.CpComm, {"allgather": "all_gather", "ulysses": "a2a", "ring": "p2p"}),
    "schedule": (spec.Schedule, {"interleaved": "1f1b", "zero-bubble": "zb-h1", "zb": "zb-h1"}),
    "sharding": (
        spec.Sharding,
        {
            "ddp": "none", "no_shard": "none", "zero1": "distributed_optimizer", "optim": "distributed_optimizer",
            "dist-opt": "distributed_optimizer", "optim_grads": "zero2", "fsdp": "fsdp2", "zero3": "fsdp2", "hsdp": "fsdp2",
            "optim_grads_params": "megatron_fsdp",
        },
    ),
    "precision": (
        spec.Precision,
        {
            "bf16_mixed": "bf16", "fp16_mixed": "fp16", "fp8": "fp8-delayed", "fp8-ds": "fp8-delayed", "fp8-cs": "fp8-current",
            "fp8-block": "fp8-blockwise", "fp8-sc": "fp8-blockwise", "fp8-mx": "mxfp8", "fp4": "nvfp4",
        },
    ),
    "param_dtype": (spec.Dtype, {}),
    "grad_dtype": (spec.Dtype, {}),
    "master_dtype": (spec.Dtype, {}),
    "moment_dtype": (spec.Dtype, {}),
    "dispatcher": (spec.Dispatcher, {}),
    "cross_entropy": (spec.CrossEntropy, {}),
    "attention": (spec.AttentionKernel, {}),
    "optimizer": (spec.Optimizer, {}),
    "peft": (spec.Peft, {}),
}  # fmt: skip
_OPTIONAL = (
    "vpp_group",
    "first_stage_layers",
    "last_stage_layers",
    "pipeline_layout",
    "shard_group",
    "master_dtype",
    "peft",
    "capacity_factor",
)
_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _integer(least: int, most: int = _MAX) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,10}", text):
            raise ValueError(f"a whole number from {least} to {most}" if text.isdigit() else f"a whole number of at least {least}")
        value = int(text)
        if not least <= value <= most:
            raise ValueError(f"a whole number of at least {least}" if value < least else f"a number up to {most}")
        return value

    return read


def _number(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,9})?", text) or not float(text):
        raise ValueError("a number above 0 such as 1.25")
    return float(text)


def _boolean(text: str) -> bool:
    try:
        return _BOOLS[text.lower()]
    except KeyError:
        raise ValueError("true or false") from None


def _choice(field: str) -> Callable[[str], str]:
    literal, aliases = _WORDS[field]
    known = get_args(literal)

    def read(text: str) -> str:
        word = text.lower()
        word = aliases.get(word, word)
        if word not in known:
            near = get_close_matches(word, [*known, *aliases], n=1, cutoff=0.6)
            raise ValueError(f"{near[0]} (or any of {', '.join(known)})" if near else f"one of {', '.join(known)}")
        return word

    return read


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part for part in re.split(r"[,x\s]+", text.strip("[]() ")) if part]
    if not parts:
        raise ValueError("sizes such as 2x4")
    return tuple(_integer(1, _MOST_RANKS)(part) for part in parts)


def read_recompute(text: str) -> Recompute:
    """`none`, `selective`, `selective:mlp+moe_act`, `full`, `full:uniform:1`, `full:block:4`. Raises `ValueError` with what to write."""
    kind, _, rest = text.strip().partition(":")
    if kind == "none" and not rest:
        return Recompute()
    if kind == "selective":
        modules = tuple(part for part in rest.split("+") if part) or ("core_attn",)
        wrong = [module for module in modules if module not in RECOMPUTE_MODULES]
        if wrong:
            near = get_close_matches(wrong[0], RECOMPUTE_MODULES, n=1)
            hint = f"{near[0]} for {wrong[0]}; " if near else ""
            raise ValueError(f"{hint}modules are {', '.join(RECOMPUTE_MODULES)}")
        return Recompute(granularity="selective", modules=modules)
    match = re.fullmatch(r"full(?::(uniform|block)(?::([1-9][0-9]{0,4}))?)?", text.strip())
    if match:
        return Recompute(granularity="full", method=match[1] or "uniform", num_layers=int(match[2] or 1))  # type: ignore[arg-type]
    raise ValueError("none, selective, selective:MODULE+MODULE, full, full:uniform:N or full:block:N")


def read_offload(text: str) -> Offload:
    """`none`, or parts joined by commas: `optimizer:0.5`, `layers:4`, `modules:core_attn`. Raises `ValueError` with what to write."""
    values: dict[str, Any] = {}
    for part in text.split(",") if text.strip() != "none" else ():
        kind, _, rest = part.strip().partition(":")
        if kind == "optimizer" and re.fullmatch(r"0(\.[0-9]{1,9})?|1(\.0{1,9})?", rest or "1"):
            values["optimizer"] = float(rest or "1")
        elif kind == "layers" and re.fullmatch(r"[0-9]{1,5}", rest):
            values["activation_layers"] = int(rest)
        elif kind == "modules" and all(module in OFFLOAD_MODULES for module in rest.split("+")):
            values["activation_modules"] = tuple(rest.split("+"))
        elif kind == "modules" and rest:
            raise ValueError("modules:NAME+NAME of " + ", ".join(OFFLOAD_MODULES))
        else:
            raise ValueError("none, optimizer:FRACTION, layers:N, modules:NAME+NAME")
    return Offload(**values)


def _reader(field: str) -> Callable[[str], Any]:
    if field in _WORDS:
        return _choice(field)
    special: dict[str, Callable[[str], Any]] = {
        "recompute": read_recompute,
        "offload": read_offload,
        "pipeline_layout": pipeline_layout.parse,
        "cp_sizes": _sizes,
        "capacity_factor": _number,
    }
    if field in special:
        return special[field]
    return _boolean if isinstance(_FIELDS[field].default, bool) else _integer(1, _MAX if field in ("mbs", "gbs") else _MOST_RANKS)


def names() -> tuple[str, ...]:
    """Every name of a layout field."""
    return tuple(_FIELD_OF)


def field_of(key: str) -> str | None:
    """The layout field a key names: its own name, a Megatron name, with `--`, `+`, a Bridge section or dashes. None if it names none."""
    bare = key.strip().lstrip("+-").replace("-", "_")
    for name in (bare, bare.rsplit(".", 1)[-1]):
        if name in _FIELD_OF:
            return _FIELD_OF[name]
        if name.lower() in _FIELD_OF:
            return _FIELD_OF[name.lower()]
    return None


def _problem(rule: str, given: str, why: str, try_: str) -> Finding:
    return Finding(rule=rule, severity="error", given=given, why=why, try_=try_, source="layout grammar")


def read_values(words: Iterable[str]) -> dict[str, Any]:
    """Layout fields named by `key=value` words. Raises `LayoutError` with every problem."""
    values: dict[str, Any] = {}
    seen: dict[str, str] = {}
    problems: list[Finding] = []
    for word in words:
        key, separator, text = word.partition("=")
        field = field_of(key)
        if not separator:
            try_ = f"{field}=VALUE" if field else "words like tp=4 pp=2 mbs=1 sp=true"
            problems.append(_problem("G1", repr(word), "not of the form key=value", try_))
            continue
        if field is None:
            near = get_close_matches(key.strip().lstrip("+-").replace("-", "_").rsplit(".", 1)[-1].lower(), _FIELD_OF, n=3, cutoff=0.6)
            try_ = " or ".join(near) if near else "one of " + ", ".join(_FIELDS)
            problems.append(_problem("G2", repr(word), f"no layout field is called {key.strip()!r}", try_))
            continue
        text = text.strip().strip("'\"")
        if field in seen and seen[field] != text:
            problems.append(_problem("G3", repr(word), f"{field} was already given as {seen[field]}", "each field once"))
            continue
        seen[field] = text
        if text.lower() in ("none", "null") and field in (*_OPTIONAL, "vpp", "etp"):
            values[field] = _FIELDS[field].default if field in ("vpp", "etp") else None
            continue
        try:
            values[field] = _reader(field)(text)
        except LayoutError as error:
            problems.extend(error.findings)
        except ValueError as error:
            rule = "W4" if field in _DEGREES else "G4"
            problems.append(_problem(rule, repr(word), f"{text!r} is no value for {field}", f"{field}= {error}"))
    if seen.get("sharding", "").lower() == "hsdp" and values.get("shard_group") is None:
        problems.append(_problem("G4", "'sharding=hsdp'", "the size of the shard groups is missing", "sharding=hsdp shard_group=8"))
    if problems:
        raise LayoutError(problems)
    return values


def parse(words: Iterable[str], *, world: int | None = None, base: Layout | None = None) -> Layout:
    """The layout of `key=value` words on `world` ranks.

    dp follows from the world (without one, from the smallest world of the degrees) and gbs from mbs * dp unless given; an explicit
    pipeline layout sets vpp. Raises `LayoutError` with every problem.
    """
    values = read_values(words)
    words_of_stages = values.get("pipeline_layout")
    layout = (base or Layout()).replace(**values)
    if words_of_stages is not None and "vpp" not in values and len(words_of_stages) % layout.pp == 0:
        layout = layout.replace(vpp=len(words_of_stages) // layout.pp)
    if "dp" not in values and (world is not None or base is None):
        layout = layout.with_world(world if world is not None else min_world(layout))
    if "gbs" not in values and base is None:
        layout = layout.replace(gbs=layout.mbs * layout.dp)
    return layout


def words(layout: Layout) -> list[str]:
    """Words that `parse` reads back to this layout: degrees and batch, then every field that is not the default."""
    result = []
    for name, field in _FIELDS.items():
        value = getattr(layout, name)
        if name not in ("tp", "cp", "dp", "pp", "ep", "etp", "vpp", "sp", "mbs", "gbs") and value == field.default:
            continue
        if isinstance(value, bool):
            text = str(value).lower()
        elif name == "pipeline_layout" and value is not None:
            text = pipeline_layout.unparse(value)
        elif name == "cp_sizes":
            text = "x".join(str(size) for size in value)
        else:
            text = "none" if value is None else str(value)
        result.append(f"{name}={text}")
    return result

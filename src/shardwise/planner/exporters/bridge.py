"""Overrides of Megatron Bridge (`section.name=value`), written and read. `shardwise train` takes the same keys."""

from __future__ import annotations

import re
import shlex
from typing import Any

from shardwise.errors import InputError
from shardwise.planner.exporters.megatron import Names, from_megatron, to_megatron
from shardwise.planner.exporters.megatron_lm import describe
from shardwise.spec.layout import Layout

_SECTIONS = {
    "train": ("micro_batch_size", "global_batch_size"),
    "ddp": (
        "use_distributed_optimizer", "use_megatron_fsdp", "data_parallel_sharding_strategy", "num_distributed_optimizer_instances",
        "overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32",
    ),
    "dist": ("use_torch_fsdp2", "torch_fsdp2_reshard_after_forward"),
    "optimizer": (
        "optimizer", "use_precision_aware_optimizer", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
        "optimizer_cpu_offload", "optimizer_offload_fraction",
    ),
    "comm_overlap": ("tp_comm_overlap", "overlap_moe_expert_parallel_comm", "overlap_p2p_comm"),
    "mixed_precision": ("fp8_param_gather",),
}  # fmt: skip
_SECTION_OF = {name: section for section, names in _SECTIONS.items() for name in names}
_PRECISIONS: dict[str, Names] = {
    "bf16_mixed": {"bf16": True},
    "fp16_mixed": {"fp16": True},
    "bf16_with_fp8_delayed_scaling_mixed": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed"},
    "bf16_with_fp8_current_scaling_mixed": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "bf16_with_fp8_subchannel_scaling_mixed": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "blockwise"},
    "bf16_with_mxfp8_mixed": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "mxfp8"},
    "bf16_with_nvfp4_mixed": {"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"},
}
_PRECISION_NAMES = ("bf16", "fp16", "fp8", "fp8_recipe", "fp4", "fp4_recipe")
_WORLD = re.compile(r"on (\d+) GPUs")


def write(layout: Layout) -> str:
    """One override per line."""
    return "\n".join([f"# {describe(layout)}", *overrides(layout)]) + "\n"


def overrides(layout: Layout) -> list[str]:
    """``section.name=value`` words, quoted for a shell."""
    names = to_megatron(layout, "Megatron Bridge")
    precision = {name: names.pop(name) for name in _PRECISION_NAMES if name in names}
    words = [f"mixed_precision={key}" for key, value in _PRECISIONS.items() if value == precision]
    names["grad_reduce_in_fp32"] = not names.pop("grad_reduce_in_bf16", False)
    for name in ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"):
        names.setdefault(name, False)  # recipes turn these on
    names.setdefault("sequence_parallel", False)
    return words + [f"{_SECTION_OF.get(name, 'model')}.{name}={_text(value)}" for name, value in names.items()]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return shlex.quote(f"[{','.join(str(item) for item in value)}]")
    return shlex.quote(str(value))


def read(text: str, world: int | None = None) -> Layout:
    """Read overrides back. ``world`` wins over the comment of `write`; keys of other kinds are left alone."""
    found = _WORLD.search(text)
    if world is None and not found:
        raise InputError(given="Megatron Bridge overrides", why="they do not say the number of GPUs", try_="--gpus N beside them")
    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    try:
        words = shlex.split(body.replace("\\\n", " "))
    except ValueError as error:
        raise InputError(given="Megatron Bridge overrides", why=f"the quoting is broken: {error}", try_="balanced quotes") from None
    names = parse(words)
    if names.get("expert_model_parallel_size") not in (None, 1) and names.get("expert_tensor_parallel_size") is None:
        names["expert_tensor_parallel_size"] = 1  # Megatron Bridge's default; Megatron Core's is the tensor parallel size
    return from_megatron(names, world if world is not None else int(found[1]) if found else 1)


def parse(words: list[str]) -> Names:
    """Megatron names from ``section.name=value`` words; ``model.transformer.x`` is read as ``model.x``."""
    names: Names = {}
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        name = key.rpartition(".")[2]
        if not equals:
            continue
        if key == "mixed_precision":
            if value.replace("-", "_") not in _PRECISIONS:
                raise InputError(given=word, why="this precision is not known", try_=" | ".join(_PRECISIONS))
            names |= _PRECISIONS[value.replace("-", "_")]
        elif name == "grad_reduce_in_fp32":
            names["grad_reduce_in_bf16"] = _value(value) is False
        else:
            names[name] = _value(value)
    return names


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if text.startswith("[") and text.endswith("]"):
        return [_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[+-]?([0-9]+\.[0-9]*|\.?[0-9]+)(e[+-]?[0-9]+)?", text, re.I) else text

"""A layout in Megatron's names, and back. Shared by the Megatron-LM and the Megatron Bridge exporter.

The names are those of Megatron Core's config classes (`TransformerConfig`, `DistributedDataParallelConfig`,
`OptimizerConfig`). A name that is absent has Megatron-LM's own default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from shardwise.errors import Finding, LayoutError
from shardwise.spec.grammar import OFFLOAD_MODULES, RECOMPUTE_MODULES
from shardwise.spec.layout import CpComm, Layout, Offload, Recompute

Names = dict[str, Any]

# layout field: Megatron name, for fields that carry over as they are and are always written
DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
}
# layout field: Megatron name, written where the value is not the default of Megatron
DIRECT = {
    "sp": "sequence_parallel",
    "vpp_group": "microbatch_group_size_per_vp_stage",
    "first_stage_layers": "num_layers_in_first_pipeline_stage",
    "last_stage_layers": "num_layers_in_last_pipeline_stage",
    "account_for_embedding": "account_for_embedding_in_pipeline_split",
    "account_for_loss": "account_for_loss_in_pipeline_split",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
    "overlap_tp": "tp_comm_overlap",
    "overlap_moe": "overlap_moe_expert_parallel_comm",
    "capacity_factor": "moe_expert_capacity_factor",
    "pad_to_capacity": "moe_pad_expert_input_to_capacity",
    "optimizer": "optimizer",
}
_MEGATRON_DEFAULT = {"overlap_grad_reduce": False, "overlap_param_gather": False, "optimizer": "adam"}
_FP8_RECIPES = {"fp8-delayed": "delayed", "fp8-current": "tensorwise", "fp8-blockwise": "blockwise", "mxfp8": "mxfp8"}
_STRATEGIES = {"zero2": "optim_grads", "megatron_fsdp": "optim_grads_params"}
_FLEX = ("deepep", "hybridep")


def unsupported(target: str, layout: Layout, problems: Mapping[str, str]) -> LayoutError:
    """One error that names every field ``target`` cannot express, each with what to write instead."""
    return LayoutError(
        Finding(
            rule="X1",
            severity="error",
            given=f"{name}={getattr(layout, name)}",
            why=f"{target} has no setting for it",
            try_=instead,
            source=f"exporter {target}",
        )
        for name, instead in problems.items()
    )


def to_megatron(layout: Layout, target: str = "Megatron-LM") -> Names:
    """The layout in Megatron's names. Raises `LayoutError` with every field that Megatron cannot express."""
    problems = _problems(layout)
    if problems:
        raise unsupported(target, layout, problems)
    names: Names = {name: getattr(layout, field) for field, name in DEGREES.items()}
    defaults = {field.name: field.default for field in fields(Layout)} | _MEGATRON_DEFAULT
    names |= {name: getattr(layout, field) for field, name in DIRECT.items() if getattr(layout, field) != defaults[field]}
    if layout.pipeline_layout is not None:
        names["pipeline_model_parallel_layout"] = "|".join(layout.pipeline_layout)
    elif layout.vpp > 1:
        names["virtual_pipeline_model_parallel_size"] = layout.vpp
    if layout.cp_comm != "p2p":
        names["cp_comm_type"] = layout.cp_comm
    if layout.cp_sizes:
        names["hierarchical_context_parallel_sizes"] = list(layout.cp_sizes)
    if not layout.overlap_p2p:
        names["overlap_p2p_comm"] = False
    return names | _sharding(layout) | _numbers(layout) | _recompute(layout) | _kernels(layout)


def _problems(layout: Layout) -> dict[str, str]:
    problems = {}
    if layout.schedule != "1f1b":
        problems["schedule"] = "schedule=1f1b"
    if layout.precision == "fp8-rowwise":
        problems["precision"] = "precision=fp8-current or fp8-blockwise"
    if layout.cross_entropy == "chunked":
        problems["cross_entropy"] = "cross_entropy=fused"
    if layout.sharding == "fsdp2" and layout.shard_size != layout.dp * layout.cp:
        problems["shard_group"] = "sharding=megatron_fsdp, or no shard_group"
    if layout.param_dtype not in (_training_dtype(layout), "fp8"):
        problems["param_dtype"] = f"param_dtype={_training_dtype(layout)}"
    if layout.param_dtype == "fp8" and not _is_fp8(layout):
        problems["param_dtype"] = "an fp8 precision, or param_dtype=bf16"
    if layout.grad_dtype not in ("fp32", "bf16") or (layout.grad_dtype == "bf16" and _training_dtype(layout) != "bf16"):
        problems["grad_dtype"] = "grad_dtype=fp32"
    if layout.master_dtype in (None, "bf16", "fp8") and _training_dtype(layout) != "fp32":
        problems["master_dtype"] = "master_dtype=fp32 or fp16"
    if layout.peft:
        problems["peft"] = "no peft in the layout, and a fine-tuning recipe"
    return problems


def _training_dtype(layout: Layout) -> str:
    return layout.precision if layout.precision in ("fp32", "fp16") else "bf16"


def _is_fp8(layout: Layout) -> bool:
    return layout.precision in _FP8_RECIPES


def _sharding(layout: Layout) -> Names:
    names: Names = {}
    if layout.sharding == "distributed_optimizer":
        names["use_distributed_optimizer"] = True
    elif layout.sharding in _STRATEGIES:
        names |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": _STRATEGIES[layout.sharding]}
        names["use_distributed_optimizer"] = True
    elif layout.sharding == "fsdp2":
        names["use_torch_fsdp2"] = True
        if not layout.reshard_after_forward:
            names["torch_fsdp2_reshard_after_forward"] = False
    copies = layout.dp * layout.cp // layout.shard_size
    if layout.sharding != "none" and copies > 1:
        names["num_distributed_optimizer_instances"] = copies
    return names


def _numbers(layout: Layout) -> Names:
    names: Names = {}
    dtype = _training_dtype(layout)
    if dtype != "fp32":
        names[dtype] = True
    if layout.precision in _FP8_RECIPES:
        names |= {"fp8": "hybrid", "fp8_recipe": _FP8_RECIPES[layout.precision]}
    if layout.precision == "nvfp4":
        names |= {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
    if layout.param_dtype == "fp8":
        names["fp8_param_gather"] = True
    if layout.grad_dtype == "bf16":
        names["grad_reduce_in_bf16"] = True
    if layout.master_dtype not in ("fp32", None) or layout.moment_dtype != "fp32":
        names["use_precision_aware_optimizer"] = True
        names["main_params_dtype"] = layout.master_dtype or "fp32"
        names["exp_avg_dtype"] = names["exp_avg_sq_dtype"] = layout.moment_dtype
    return names


def _recompute(layout: Layout) -> Names:
    names: Names = {}
    if layout.recompute.granularity != "none":
        names["recompute_granularity"] = layout.recompute.granularity
    if layout.recompute.granularity == "full":
        names |= {"recompute_method": layout.recompute.method, "recompute_num_layers": layout.recompute.num_layers}
    if layout.recompute.modules:
        names["recompute_modules"] = list(layout.recompute.modules)
    offload = layout.offload
    if offload.optimizer:
        names |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": offload.optimizer}
    if offload.activation_layers:
        names["cpu_offloading_num_layers"] = offload.activation_layers
    if offload.activation_modules:
        names |= {"fine_grained_activation_offloading": True, "offload_modules": list(offload.activation_modules)}
    return names


def _kernels(layout: Layout) -> Names:
    names: Names = {"attention_backend": layout.attention}
    if layout.cross_entropy in ("fused", "te"):
        names["cross_entropy_loss_fusion"] = True
    if layout.cross_entropy == "te":
        names["cross_entropy_fusion_impl"] = "te"
    if layout.cuda_graphs:
        names["cuda_graph_impl"] = "transformer_engine"
    if layout.dispatcher in _FLEX:
        names |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": layout.dispatcher}
    elif layout.ep > 1 or layout.dispatcher != "alltoall":
        names["moe_token_dispatcher_type"] = layout.dispatcher
    return names


def from_megatron(names: Mapping[str, Any], world: int) -> Layout:
    """The layout these Megatron names describe on ``world`` GPUs (the data parallel size is the rest).

    Raises `LayoutError` with every value that is not of the kind Megatron takes.
    """
    names = _checked(names)
    values: dict[str, Any] = {field: names[name] for field, name in DEGREES.items() if name in names}
    values |= _MEGATRON_DEFAULT | {field: names[name] for field, name in DIRECT.items() if name in names}
    values.setdefault("etp", values.get("tp", 1))
    if "pipeline_model_parallel_layout" in names:
        values["pipeline_layout"] = tuple(names["pipeline_model_parallel_layout"].split("|"))
        values["vpp"] = max(1, len(values["pipeline_layout"]) // values.get("pp", 1))
    elif "virtual_pipeline_model_parallel_size" in names:
        values["vpp"] = names["virtual_pipeline_model_parallel_size"]
    values["cp_comm"] = names.get("cp_comm_type", "p2p")
    values["cp_sizes"] = tuple(names.get("hierarchical_context_parallel_sizes", ()))
    values["overlap_p2p"] = names.get("overlap_p2p_comm", True)
    values["recompute"] = Recompute(
        granularity=names.get("recompute_granularity", "none"),
        modules=tuple(names.get("recompute_modules", ())),
        method=names.get("recompute_method"),
        num_layers=names.get("recompute_num_layers"),
    )
    values["offload"] = Offload(
        optimizer=names.get("optimizer_offload_fraction", 1.0) if names.get("optimizer_cpu_offload") else 0.0,
        activation_layers=names.get("cpu_offloading_num_layers", 0),
        activation_modules=tuple(names.get("offload_modules", ())),
    )
    values |= _read_numbers(names) | _read_kernels(names)
    layout = Layout(**values).with_world(world)
    return layout.replace(**_read_sharding(names, layout))


_COUNTS = (
    *DEGREES.values(), "virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage", "recompute_num_layers", "cpu_offloading_num_layers", "num_distributed_optimizer_instances",
)  # fmt: skip
_SWITCHES = (
    "sequence_parallel", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "overlap_grad_reduce",
    "overlap_param_gather", "tp_comm_overlap", "overlap_moe_expert_parallel_comm", "moe_pad_expert_input_to_capacity", "overlap_p2p_comm",
    "use_distributed_optimizer", "use_megatron_fsdp", "use_torch_fsdp2", "torch_fsdp2_reshard_after_forward", "bf16", "fp16",
    "fp8_param_gather", "grad_reduce_in_bf16", "use_precision_aware_optimizer", "optimizer_cpu_offload", "cross_entropy_loss_fusion",
)  # fmt: skip
_WORDS: dict[str, tuple[str, ...]] = {
    "cp_comm_type": get_args(CpComm),
    "recompute_granularity": ("selective", "full"),
    "recompute_method": ("uniform", "block"),
    "cross_entropy_fusion_impl": ("native", "te"),
    "fp8_recipe": tuple(_FP8_RECIPES.values()),
    "optimizer": ("adam", "sgd", "muon"),
    "moe_token_dispatcher_type": ("allgather", "alltoall", "flex"),
    "moe_flex_dispatcher_backend": _FLEX,
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "fp16", "bf16", "fp8"),
}


def _checked(names: Mapping[str, Any]) -> Names:
    """The names without unset ones; every value of the right kind, or all of the wrong ones in one error."""
    findings = []

    def refuse(name: str, why: str, instead: str) -> None:
        given = f"{name}={names[name]!r}"
        findings.append(Finding(rule="X2", severity="error", given=given, why=why, try_=instead, source="Megatron argument types"))

    given = {name: value for name, value in names.items() if value is not None}
    for name in DEGREES.keys() & given:
        refuse(name, "Megatron has no such name", f"{DEGREES[name]}={given[name]}")
    if not findings and not any(name in given for name in (*_COUNTS, *_SWITCHES, *_WORDS)):
        why = "none of the names says how the run is split"
        text = ", ".join(list(given)[:6]) or "no names"
        findings.append(Finding(rule="X2", severity="error", given=text, why=why, try_=DEGREES["tp"] + "=2", source="Megatron arguments"))
    for name in _COUNTS:
        value = given.get(name, 1)
        least, most = int(name != "cpu_offloading_num_layers"), 10**9 if name.endswith("batch_size") else 1 << 20
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            refuse(name, f"it must be a whole number from {least} to {most}", f"{name}=1")
    for name in _SWITCHES:
        if not isinstance(given.get(name, True), bool):
            refuse(name, "it is a switch", f"{name}=true or false")
    for name, words in _WORDS.items():
        if given.get(name, words[0]) not in words:
            refuse(name, "the word is not known", " | ".join(words))
    sizes = given.get("hierarchical_context_parallel_sizes", [])
    if not isinstance(sizes, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
        refuse("hierarchical_context_parallel_sizes", "it must be a list of whole numbers", "[2,2]")
    for name, highest in (("moe_expert_capacity_factor", 1e6), ("optimizer_offload_fraction", 1.0)):
        value = given.get(name, 1.0)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= highest:
            refuse(name, f"it must be a number from 0 to {highest:g}", f"{name}=1.0")
    for name, known in (("recompute_modules", RECOMPUTE_MODULES), ("offload_modules", OFFLOAD_MODULES)):
        if not isinstance(given.get(name, []), list):
            given[name] = [str(given[name])]
        wrong = [str(each) for each in given.get(name, []) if each not in known]
        if wrong:
            refuse(name, f"modules are not known: {', '.join(wrong)}", "any of " + ", ".join(known))
    if not isinstance(given.get("pipeline_model_parallel_layout", ""), str):
        refuse("pipeline_model_parallel_layout", "it must be text", "'Et|t|tL'")
    if findings:
        raise LayoutError(findings)
    return given


def _read_numbers(names: Names) -> dict[str, Any]:
    dtype = next((word for word in ("bf16", "fp16") if names.get(word)), "fp32")
    precision = dtype
    if names.get("fp4"):
        precision = "nvfp4"
    elif names.get("fp8"):
        precision = {word: name for name, word in _FP8_RECIPES.items()}[names.get("fp8_recipe", "delayed")]
    values: dict[str, Any] = {"precision": precision, "param_dtype": "fp8" if names.get("fp8_param_gather") else dtype}
    values["grad_dtype"] = "bf16" if names.get("grad_reduce_in_bf16") else "fp32"
    values["master_dtype"] = None if dtype == "fp32" else "fp32"
    if names.get("use_precision_aware_optimizer"):
        values["master_dtype"] = names.get("main_params_dtype", "fp32") if dtype != "fp32" else None
        values["moment_dtype"] = names.get("exp_avg_dtype", "fp32")
    return values


def _read_sharding(names: Names, layout: Layout) -> dict[str, Any]:
    sharding = "distributed_optimizer" if names.get("use_distributed_optimizer") else "none"
    if names.get("use_megatron_fsdp"):
        strategy = names.get("data_parallel_sharding_strategy", "no_shard")
        sharding = {word: name for name, word in _STRATEGIES.items()}.get(strategy, sharding)
    elif names.get("use_torch_fsdp2"):
        sharding = "fsdp2"
    values: dict[str, Any] = {"sharding": sharding, "reshard_after_forward": names.get("torch_fsdp2_reshard_after_forward", True)}
    copies = names.get("num_distributed_optimizer_instances", 1)
    if copies > 1:
        values["shard_group"] = max(1, layout.dp * layout.cp // copies)
    return values


def _read_kernels(names: Names) -> dict[str, Any]:
    kind = names.get("moe_token_dispatcher_type", "alltoall" if names.get("expert_model_parallel_size", 1) > 1 else None)
    if kind == "flex":
        kind = names.get("moe_flex_dispatcher_backend", "deepep")
    values: dict[str, Any] = {} if kind is None else {"dispatcher": kind}
    # auto and fused kernels do not keep the scores either
    values["attention"] = "unfused" if names.get("attention_backend") in ("unfused", "local") else "flash"
    fused = "te" if names.get("cross_entropy_fusion_impl") == "te" else "fused"
    values["cross_entropy"] = fused if names.get("cross_entropy_loss_fusion") else "unfused"
    values["cuda_graphs"] = names.get("cuda_graph_impl", "none") != "none"
    return values

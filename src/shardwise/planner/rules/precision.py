"""Number formats, recompute, offload and graphs, as far as they touch a layout (R rules)."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planner.rules.rule import BRIDGE, MEGATRON, MEGATRONS, TITAN, Case, Problem, rule
from shardwise.spec.blocks import Attention, CompressedAttention, Mla
from shardwise.spec.grammar import RECOMPUTE_MODULES

_CONFIG = "Megatron Core TransformerConfig.__post_init__"
_NARROW = {"fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4"}


@rule("R1", _CONFIG)
def one_number_format(case: Case) -> Iterator[Problem]:
    settings, layout = case.settings, case.layout
    for first, second in (("bf16", "fp16"), ("fp8", "fp4")):
        if settings.get(first) and settings.get(second):
            yield Problem(f"{first} and {second}", "one of them is the format of the products", f"only {first}")
    if layout.param_dtype == "fp8" and layout.precision not in _NARROW:
        yield Problem(f"param_dtype=fp8 precision={layout.precision}", "weights in FP8 need FP8 products", "precision=fp8-current")


@rule("R2", "Transformer Engine assert_dim_for_fp8_exec", titan=None)
def narrow_products_are_aligned(case: Case) -> Iterator[Problem]:
    """Widths are multiples of 16 (MXFP8 and NVFP4 blocks: 32), tokens on the rank a multiple of 8."""
    layout, model = case.layout, case.model
    if layout.precision not in _NARROW:
        return
    step = 32 if layout.precision in ("mxfp8", "nvfp4") else 16
    if model is not None:
        widths = {"hidden size": model.hidden}
        widths |= {
            f"feed-forward width {mlp.ffn} on a tp rank": mlp.ffn // layout.tp for mlp in model.dense_mlps if mlp.ffn % layout.tp == 0
        }
        for mixer in model.attentions:
            if isinstance(mixer, (Attention, Mla)) and mixer.heads % layout.tp == 0:
                widths["attention width on a tp rank"] = mixer.heads // layout.tp * mixer.v_dim
        if model.moe and model.moe.ffn % layout.etp == 0:
            widths[f"expert width {model.moe.ffn} on an etp rank"] = model.moe.ffn // layout.etp
        for what, width in widths.items():
            if width % step:
                why = f"{layout.precision} products work on blocks of {step}"
                yield Problem(f"{what} {width}", why, f"a split that leaves a multiple of {step}, or precision=bf16")
    if case.seq_len is not None:
        tokens = case.seq_len * layout.mbs // layout.cp // (layout.tp if layout.sp else 1)
        if tokens % 8:
            yield Problem(
                f"{tokens} tokens on a rank", "tokens of a narrow product are a multiple of 8", "a longer sequence, or less cp and tp"
            )


@rule("R3", "Megatron Bridge ConfigContainer.validate", only=(BRIDGE,))
def gathered_mxfp8_reuses_gradients(case: Case) -> Iterator[Problem]:
    layout, reuse = case.layout, case.settings.get("reuse_grad_buf_for_mxfp8_param_ag")
    if layout.precision == "mxfp8" and layout.param_dtype == "fp8" and layout.sharding == "distributed_optimizer" and reuse is False:
        given = "precision=mxfp8 param_dtype=fp8 reuse_grad_buf_for_mxfp8_param_ag=false"
        yield Problem(given, "gathered MXFP8 weights live in the gradient buffer", "reuse_grad_buf_for_mxfp8_param_ag=true")


@rule("R4", _CONFIG)
def recompute_is_complete(case: Case) -> Iterator[Problem]:
    recompute, model = case.layout.recompute, case.model
    given = f"recompute={recompute}"
    if recompute.granularity == "full":
        if recompute.method not in ("uniform", "block") or not recompute.num_layers or recompute.num_layers < 1:
            yield Problem(given, "full recompute needs a method and a number of layers", "recompute=full:uniform:1")
        return
    if recompute.granularity == "selective":
        if recompute.method or recompute.num_layers:
            yield Problem(given, "method and number belong to full recompute", "recompute=selective:core_attn")
        unknown = [
            module for module in recompute.modules if module not in RECOMPUTE_MODULES or (module == "op" and case.framework in MEGATRONS)
        ]
        if unknown:
            yield Problem(given, f"{', '.join(unknown)} can not be recomputed", f"modules of {', '.join(RECOMPUTE_MODULES)}")
    if model is None:
        return
    missing = {
        "mla_up_proj": not any(isinstance(each, (Mla, CompressedAttention)) for each in model.attentions),
        "moe": model.moe is None,
        "moe_act": model.moe is None,
        "shared_experts": model.moe is None or not model.moe.shared_ffn,
    }
    for module in recompute.modules:
        if missing.get(module):
            level = "error" if module == "mla_up_proj" else "warning"
            yield Problem(given, f"{model.name} has no {module}", f"recompute without {module}", level)  # type: ignore[arg-type]
    if "shared_experts" in recompute.modules and case.settings.get("moe_shared_expert_overlap"):
        yield Problem(given, "overlapped shared experts are not recomputed", "moe_shared_expert_overlap=false")
    if "moe_act" in recompute.modules and case.settings.get("moe_grouped_gemm") is False:
        yield Problem(given, "moe_act is recomputed inside the grouped product", "moe_grouped_gemm=true")


@rule("R4a", "Transformer Engine: fused attention rematerialises by itself", severity="info")
def attention_recompute_is_idle(case: Case) -> Iterator[Problem]:
    recompute = case.layout.recompute
    if recompute.modules == ("core_attn",) and case.layout.attention == "flash":
        yield Problem(f"recompute={recompute} attention=flash", "flash attention keeps no scores to recompute", "recompute=none")


@rule("R5", _CONFIG, titan=None)
def activation_offload_stands_alone(case: Case) -> Iterator[Problem]:
    layout = case.layout
    layers = layout.offload.activation_layers
    if layers == 0:
        return
    against = []
    if layout.pp > 1:
        against.append(f"pp={layout.pp}")
    if layout.recompute.granularity != "none":
        against.append(f"recompute={layout.recompute}")
    if layout.cuda_graphs and case.settings.get("cuda_graph_scope") != "full_iteration":
        against.append("cuda_graphs=true")
    if layout.offload.activation_modules:
        against.append("offloaded modules")
    if case.model and layers >= case.model.num_layers:
        against.append(f"{case.model.num_layers} layers in all")
    if against:
        given = f"offload=layers:{layers} with {', '.join(against)}"
        yield Problem(
            given, "offloading whole layers excludes them, and keeps one layer on the GPU", "offload=modules:... or offload=optimizer:0.5"
        )


@rule("R6", "Megatron-LM validate_args", severity="warning", only=MEGATRONS)
def optimizer_offload_needs_the_aware_optimizer(case: Case) -> Iterator[Problem]:
    if case.layout.offload.optimizer and case.settings.get("use_precision_aware_optimizer") is False:
        given = "optimizer offload with use_precision_aware_optimizer=false"
        yield Problem(given, "state on the host needs the precision-aware optimizer", "use_precision_aware_optimizer=true", "error")


@rule("R7", "Megatron Bridge fine-grained activation offloading", only=MEGATRONS)
def module_offload_needs_its_switch(case: Case) -> Iterator[Problem]:
    switch = case.settings.get("NVTE_CPU_OFFLOAD_V1")
    if case.layout.offload.activation_modules and switch is not None and str(switch) != "1":
        given = f"offload={case.layout.offload} NVTE_CPU_OFFLOAD_V1={switch}"
        yield Problem(given, "Transformer Engine 2.10 and later need the switch", "NVTE_CPU_OFFLOAD_V1=1")


@rule("R8", "Megatron Core, Transformer Engine CUDA graphs; torchtitan trainer")
def graphs_fit_the_step(case: Case) -> Iterator[Problem]:
    layout, settings = case.layout, case.settings
    if not layout.cuda_graphs:
        return
    if case.framework == TITAN and layout.pp > 1:
        yield Problem(f"cuda_graphs=true pp={layout.pp}", "torchtitan captures whole steps of one stage", "pp=1, or cuda_graphs=false")
    if case.framework in MEGATRONS and settings.get("use_te_rng_tracker") is False:
        yield Problem(
            "cuda_graphs=true use_te_rng_tracker=false", "captured dropout needs the graph-safe tracker", "use_te_rng_tracker=true"
        )
    allocator = str(settings.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if case.framework in MEGATRONS and "expandable_segments:True" in allocator and str(settings.get("NCCL_GRAPH_REGISTER", "0")) != "0":
        yield Problem("cuda_graphs=true with expandable_segments:True", "registered graph buffers must not move", "NCCL_GRAPH_REGISTER=0")


_DETERMINISTIC_NCCL = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


@rule("R9", "Megatron Core deterministic mode; Megatron Bridge apply_determinism_overrides", only=MEGATRONS)
def deterministic_mode_is_complete(case: Case) -> Iterator[Problem]:
    settings = case.settings
    if not settings.get("deterministic_mode"):
        return
    wrong = []
    if settings.get("cross_entropy_loss_fusion"):
        wrong.append(("cross_entropy_loss_fusion=true", "cross_entropy_loss_fusion=false"))
    if "NCCL_ALGO" in settings and settings["NCCL_ALGO"] not in _DETERMINISTIC_NCCL:
        wrong.append((f"NCCL_ALGO={settings['NCCL_ALGO']}", "NCCL_ALGO=Ring"))
    if str(settings.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")) != "0":
        wrong.append(("NVTE_ALLOW_NONDETERMINISTIC_ALGO=1", "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"))
    if case.layout.overlap_tp:
        wrong.append(("overlap_tp=true", "overlap_tp=false"))
    for given, instead in wrong:
        yield Problem(f"deterministic_mode=true {given}", "the result depends on timing", instead)


@rule("R10", "Megatron Core, Megatron-LM validate_args", severity="warning", only=MEGATRONS, megatron="error")
def fused_cross_entropy_of_transformer_engine(case: Case) -> Iterator[Problem]:
    if case.settings.get("cross_entropy_fusion_impl") == "te":
        level = None if case.framework == MEGATRON else "warning"
        yield Problem("cross_entropy_fusion_impl=te", "it is refused or warned about", "cross_entropy_fusion_impl=native", level)  # type: ignore[arg-type]


@rule("R11", "Transformer Engine FP8 support: compute capability 8.9, MXFP8 and NVFP4 10.0")
def gpu_has_the_format(case: Case) -> Iterator[Problem]:
    gpu, precision = (case.cluster.gpu if case.cluster else None), case.layout.precision
    if gpu is None or precision not in _NARROW:
        return
    given = f"precision={precision} on {gpu.name}"
    needed = (10, 0) if precision in ("mxfp8", "nvfp4") else (8, 9)
    if gpu.capability is None:
        if gpu.fp8_flops is None or precision in ("mxfp8", "nvfp4"):
            yield Problem(given, "the GPU has no such products", "precision=bf16")
    elif gpu.capability < needed:
        instead = "precision=fp8-current or bf16" if gpu.capability >= (8, 9) else "precision=bf16"
        yield Problem(given, f"it needs compute capability {needed[0]}.{needed[1]}", instead)


@rule("R12", "torchtitan configs", only=(TITAN,))
def async_tensor_parallel_needs_the_compiler(case: Case) -> Iterator[Problem]:
    if case.layout.overlap_tp and case.settings.get("compile") is False:
        yield Problem("overlap_tp=true compile=false", "async tensor parallelism is made by the compiler", "compile=true")

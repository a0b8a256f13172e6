"""From a configuration to a model, a layout and a verdict, before any process group exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.errors import Finding, LayoutError, ModelError
from shardwise.planner.rules import check_layout
from shardwise.spec import hf, pipeline_layout
from shardwise.spec.layout import Layout, Recompute
from shardwise.spec.model import ModelSpec
from shardwise.train.config import RunConfig

# Bridge's architecture key: fields of transformers configs, the first one present is set
_ARCHITECTURE = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "num_moe_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
}
_NOT_RUN = {"zb-h2": "zb-h1", "dualpipe": "dualpipev"}


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run is: model as a transformers config and as a description, layout, findings (none of them errors)."""

    config: RunConfig
    hf_fields: dict[str, Any]
    spec: ModelSpec | None  # None for a family the planner does not describe
    layout: Layout
    findings: tuple[Finding, ...]

    @property
    def layout_line(self) -> str:
        each = self.layout
        return f"TP={each.tp} PP={each.pp} CP={each.cp} EP={each.ep} ETP={each.etp} DP={each.dp} ({each.world} ranks)"


def model_fields(config: RunConfig) -> dict[str, Any]:
    """Fields of the transformers config, overrides and vocabulary applied. Raises `ModelError` for a key the family does not have."""
    model = config.model
    values = {"model_type": model.model_type, **model.hf}
    for key, names in _ARCHITECTURE.items():
        value = getattr(model, key)
        if value is None:
            continue
        name = next((name for name in names if name in values), None)
        if name is None:
            raise ModelError([f"model.{key}={value}: a {model.model_type} config has no {' or '.join(names)}. Try: model.hf.FIELD={value}"])
        values[name] = value
    if model.vocab_size is None and config.tokenizer.vocab_size is not None:
        values["vocab_size"] = config.tokenizer.vocab_size
    return values


def layout_of(config: RunConfig, world: int) -> Layout:
    """The layout of a configuration on `world` ranks; dp is what is left of them."""
    m, t = config.model, config.train
    pp = m.pipeline_model_parallel_size
    words = None if m.pipeline_model_parallel_layout is None else pipeline_layout.parse(m.pipeline_model_parallel_layout)
    vpp = m.virtual_pipeline_model_parallel_size
    if vpp is None:
        vpp = len(words) // max(1, pp) if words else 1
    if m.pipeline_schedule in ("zbv", "dualpipev") and m.virtual_pipeline_model_parallel_size is None:
        vpp = 2
    sharding = "fsdp2" if config.ddp.use_torch_fsdp2 else "distributed_optimizer" if config.ddp.use_distributed_optimizer else "none"
    layout = Layout(
        tp=m.tensor_model_parallel_size,
        cp=m.context_parallel_size,
        pp=pp,
        ep=m.expert_model_parallel_size,
        etp=1 if m.expert_tensor_parallel_size is None else m.expert_tensor_parallel_size,
        vpp=vpp,
        sp=m.sequence_parallel,
        cp_comm=m.cp_comm_type or "p2p",
        cp_sizes=tuple(m.hierarchical_context_parallel_sizes or ()),
        mbs=t.micro_batch_size,
        gbs=t.global_batch_size,
        schedule=m.pipeline_schedule,
        vpp_group=m.microbatch_group_size_per_vp_stage,
        first_stage_layers=m.num_layers_in_first_pipeline_stage,
        last_stage_layers=m.num_layers_in_last_pipeline_stage,
        account_for_embedding=m.account_for_embedding_in_pipeline_split,
        account_for_loss=m.account_for_loss_in_pipeline_split,
        pipeline_layout=words,
        sharding=sharding,
        shard_group=config.ddp.shard_group_size,
        recompute=_recompute(config),
        capacity_factor=m.moe_expert_capacity_factor,
        cross_entropy="unfused",
    ).with_world(world)
    return in_bf16(layout) if config.mixed_precision == "bf16_mixed" else in_fp32(layout)


def in_bf16(layout: Layout) -> Layout:
    """Passes in bf16; float32 weights are kept by the optimizer, or sharded by FSDP2 and gathered in bf16."""
    if layout.sharding == "fsdp2":
        return layout.replace(precision="bf16", param_dtype="fp32", master_dtype=None)
    return layout.replace(precision="bf16", param_dtype="bf16", master_dtype="fp32")


def in_fp32(layout: Layout) -> Layout:
    return layout.replace(precision="fp32", param_dtype="fp32", master_dtype=None)


def _recompute(config: RunConfig) -> Recompute:
    m = config.model
    if m.recompute_granularity == "full":
        return Recompute(granularity="full", method=m.recompute_method or "uniform", num_layers=m.recompute_num_layers or 1)
    if m.recompute_granularity == "selective":
        return Recompute(granularity="selective", modules=tuple(m.recompute_modules or ("core_attn",)))
    return Recompute()


def plan(config: RunConfig, world: int) -> RunPlan:
    """Judge a configuration on `world` ranks. Raises `LayoutError` with all findings when the layout is illegal, `ModelError` for a
    model that cannot be described. No torch is loaded and no process started."""
    values = model_fields(config)
    known = config.model.model_type in hf.model_types()
    spec = hf.from_config(values, config.model.model_type) if known else None
    layout = layout_of(config, world)
    findings = check_layout(spec, layout, None, seq_len=config.model.seq_length, framework="shardwise")
    needed = layout.tp * layout.cp * layout.pp
    extra = [each for each in (_world(world, needed, layout), _schedule(layout)) if each is not None]
    errors = [finding for finding in (*extra, *findings) if finding.severity == "error"]
    if errors:
        raise LayoutError(errors)
    return RunPlan(config=config, hf_fields=values, spec=spec, layout=layout, findings=findings)


def _world(world: int, needed: int, layout: Layout) -> Finding | None:
    if needed < 1 or world % needed == 0:
        return None
    return Finding(
        rule="W1",
        severity="error",
        given=f"{world} ranks, TP {layout.tp} * CP {layout.cp} * PP {layout.pp} = {needed}",
        why="the ranks of the run must be a multiple of TP * CP * PP",
        try_=f"{-(-world // needed) * needed} ranks, or degrees whose product divides {world}",
        source="Megatron Core initialize_model_parallel",
    )


def _schedule(layout: Layout) -> Finding | None:
    if layout.schedule not in _NOT_RUN:
        return None
    return Finding(
        rule="P22",
        severity="error",
        given=f"pipeline_schedule={layout.schedule}",
        why="this schedule is planned and simulated, not run",
        try_=f"model.pipeline_schedule={_NOT_RUN[layout.schedule]}",
        source="shardwise.parallel.pipeline",
    )

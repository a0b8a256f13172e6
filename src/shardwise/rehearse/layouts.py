"""From a layout of the planner to the run that trains it, ready to be rehearsed."""

from __future__ import annotations

from typing import Any

from shardwise.errors import InputError
from shardwise.spec import pipeline_layout
from shardwise.spec.layout import Layout, Recompute
from shardwise.train.config import ModelConfig, RunConfig
from shardwise.train.plan import RunPlan, plan


def run_of(fields: dict[str, Any], layout: Layout, seq_len: int) -> RunPlan:
    """The bf16 run of a model (fields of its `transformers` config) under a layout, as `shardwise train` would take it.

    Number formats and kernels are the runtime's. Raises `InputError` for what the runtime has not, `LayoutError` with all findings where it
    cannot run the layout, `ModelError` for a model it cannot build.
    """
    default = Layout()
    absent = [name for name in ("peft", "optimizer", "offload", "shard_group") if getattr(layout, name) != getattr(default, name)]
    if layout.sharding == "zero2":
        absent.append("sharding")
    if absent:
        given = ", ".join(f"{name}={getattr(layout, name)}" for name in absent)
        raise InputError(given=given, why="a rehearsal trains all weights with AdamW, without it", try_="a layout without it")
    values = dict(fields)
    recompute = layout.recompute
    full = recompute.granularity == "full"
    config = RunConfig(
        model=ModelConfig(
            model_type=values.pop("model_type"),
            hf=values,
            seq_length=seq_len,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            sequence_parallel=layout.sp,
            cp_comm_type=layout.cp_comm,
            hierarchical_context_parallel_sizes=list(layout.cp_sizes) or None,
            num_layers_in_first_pipeline_stage=layout.first_stage_layers,
            num_layers_in_last_pipeline_stage=layout.last_stage_layers,
            account_for_embedding_in_pipeline_split=layout.account_for_embedding,
            account_for_loss_in_pipeline_split=layout.account_for_loss,
            pipeline_model_parallel_layout=pipeline_layout.unparse(layout.pipeline_layout) if layout.pipeline_layout else None,
            microbatch_group_size_per_vp_stage=layout.vpp_group,
            pipeline_schedule=layout.schedule,
            moe_expert_capacity_factor=layout.capacity_factor,
            recompute_granularity=None if recompute == Recompute() else recompute.granularity,
            recompute_method=recompute.method if full else None,
            recompute_num_layers=recompute.num_layers if full else None,
            recompute_modules=list(recompute.modules) or None,
        ),
        mixed_precision="bf16_mixed",
    )
    config.train.micro_batch_size, config.train.global_batch_size = layout.mbs, layout.gbs
    config.ddp.use_distributed_optimizer = layout.sharding == "distributed_optimizer"
    config.ddp.use_torch_fsdp2 = layout.sharding in ("fsdp2", "megatron_fsdp")
    return plan(config, layout.world)

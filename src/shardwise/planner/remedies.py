"""Remedies as changes of a layout. Each gives the layouts it would lead to on the same GPUs; none means it does not apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardwise.errors import LayoutError
from shardwise.spec.blocks import Mla
from shardwise.spec.layout import Layout, Offload, Recompute
from shardwise.spec.model import ModelSpec
from shardwise.spec.stages import layer_counts

Change = Callable[[Layout, ModelSpec], Iterator[Layout]]


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """``change`` is None for what is set outside the layout (an environment variable)."""

    text: str
    change: Change | None = None


def _set(**changes: object) -> Change:
    def change(layout: Layout, model: ModelSpec) -> Iterator[Layout]:
        if any(getattr(layout, name) != value for name, value in changes.items()):
            yield layout.replace(**changes)

    return change


def _double(name: str, most: Callable[[Layout, ModelSpec], int]) -> Change:
    """The degree doubled on the same world; the batch per replica follows."""

    def change(layout: Layout, model: ModelSpec) -> Iterator[Layout]:
        size = 2 * getattr(layout, name)
        if size <= most(layout, model):
            world = layout.world
            wider = layout.replace(**{name: size, "sp": layout.sp or name == "tp", "pipeline_layout": None})
            yield wider.with_world(world)

    return change


def _halve(name: str) -> Change:
    def change(layout: Layout, model: ModelSpec) -> Iterator[Layout]:
        if getattr(layout, name) > 1:
            yield layout.replace(**{name: max(1, getattr(layout, name) // 2), "pipeline_layout": None})

    return change


def _recompute(*modules: str, needs: Callable[[ModelSpec], bool] = lambda model: True) -> Change:
    def change(layout: Layout, model: ModelSpec) -> Iterator[Layout]:
        have = layout.recompute
        if needs(model) and have.granularity != "full" and not set(modules) <= set(have.modules):
            yield layout.replace(recompute=Recompute(granularity="selective", modules=tuple(dict.fromkeys((*have.modules, *modules)))))

    return change


def _whole_layers(layout: Layout, model: ModelSpec) -> Iterator[Layout]:
    if layout.recompute.granularity != "full":
        yield layout.replace(recompute=Recompute(granularity="full", method="uniform", num_layers=1))


def _move_layer(stage: int) -> Change:
    """One layer of the first (0) or last (-1) stage moved to the last middle stage with the fewest."""

    def change(layout: Layout, model: ModelSpec) -> Iterator[Layout]:
        try:
            counts = layer_counts(layout, model.num_layers)
        except LayoutError:
            return
        if layout.pp < 3 or counts[stage] < 2:
            return
        counts[stage] -= 1
        middle = min(range(1, len(counts) - 1), key=lambda index: (counts[index], -index))
        counts[middle] += 1
        words = ["t" * count for count in counts]
        words[0] = "E" + words[0]
        words[-1] += "m" * len(model.mtp) + "L"
        cleared = layout.replace(account_for_embedding=False, account_for_loss=False, first_stage_layers=None, last_stage_layers=None)
        yield cleared.replace(pipeline_layout=tuple(words))

    return change


def _offload(layout: Layout, model: ModelSpec) -> Iterator[Layout]:
    for share in (0.25, 0.5):
        if layout.offload.optimizer < share:
            yield layout.replace(offload=Offload(optimizer=share))


def _experts(layout: Layout, model: ModelSpec) -> int:
    return min(model.moe.experts, layout.world // layout.pp) if model.moe else 1


def _is_moe(model: ModelSpec) -> bool:
    return model.moe is not None


def _is_mla(model: ModelSpec) -> bool:
    return any(isinstance(block, Mla) for block in model.attentions)


REMEDIES: dict[str, Remedy] = {
    "expandable": Remedy(
        text="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (not with nccl_ub; with TE CUDA graphs also NCCL_GRAPH_REGISTER=0)"
    ),
    "less_for_torch": Remedy(text="torch.cuda.memory.set_per_process_memory_fraction(0.95): leave room for NCCL, cuBLAS and graphs"),
    "fewer_first": Remedy(text="one layer fewer on the first stage", change=_move_layer(0)),
    "fewer_last": Remedy(text="one layer fewer on the last stage", change=_move_layer(-1)),
    "smaller_mbs": Remedy(text="half the micro batch", change=_halve("mbs")),
    "larger_mbs": Remedy(text="twice the micro batch", change=_double("mbs", lambda layout, model: layout.gbs // layout.dp)),
    "no_vpp": Remedy(text="no virtual stages", change=_set(vpp=1, pipeline_layout=None)),
    "fused_loss": Remedy(text="fused cross entropy", change=_set(cross_entropy="fused")),
    "chunked_loss": Remedy(text="chunked cross entropy", change=_set(cross_entropy="chunked")),
    "distributed_optimizer": Remedy(text="distributed optimizer", change=_set(sharding="distributed_optimizer")),
    "small_moments": Remedy(text="precision-aware optimizer, bf16 moments", change=_set(moment_dtype="bf16")),
    "offload": Remedy(text="part of the optimizer on the CPU", change=_offload),
    "fsdp": Remedy(text="fully sharded parameters (Megatron FSDP)", change=_set(sharding="megatron_fsdp")),
    "more_ep": Remedy(text="twice the expert parallel size", change=_double("ep", _experts)),
    "more_pp": Remedy(text="twice the pipeline size", change=_double("pp", lambda layout, model: model.num_layers // layout.vpp)),
    "more_tp": Remedy(text="twice the tensor parallel size", change=_double("tp", lambda layout, model: 8)),
    "more_cp": Remedy(text="twice the context parallel size", change=_double("cp", lambda layout, model: layout.cp * layout.dp)),
    "less_tp": Remedy(text="half the tensor parallel size, more data parallel", change=_halve("tp")),
    "less_pp": Remedy(text="half the pipeline size, more data parallel", change=_halve("pp")),
    "sp": Remedy(text="sequence parallel", change=_set(sp=True)),
    "layernorm": Remedy(text="recompute layernorm", change=_recompute("layernorm")),
    "mlp": Remedy(text="recompute mlp", change=_recompute("mlp", needs=lambda model: not _is_moe(model))),
    "moe_act": Remedy(text="recompute moe_act", change=_recompute("moe_act", needs=_is_moe)),
    "moe": Remedy(text="recompute the whole moe block (not with EP overlap)", change=_recompute("moe", needs=_is_moe)),
    "mla_up_proj": Remedy(text="recompute mla_up_proj", change=_recompute("mla_up_proj", needs=_is_mla)),
    "full": Remedy(text="recompute whole layers", change=_whole_layers),
    "no_core_attn": Remedy(text="drop core_attn from the recompute list", change=_set(recompute=Recompute())),
    "capacity": Remedy(text="capacity factor 1.0 (drops tokens)", change=_set(capacity_factor=1.0)),
    "balance": Remedy(text="stronger balance: aux loss or expert bias (moe_aux_loss_coeff, moe_router_enable_expert_bias)"),
    "vpp": Remedy(text="virtual stages: 2 per rank", change=_set(vpp=2)),
    "graphs": Remedy(text="CUDA graphs", change=_set(cuda_graphs=True)),
    "manual_gc": Remedy(text="train.manual_gc=true, so that ranks collect garbage together"),
    "deepep": Remedy(text="DeepEP dispatcher (Ampere, Hopper, B200)", change=_set(dispatcher="deepep")),
    "hybridep": Remedy(text="HybridEP dispatcher (NVL72)", change=_set(dispatcher="hybridep")),
    "ep_overlap": Remedy(text="overlap_moe_expert_parallel_comm (not with shared-expert overlap)", change=_set(overlap_moe=True)),
    "cp_sizes": Remedy(text="hierarchical_context_parallel_sizes whose product is CP"),
    "per_token_loss": Remedy(text="calculate_per_token_loss=true, ddp.average_in_collective=false"),
    "optimizer_offload": Remedy(
        text="optimizer offload or fine-grained offload in place of cpu_offloading", change=_set(offload=Offload())
    ),
    "fix_batch": Remedy(text="the same global batch, dropout 0 and dropless routing in both runs before comparing losses"),
    "tokens": Remedy(text="the longest sequence and the evaluation batch, tried before the long run"),
}

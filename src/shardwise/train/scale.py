"""A recipe made small enough for a CPU, with the divisibility that its layout needs."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from math import lcm

from shardwise.spec.layout import Layout
from shardwise.train.config import RunConfig
from shardwise.train.plan import layout_of, model_fields

RANKS = 8  # at most, on one CPU machine
_HEAD = 8  # features of a head


def scaled_down(config: RunConfig, world: int | None = None) -> RunConfig:
    """The recipe with every degree capped at 2 where its world is too large, and layers, heads, experts and widths as small as the
    degrees allow: layers a multiple of the stages, heads of tp, key heads in the same relation to tp, experts of ep."""
    result = deepcopy(config)
    if _smallest(config) > RANKS:
        _cap(result)
    _shrink(result, layout_of(result, world or _smallest(result)))
    return result


def _smallest(config: RunConfig) -> int:
    from shardwise.spec.ranks import min_world

    return min_world(layout_of(config, 1))


def _cap(config: RunConfig) -> None:
    m = config.model
    for key in ("tensor", "pipeline", "expert"):
        name = f"{key}_model_parallel_size"
        setattr(m, name, min(2, getattr(m, name)))
    m.context_parallel_size = min(2, m.context_parallel_size)
    if m.virtual_pipeline_model_parallel_size:
        m.virtual_pipeline_model_parallel_size = 2 if m.pipeline_model_parallel_size > 1 else None
    m.expert_tensor_parallel_size = min(2, m.expert_tensor_parallel_size or 1)
    m.hierarchical_context_parallel_sizes = None
    m.cp_comm_type = "p2p" if m.cp_comm_type == "a2a+p2p" else m.cp_comm_type
    m.pipeline_model_parallel_layout = m.num_layers_in_first_pipeline_stage = m.num_layers_in_last_pipeline_stage = None
    if _smallest(config) > RANKS:
        m.context_parallel_size = 1


def _shrink(config: RunConfig, layout: Layout) -> None:
    m, fields = config.model, model_fields(config)
    kind = fields.pop("model_type")
    heads = lcm(4, layout.tp)
    old_heads, old_keys = fields.get("num_attention_heads", 1), fields.get("num_key_value_heads")
    small = {
        "num_hidden_layers": max(4, 2 * layout.stages) - layout.account_for_embedding - layout.account_for_loss,
        "num_attention_heads": heads,
        "hidden_size": _HEAD * heads,
        "head_dim": _HEAD,
        "intermediate_size": 12 * lcm(4, layout.tp, layout.etp),
        "moe_intermediate_size": 8 * lcm(2, layout.tp, layout.etp),
        "max_position_embeddings": 256,
        "vocab_size": 61,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": _HEAD,
        "qk_rope_head_dim": _HEAD,
        "v_head_dim": _HEAD,
        "n_group": 2 if (fields.get("n_group") or 1) > 1 else 1,
        "topk_group": 1,
        "num_experts_per_tok": min(2, fields.get("num_experts_per_tok") or 2),
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), lcm(8, layout.ep)),
    }
    if old_keys is not None:
        small["num_key_value_heads"] = heads if old_keys == old_heads else lcm(2, layout.tp) if old_keys >= layout.tp else old_keys
    fields.update({key: value for key, value in small.items() if fields.get(key) is not None})
    if isinstance(fields.get("rope_parameters"), dict):
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields["rope_parameters"]["rope_theta"]}
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    cleared = dict.fromkeys((*names, "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"))
    config.model = replace(m, model_type=kind, hf=fields, seq_length=16, vocab_size=61, **cleared)
    layout = layout_of(config, layout.world)
    config.train.micro_batch_size = 1
    config.train.global_batch_size = layout.dp * max(4, 2 * layout.pp)

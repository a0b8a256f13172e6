"""Model FLOPs of a training step, as published speeds count them."""

from __future__ import annotations

from shardwise.planner.layer_work import mean_keys
from shardwise.spec.blocks import Attention, Mla, Moe
from shardwise.spec.model import ModelSpec


def model_flops(model: ModelSpec, seq_len: int, *, attention: float = 1.0) -> float:
    """FLOPs of one token, forward and backward, as Megatron Bridge prints them: 6 per active parameter outside the embedding,
    plus causal attention; no recompute. ``attention`` multiplies the attention term: 2 counts the full square.
    """
    total = 6.0 * model.vocab * model.hidden * (1 + len(model.mtp))
    for layer, count in (*model.runs, *((layer, 1) for layer in model.mtp)):
        active = model.layer_params(layer).total
        if isinstance(layer.mlp, Moe):
            active -= (layer.mlp.experts - layer.mlp.top_k) * layer.mlp.expert_params(model.hidden)
        total += 6.0 * active * count
        if isinstance(layer.mixer, (Attention, Mla)):
            keys = mean_keys(seq_len, layer.mixer.window)
            total += 6.0 * attention * keys * layer.mixer.heads * (layer.mixer.head_dim + layer.mixer.v_dim) * count
    return total

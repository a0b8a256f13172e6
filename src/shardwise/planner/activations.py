"""Activation bytes one layer keeps for its backward pass, by part, on one rank, for one micro batch.

Counted from what the kernels of Transformer Engine and Megatron Core save (norm inputs, linear inputs, Q, K, V, attention
output and log-sum-exp, activation inputs), checked against measured runs.  Starting point: Korthikanti et al. 2022,
arXiv:2205.05198 (34 bytes per hidden feature and token for GPT).  Gated delta rule: flash-linear-attention,
`ChunkGatedDeltaRuleFunction`, as Megatron Core's `GatedDeltaNet` calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planner.layer_work import BF16, Shape
from shardwise.spec.blocks import Attention, CompressedAttention, DeltaNet, Layer, LinearMixer, Mamba2, Mla, Mlp, Moe
from shardwise.spec.layout import Recompute
from shardwise.spec.model import ModelSpec

# Bytes per element of a linear layer's saved input.
SAVED_INPUT = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8-delayed": 1.0,
    "fp8-current": 1.0,
    "fp8-rowwise": 1.0,
    "fp8-blockwise": 1.0,
    "mxfp8": 1.03,
    "nvfp4": 0.57,
}
# Precisions whose copy of a norm's output is kept by rows and by columns where the backward pass gathers it (sequence parallel):
# Transformer Engine, `_LayerNormLinear`, drops the rows of MXFP8 and blockwise FP8 only; per-tensor FP8 has one copy to gather.
KEPT_TWICE = ("nvfp4",)
LOG_SUM_EXP = 4
# Per token and value head of a gated delta rule: input and output of softplus and the chunk's summed decay (fp32), step size (bf16).
DELTA_SCALARS = 3 * 4 + 2
# Sparse attention without a fused kernel (`_unfused_absorbed_dsa_fn` and `masked_softmax` of Megatron Core's DSA reference): bytes per
# query, key and head. Kept: exponentials and their masked copy (fp32), three masks, and the probabilities for the product with V (bf16).
# The backward pass of the division holds five fp32 gradients and quotients when the last mask and the bf16 probabilities are gone.
# The indexer's loss keeps its inputs and computes all scores again (`FusedDSAIndexerLoss`).
SPARSE_SCORES, SPARSE_BACKWARD = 2 * 4 + 3 * 1 + 2, 5 * 4 - (1 + 2)
ROUTER_BYTES = 12  # per expert and token: logits and scores in fp32, routing map, sort indices

# What each name of a recompute list stands for here.
RECOMPUTED = {
    "core_attn": ("scores",),
    "attn": ("scores", "qkv", "attention_output", "expanded"),
    "layernorm": ("norm_output",),
    "mlp": ("mlp_hidden", "mlp_act"),
    "moe_act": ("moe_act",),
    "moe": ("moe_input", "moe_hidden", "moe_act", "router", "shared_hidden"),
    "shared_experts": ("shared_hidden",),
    "mla_up_proj": ("expanded",),
}
# Inputs of the modules of Megatron's fine-grained activation offloading.
OFFLOADED = {
    "expert_fc1": ("moe_input",),
    "moe_act": ("moe_hidden",),
    "fused_group_mlp": ("moe_input", "moe_hidden", "moe_act"),
    "attn_norm": ("norm_input",),
    "qkv_linear": ("norm_output",),
    "core_attn": ("qkv", "expanded", "scores"),
    "attn_proj": ("attention_output",),
}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes kept per part; the largest temporary of the layer's backward pass; its input; outputs of its matrix products.

    exchanged: one copy of the tokens routed through this rank's experts, bf16.
    """

    parts: dict[str, float]
    working: float
    input: float
    products: float
    exchanged: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def after(self, recompute: Recompute, offloaded: tuple[str, ...] = ()) -> float:
        """Bytes kept on the GPU when the modules of a selective recompute list are dropped and others moved to the host."""
        if "layer" in recompute.modules:  # torchtitan: every second layer
            return (self.total + self.input) / 2
        if "op" in recompute.modules:
            return (
                self.input
                + sum(size for part, size in self.parts.items() if part in ("attention_output", "log_sum_exp"))
                + self.products / 2
            )
        dropped = {part for name in recompute.modules for part in RECOMPUTED.get(name, ())}
        dropped |= {part for name in offloaded for part in OFFLOADED.get(name, ())}
        return sum(size for part, size in self.parts.items() if part not in dropped)


def _attention(block: Attention | Mla | CompressedAttention, shape: Shape, model: ModelSpec, parts: dict[str, float]) -> float:
    """Adds what attention keeps to ``parts``; returns the bytes its backward pass needs at once for gradients of its scores."""
    tokens, split, tp = shape.tokens, shape.split_tokens, shape.tp
    copy = SAVED_INPUT[shape.precision]
    heads = block.heads / tp
    output = BF16 * heads * block.v_dim * tokens
    parts["attention_output"] = output + (copy * heads * block.v_dim * tokens if copy < BF16 else 0.0)
    if isinstance(block, Mla):
        latents = (block.q_lora or 0) + block.kv_lora
        parts["latents"] = split * (BF16 * (latents + block.rope_dim) + copy * latents)
        parts["expanded"] = BF16 * tokens * heads * (2 * block.head_dim + block.v_dim)
    else:
        keys = block.kv_heads / min(tp, block.kv_heads) * block.head_dim
        if isinstance(block, Attention) and not block.own_kv:  # kept by the layer they come from
            keys = 0.0
        parts["qkv"] = BF16 * tokens * (heads * block.head_dim + 2 * keys)
        if isinstance(block, Attention) and block.qk_norm != "none":
            parts["qkv"] += BF16 * tokens * (heads * block.head_dim + keys)
        if isinstance(block, Attention) and block.gated:
            parts["qkv"] += 2 * BF16 * tokens * heads * block.head_dim
        if isinstance(block, Attention) and block.head_gate:  # the output before its gates, and those
            parts["qkv"] += BF16 * tokens * heads * (block.v_dim + 1)
    pairs = float(tokens) * shape.keys
    if shape.fused_attention:
        parts["log_sum_exp"] = LOG_SUM_EXP * tokens * heads
        return 0.0
    if isinstance(block, Mla) and block.indexer:  # its products keep Q and K of the latents in fp32, K and V once per head
        latent = block.kv_lora + block.rope_dim
        parts["scores"] = SPARSE_SCORES * pairs * heads + heads * tokens * (2 * 4 * latent + BF16 * block.kv_lora)
        return SPARSE_BACKWARD * pairs * heads
    parts["scores"] = (BF16 + (3 if model.dropout else 0)) * pairs * heads
    return BF16 * pairs * heads


def _delta_net(block: DeltaNet, shape: Shape, parts: dict[str, float]) -> float:
    """Adds what a gated delta rule layer keeps to ``parts``; returns the bytes its backward pass holds at once.

    Kept, in bf16: the input of the convolution; normalised Q and K, and both repeated for the value heads; V; the solved triangle of every
    chunk (its row of `chunk` per token and head); the output before and after its norm, the gate, and the input of the output projection.
    Backward: W, U and the states of all chunks are computed again, and gradients of Q, K (twice), V (twice), W and states stand beside them
    and the incoming gradient (`chunk_gated_delta_rule_bwd`).
    """
    heads, tokens = block.value_heads / shape.tp, shape.tokens
    key_width, value_width = block.key_width / shape.tp, block.value_width / shape.tp
    kept = block.conv_width / shape.tp + 2 * key_width + heads * (2 * block.key_dim + block.chunk) + 4 * value_width
    parts["scan"] = tokens * (BF16 * kept + DELTA_SCALARS * heads + SAVED_INPUT[shape.precision] * value_width)
    states = 2 * block.key_dim * block.value_dim / block.chunk
    return BF16 * tokens * heads * (5 * (block.key_dim + block.value_dim) + states)


def saved_by_layer(model: ModelSpec, layer: Layer, shape: Shape, *, imbalance: float = 1.0) -> Saved:
    """Bytes ``layer`` keeps on one rank; ``imbalance`` multiplies the tokens the hottest expert rank receives."""
    hidden, tokens, split, tp = model.hidden, shape.tokens, shape.split_tokens, shape.tp
    copy = SAVED_INPUT[shape.precision]
    gathered = copy * (2 if shape.precision in KEPT_TWICE and split < tokens else 1)
    parts: dict[str, float] = {}
    mixer, mlp = layer.mixer, layer.mlp
    blocks = (mixer is not None) + (mlp is not None)
    parts["norm_input"] = BF16 * hidden * split * blocks
    parts["norm_output"] = 0.0
    working = 2.0 * BF16 * hidden * tokens
    exchanged = 0.0
    products = 2.0 * BF16 * hidden * split  # output projection and down projection
    if isinstance(mixer, (Attention, Mla, CompressedAttention)):
        parts["norm_output"] += (copy if isinstance(mixer, Mla) else gathered) * hidden * split
        working = max(working, _attention(mixer, shape, model, parts))
        products += BF16 * tokens * (mixer.heads * mixer.head_dim + 2 * mixer.kv_heads * mixer.head_dim) / tp
    elif isinstance(mixer, Mamba2):  # its fused kernel keeps the projection and the scan's output and computes the rest again
        parts["norm_output"] += gathered * hidden * split
        parts["scan"] = BF16 * tokens * (mixer.in_width + 2 * mixer.inner) / tp
        working = max(working, BF16 * tokens * 2 * mixer.in_width / tp)
    elif isinstance(mixer, DeltaNet):
        parts["norm_output"] += gathered * hidden * split
        working = max(working, _delta_net(mixer, shape, parts))
    elif isinstance(mixer, LinearMixer):
        parts["norm_output"] += copy * hidden * split
    if model.dropout:
        parts["dropout"] = 1.0 * hidden * split * blocks
    if isinstance(mlp, Mlp):
        ffn = mlp.ffn / tp
        up = ffn * (2 if mlp.gated else 1)
        parts["norm_output"] += gathered * hidden * split
        parts["mlp_hidden"] = BF16 * up * tokens
        parts["mlp_act"] = copy * ffn * tokens
        working = max(working, BF16 * (up + ffn) * tokens)
        products += BF16 * up * tokens
    elif isinstance(mlp, Moe):
        width = mlp.latent or hidden
        share = min(1.0, shape.capacity) if shape.capacity else imbalance
        received = shape.routed_tokens * mlp.top_k * shape.etp * share
        ffn = mlp.ffn / shape.etp
        up = ffn * (2 if mlp.gated else 1)
        parts["norm_output"] += BF16 * hidden * split
        parts["moe_input"] = copy * width * received
        parts["moe_hidden"] = BF16 * up * received
        parts["moe_act"] = copy * ffn * received
        if not mlp.gated:  # activation and scaling by the router's probabilities are two kernels
            parts["moe_act"] += BF16 * ffn * received
        parts["router"] = float(ROUTER_BYTES * mlp.experts * shape.routed_tokens)
        if mlp.latent:
            parts["latent"] = BF16 * (width + hidden) * shape.routed_tokens
        if mlp.shared_ffn:
            gated = mlp.gated if mlp.shared_gated is None else mlp.shared_gated
            shared = mlp.shared_ffn / tp
            parts["shared_hidden"] = (BF16 * shared * (2 if gated else 1) + copy * shared) * tokens
        working = max(working, BF16 * (width + up + ffn) * received)
        exchanged = BF16 * width * received
        products += BF16 * (up + width) * received
        if shape.dispatcher == "allgather":
            parts["moe_gathered"] = 3 * BF16 * width * shape.routed_tokens * shape.ep * shape.etp
    if layer.input_width:  # inputs of the gate, of its activation, product and projection, and of the norms
        parts["layer_input"] = BF16 * split * (2.0 * hidden + 5 * layer.input_width)
    return Saved(parts=parts, working=working, input=layer_input(model, shape), products=products, exchanged=exchanged)


def layer_input(model: ModelSpec, shape: Shape) -> float:
    """Bytes of one layer input: what full recompute keeps."""
    return float(BF16 * model.hidden * shape.split_tokens)


def weight_sizes(model: ModelSpec, layer: Layer, tp: int, etp: int) -> set[int]:
    """Elements of the distinct weight matrices of a layer on one rank."""
    hidden, sizes = model.hidden, set()
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, Attention):
        sizes |= {hidden * (mixer.q_width // tp + mixer.kv_width // min(tp, mixer.kv_heads)), hidden * mixer.heads * mixer.v_dim // tp}
    elif isinstance(mixer, Mla):
        sizes |= {(mixer.q_lora or hidden) * mixer.heads * mixer.head_dim // tp, hidden * mixer.heads * mixer.v_dim // tp}
        sizes |= {mixer.kv_lora * mixer.heads * (mixer.nope_dim + mixer.v_dim) // tp, hidden * (mixer.kv_lora + mixer.rope_dim)}
    elif isinstance(mixer, (Mamba2, DeltaNet)):
        sizes |= {hidden * mixer.in_width // tp}
    if isinstance(mlp, Mlp):
        sizes |= {hidden * mlp.ffn * (2 if mlp.gated else 1) // tp, hidden * mlp.ffn // tp}
    elif isinstance(mlp, Moe):
        width = mlp.latent or hidden
        sizes |= {width * mlp.ffn * (2 if mlp.gated else 1) // etp, width * mlp.ffn // etp, hidden * mlp.shared_ffn // tp}
    return sizes

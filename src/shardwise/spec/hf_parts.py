"""Parts that many Hugging Face families share: attention, MLP, mixture of experts, and the model around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwise.spec.blocks import Attention, DeltaNet, Indexer, Layer, Mla, Mlp, Moe
from shardwise.spec.hf_config import Config
from shardwise.spec.model import ModelSpec

FULL, SLIDING, LINEAR = "full", "sliding", "linear"
LAYER_WORDS = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": SLIDING,
    "linear_attention": LINEAR,
}
_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "swish": "silu", "swigluoai": "silu"}


def activation(c: Config, *names: str, default: str = "silu") -> str:
    word = c.word(*(names or ("hidden_act", "hidden_activation")), default=default)
    return _ACTIVATIONS.get(word, word)


def attention(c: Config, **options: Any) -> Attention:
    """Softmax attention from the usual fields; `options` are fields of `Attention` and win."""
    heads = options.pop("heads", None) or c.integer("num_attention_heads", "n_head", "num_heads")
    kv_heads = options.pop("kv_heads", None) or c.integer("num_key_value_heads", default=heads)
    head_dim = options.pop("head_dim", None)
    if head_dim is None:
        hidden = c.integer("hidden_size", "n_embed", "n_embd")
        head_dim = c.optional("head_dim", "kv_channels", "attention_head_dim") or max(1, hidden // heads)
        if not c.has("head_dim") and hidden % heads:
            c.problem(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is missing")
    if heads % kv_heads:
        c.problem(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    return Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, **options)


def mla(c: Config, indexer: bool = False) -> Mla:
    """Latent attention; `indexer` adds the key selector of DeepSeek sparse attention."""
    hidden, bias = c.integer("hidden_size"), c.boolean("attention_bias", False)
    if "q_lora_rank" not in c.values:
        c.problem("q_lora_rank is missing (null or 0: queries are projected directly)")
    q_lora = c.optional("q_lora_rank", least=0) or None
    selector = None
    if indexer:
        heads, dim = c.integer("index_n_heads"), c.integer("index_head_dim")
        # queries from the latent, keys and head weights from the hidden state, a LayerNorm on the keys
        exact = (q_lora or hidden) * heads * dim + hidden * dim + 2 * dim + hidden * heads
        selector = Indexer(heads=heads, head_dim=dim, top_k=c.integer("index_topk"), params=exact)
    return Mla(
        heads=c.integer("num_attention_heads"),
        q_lora=q_lora,
        kv_lora=c.integer("kv_lora_rank"),
        nope_dim=c.integer("qk_nope_head_dim"),
        rope_dim=c.integer("qk_rope_head_dim"),
        v_head_dim=c.integer("v_head_dim"),
        bias=bias,
        indexer=selector,
    )


def delta_net(c: Config) -> DeltaNet:
    return DeltaNet(
        key_heads=c.integer("linear_num_key_heads"),
        value_heads=c.integer("linear_num_value_heads"),
        key_dim=c.integer("linear_key_head_dim"),
        value_dim=c.integer("linear_value_head_dim"),
        conv=c.integer("linear_conv_kernel_dim"),
    )


def mlp(c: Config, *, gated: bool = True, bias: bool = False, ffn: int | None = None, act: str = "silu") -> Mlp:
    width = ffn or c.integer("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    return Mlp(ffn=width, gated=gated, bias=bias, activation=activation(c, default=act))


def experts(c: Config, **options: Any) -> Moe:
    """A mixture of experts from the usual fields; `options` are fields of `Moe` and win."""
    count = c.integer("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    top_k = c.integer("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
    ffn = options.pop("ffn", None) or c.integer("moe_intermediate_size", "intermediate_size")
    if top_k > count:
        c.problem(f"num_experts_per_tok {top_k} is more than the {count} experts")
    groups, kept = c.optional("n_group"), c.optional("topk_group")
    if groups is not None and groups > 1:
        options.update(groups=groups, group_topk=kept or groups)
    options.setdefault("activation", activation(c))
    return Moe(experts=count, top_k=min(top_k, count), ffn=ffn, **options)


def deepseek_experts(c: Config, **options: Any) -> Moe:
    """Experts with `n_shared_experts` shared ones and a balance bias, as in DeepSeek-V3 and its descendants."""
    shared = c.integer("n_shared_experts", "num_shared_experts", default=0, least=0)
    ffn = c.integer("moe_intermediate_size")
    return experts(c, shared_ffn=shared * ffn, score="sigmoid", expert_bias=True, **options)


def sparse_layers(c: Config, dense: int = 0) -> Callable[[int], bool]:
    """Whether a layer has experts: as listed, else every `moe_layer_freq`-th after the first dense ones, `dense` where not given."""
    words = c.sequence("mlp_layer_types", str, c.layers)
    if words is not None:
        return lambda i: words[i] == "sparse"
    if isinstance(c.values.get("moe_layer_freq"), list):
        flags = c.sequence("moe_layer_freq", int, c.layers)
        return lambda i: bool(flags and flags[i])
    named = c.values.get("moe_layers_enum")
    if named is not None:
        listed = named.split(",") if isinstance(named, str) else c.sequence("moe_layers_enum", int) or ()
        indices = {str(each).strip() for each in listed}
        return lambda i: str(i) in indices
    first, every = c.integer("first_k_dense_replace", default=dense, least=0), c.integer("moe_layer_freq", default=1)
    return lambda i: i >= first and i % every == 0


def window(c: Config, kind: str, *names: str) -> int | None:
    return c.integer(*(names or ("sliding_window",))) if kind == SLIDING else None


def model(c: Config, name: str, layers: Sequence[Layer], *, tied: bool, **options: Any) -> ModelSpec:
    """The model around its layers; `options` are fields of `ModelSpec`."""
    options.setdefault("max_positions", c.optional("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length"))
    return ModelSpec(
        name=name,
        hidden=c.integer("hidden_size", "n_embed", "n_embd"),
        vocab=c.integer("vocab_size"),
        layers=tuple(layers),
        tied=c.boolean("tie_word_embeddings", tied),
        **options,
    )


def mtp(c: Config, layer: Layer, *names: str) -> tuple[Layer, ...]:
    """Multi-token prediction layers, each like `layer`."""
    return (layer,) * c.integer(*(names or ("num_nextn_predict_layers",)), default=0, least=0, most=16)

"""Hugging Face model types: what each family's config fields mean. `FAMILIES` maps `model_type` to a builder.

Defaults are those the family's own configuration class gives a field that `config.json` leaves out.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.spec.blocks import Layer, Mlp, Moe
from shardwise.spec.hf_config import Config
from shardwise.spec.hf_parts import (
    FULL,
    LAYER_WORDS,
    LINEAR,
    SLIDING,
    activation,
    attention,
    deepseek_experts,
    delta_net,
    experts,
    mla,
    mlp,
    model,
    mtp,
    sparse_layers,
    window,
)
from shardwise.spec.hf_special import deepseek_v4, gemma4, minimax_m3, nemotron_h, nemotron_nas, step3p5
from shardwise.spec.model import ModelSpec

Builder = Callable[[Config, str], ModelSpec]


def llama(c: Config, name: str) -> ModelSpec:
    bias = c.boolean("attention_bias", False)
    layer = Layer(mixer=attention(c, qkv_bias=bias, out_bias=bias), mlp=mlp(c, bias=c.boolean("mlp_bias", False)))
    return model(c, name, (layer,) * c.layers, tied=False)


def mistral(c: Config, name: str) -> ModelSpec:
    layer = Layer(mixer=attention(c, window=c.optional("sliding_window")), mlp=mlp(c))
    return model(c, name, (layer,) * c.layers, tied=False)


def _exaone_windows(c: Config) -> list[int | None]:
    """A window on all layers but every fourth, or as the letters L and G or a list of sizes say; none where it is null or 0."""
    listed = c.sequence("sliding_windows", int, c.layers)
    if listed is not None:
        if any(each < 0 for each in listed):
            c.problem("sliding_windows must be 0 or more")
        return [each or None for each in listed[: c.layers]]
    wide, pattern = c.integer("sliding_window", default=4096, least=0) if c.values.get("sliding_window", 4096) is not None else 0, 4
    given = c.values.get("sliding_window_pattern")
    if given is not None:
        pattern = len(given) if isinstance(given, str) and given else c.integer("sliding_window_pattern")
    kinds = c.kinds("layer_types", LAYER_WORDS, lambda i: SLIDING if wide and (i + 1) % pattern else FULL)
    return [wide if kind == SLIDING else None for kind in kinds]


def exaone4(c: Config, name: str) -> ModelSpec:
    layers = [Layer(mixer=attention(c, qk_norm="head", window=each), mlp=mlp(c)) for each in _exaone_windows(c)]
    return model(c, name, layers, tied=False, mtp=mtp(c, Layer(mixer=attention(c, qk_norm="head"), mlp=mlp(c))))


def exaone_moe(c: Config, name: str) -> ModelSpec:
    sparse, dense = sparse_layers(c, 1), mlp(c)
    moe = deepseek_experts(Config({"num_shared_experts": 1, **c.values}, c.problems))
    windows = _exaone_windows(c)
    layers = [Layer(mixer=attention(c, qk_norm="head", window=each), mlp=moe if sparse(i) else dense) for i, each in enumerate(windows)]
    last = Layer(mixer=attention(c, qk_norm="head"), mlp=dense)
    named = c.sequence("mtp_layer_types", str)  # one a layer, where one layer is applied several times
    return model(c, name, layers, tied=False, mtp=(last,) * len(named) if named else mtp(c, last))


def mixtral(c: Config, name: str) -> ModelSpec:
    layer = Layer(mixer=attention(c, window=c.optional("sliding_window")), mlp=experts(c))
    return model(c, name, (layer,) * c.layers, tied=False)


def _qwen_windows(c: Config) -> list[int | None]:
    """Qwen2 and Qwen3: a window on the layers from `max_window_layers` on, if switched on."""
    if not c.boolean("use_sliding_window", False):
        return [None] * c.layers
    first = c.integer("max_window_layers", default=28, least=0)
    kinds = c.kinds("layer_types", LAYER_WORDS, lambda i: SLIDING if i >= first else FULL)
    return [window(c, kind) for kind in kinds]


def _sparse_steps(c: Config) -> Callable[[int], bool]:
    """Qwen: which layers have experts."""
    dense = c.sequence("mlp_only_layers", int) or ()
    step = c.integer("decoder_sparse_step", default=1)
    return lambda i: i not in dense and (i + 1) % step == 0


def qwen2(c: Config, name: str) -> ModelSpec:
    layers = [Layer(mixer=attention(c, qkv_bias=True, window=each), mlp=mlp(c)) for each in _qwen_windows(c)]
    return model(c, name, layers, tied=False)


def qwen2_moe(c: Config, name: str) -> ModelSpec:
    sparse = _sparse_steps(c)
    bias = c.boolean("qkv_bias", True)
    moe = experts(c, shared_ffn=c.integer("shared_expert_intermediate_size"), shared_gate=True, pre_softmax=True)
    layers = [
        Layer(mixer=attention(c, qkv_bias=bias, window=each), mlp=moe if sparse(i) else mlp(c)) for i, each in enumerate(_qwen_windows(c))
    ]
    return model(c, name, layers, tied=False)


def qwen3(c: Config, name: str) -> ModelSpec:
    bias = c.boolean("attention_bias", False)
    layers = [Layer(mixer=attention(c, qkv_bias=bias, out_bias=bias, qk_norm="head", window=each), mlp=mlp(c)) for each in _qwen_windows(c)]
    return model(c, name, layers, tied=False)


def qwen3_moe(c: Config, name: str) -> ModelSpec:
    sparse, bias = _sparse_steps(c), c.boolean("attention_bias", False)
    moe = experts(c)
    layers = [
        Layer(mixer=attention(c, qkv_bias=bias, out_bias=bias, qk_norm="head", window=each), mlp=moe if sparse(i) else mlp(c))
        for i, each in enumerate(_qwen_windows(c))
    ]
    return model(c, name, layers, tied=False)


def _gated_hybrid(c: Config, name: str, feed: Callable[[int], Mlp | Moe]) -> ModelSpec:
    """Gated attention on every n-th layer, gated delta rule on the others (Qwen3-Next, Qwen3.5)."""
    every = c.integer("full_attention_interval", default=4)
    kinds = c.kinds("layer_types", LAYER_WORDS, lambda i: LINEAR if (i + 1) % every else FULL)
    bias = c.boolean("attention_bias", False)
    full = attention(c, qkv_bias=bias, out_bias=bias, qk_norm="head", gated=True)
    layers = [Layer(mixer=delta_net(c) if kind == LINEAR else full, mlp=feed(i)) for i, kind in enumerate(kinds)]
    extra = mtp(c, Layer(mixer=full, mlp=feed(c.layers - 1)), "mtp_num_hidden_layers", "num_nextn_predict_layers")
    return model(c, name, layers, tied=False, mtp=extra)


def _qwen_shared_experts(c: Config) -> Moe:
    return experts(c, shared_ffn=c.integer("shared_expert_intermediate_size"), shared_gate=True)


def qwen3_next(c: Config, name: str) -> ModelSpec:
    sparse, moe = _sparse_steps(c), _qwen_shared_experts(c)
    return _gated_hybrid(c, name, lambda i: moe if sparse(i) else mlp(c))


def qwen3_5(c: Config, name: str) -> ModelSpec:
    dense = mlp(c)
    return _gated_hybrid(c, name, lambda i: dense)


def qwen3_5_moe(c: Config, name: str) -> ModelSpec:
    moe = _qwen_shared_experts(c)
    return _gated_hybrid(c, name, lambda i: moe)


def gemma(c: Config, name: str) -> ModelSpec:
    bias = c.boolean("attention_bias", False)
    layer = Layer(mixer=attention(c, qkv_bias=bias, out_bias=bias), mlp=mlp(c, act="gelu"))
    return model(c, name, (layer,) * c.layers, tied=True)


def gemma2(c: Config, name: str) -> ModelSpec:
    bias = c.boolean("attention_bias", False)
    kinds = c.kinds("layer_types", LAYER_WORDS, lambda i: FULL if i % 2 else SLIDING)
    layers = [
        Layer(mixer=attention(c, qkv_bias=bias, out_bias=bias, window=window(c, kind)), mlp=mlp(c, act="gelu"), norms=4) for kind in kinds
    ]
    return model(c, name, layers, tied=True)


def gemma3(c: Config, name: str) -> ModelSpec:
    c = Config({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, **c.values}, c.problems)
    bias, every = c.boolean("attention_bias", False), c.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    kinds = c.kinds("layer_types", LAYER_WORDS, lambda i: SLIDING if (i + 1) % every else FULL)
    layers = [
        Layer(mixer=attention(c, qkv_bias=bias, out_bias=bias, qk_norm="head", window=window(c, kind)), mlp=mlp(c, act="gelu"), norms=4)
        for kind in kinds
    ]
    return model(c, name, layers, tied=True)


def glm4(c: Config, name: str) -> ModelSpec:
    layer = Layer(mixer=attention(c, qkv_bias=c.boolean("attention_bias", False)), mlp=mlp(c), norms=4)
    return model(c, name, (layer,) * c.layers, tied=False)


def glm4_moe(c: Config, name: str) -> ModelSpec:
    sparse, norm = sparse_layers(c, 1), "head" if c.boolean("use_qk_norm", False) else "none"
    mixer, moe = attention(c, qkv_bias=c.boolean("attention_bias", False), qk_norm=norm), deepseek_experts(c)
    layers = [Layer(mixer=mixer, mlp=moe if sparse(i) else mlp(c)) for i in range(c.layers)]
    return model(c, name, layers, tied=False, mtp=mtp(c, Layer(mixer=mixer, mlp=moe)))


def deepseek_v2(c: Config, name: str) -> ModelSpec:
    sparse, ffn = sparse_layers(c), c.integer("moe_intermediate_size")
    shared = c.integer("n_shared_experts", default=0, least=0) * ffn
    groups = c.word("topk_method", default="greedy") == "group_limited_greedy"
    values = c.values if groups else {**c.values, "n_group": None}
    moe = experts(Config(values, c.problems), shared_ffn=shared, pre_softmax=True)
    mixer = mla(c)
    layers = [Layer(mixer=mixer, mlp=moe if sparse(i) else mlp(c)) for i in range(c.layers)]
    return model(c, name, layers, tied=False)


def deepseek_v3(c: Config, name: str) -> ModelSpec:
    sparse, mixer, moe = sparse_layers(c, 3), mla(c), deepseek_experts(c)
    layers = [Layer(mixer=mixer, mlp=moe if sparse(i) else mlp(c)) for i in range(c.layers)]
    return model(c, name, layers, tied=False, mtp=mtp(c, Layer(mixer=mixer, mlp=moe)))


def glm4_moe_lite(c: Config, name: str) -> ModelSpec:
    return deepseek_v3(Config({"first_k_dense_replace": 1, **c.values}, c.problems), name)


def glm_moe_dsa(c: Config, name: str) -> ModelSpec:
    sparse, mixer, moe = sparse_layers(c, 3), mla(c, indexer=True), deepseek_experts(c)
    layers = [Layer(mixer=mixer, mlp=moe if sparse(i) else mlp(c)) for i in range(c.layers)]
    return model(c, name, layers, tied=False, mtp=mtp(c, Layer(mixer=mixer, mlp=moe)))


def olmoe(c: Config, name: str) -> ModelSpec:
    bias = c.boolean("attention_bias", False)
    moe = experts(c, ffn=c.integer("intermediate_size"), pre_softmax=True)
    layer = Layer(mixer=attention(c, qkv_bias=bias, out_bias=bias, qk_norm="full"), mlp=moe)
    return model(c, name, (layer,) * c.layers, tied=False)


def minimax_m2(c: Config, name: str) -> ModelSpec:
    norm = "full" if c.boolean("use_qk_norm", True) else "none"
    moe = experts(c, ffn=c.integer("intermediate_size"), score="sigmoid", expert_bias=True)
    return model(c, name, (Layer(mixer=attention(c, qk_norm=norm), mlp=moe),) * c.layers, tied=False)


def gpt_oss(c: Config, name: str) -> ModelSpec:
    bias = c.boolean("attention_bias", True)
    kinds = c.kinds("layer_types", LAYER_WORDS, lambda i: FULL if i % 2 else SLIDING)
    moe = experts(c, ffn=c.integer("intermediate_size"), bias=True, router_bias=True)
    layers = [Layer(mixer=attention(c, qkv_bias=bias, out_bias=bias, sinks=True, window=window(c, kind)), mlp=moe) for kind in kinds]
    return model(c, name, layers, tied=False)


def llama4(c: Config, name: str) -> ModelSpec:
    bias, step = c.boolean("attention_bias", False), c.integer("interleave_moe_layer_step", default=1)
    listed = c.sequence("moe_layers", int)
    roped = c.sequence("no_rope_layers", int, c.layers) or None
    every = c.integer("no_rope_layer_interval", default=4)
    shared = c.integer("intermediate_size")
    moe = experts(c, ffn=shared, shared_ffn=shared, score="sigmoid")
    dense = mlp(c, ffn=c.integer("intermediate_size_mlp"))
    chunk = c.integer("attention_chunk_size", default=8192)
    layers = []
    for i in range(c.layers):
        local = bool(roped[i]) if roped else bool((i + 1) % every)
        sparse = i in listed if listed else (i + 1) % step == 0
        mixer = attention(c, qkv_bias=bias, out_bias=bias, window=chunk if local else None)
        layers.append(Layer(mixer=mixer, mlp=moe if sparse else dense))
    return model(c, name, layers, tied=False)


def nemotron(c: Config, name: str) -> ModelSpec:
    bias = c.boolean("attention_bias", False)
    feed = mlp(c, gated=False, bias=c.boolean("mlp_bias", False), act="relu2")
    layer = Layer(mixer=attention(c, qkv_bias=bias, out_bias=bias), mlp=feed)
    return model(c, name, (layer,) * c.layers, tied=False, norm_bias=True)


def phi3(c: Config, name: str) -> ModelSpec:
    layer = Layer(mixer=attention(c, window=c.optional("sliding_window")), mlp=mlp(c))
    return model(c, name, (layer,) * c.layers, tied=False)


def starcoder2(c: Config, name: str) -> ModelSpec:
    bias = c.boolean("use_bias", True)
    mixer = attention(c, qkv_bias=bias, out_bias=bias, window=c.optional("sliding_window"))
    layer = Layer(mixer=mixer, mlp=mlp(c, gated=False, bias=bias, act="gelu"))
    return model(c, name, (layer,) * c.layers, tied=True, norm_bias=True)


def _multi_head(c: Config) -> Config:
    """Families older than grouped queries: as many key heads as heads, of hidden / heads features."""
    return Config({**c.values, "num_key_value_heads": None, "head_dim": None}, c.problems)


def bloom(c: Config, name: str) -> ModelSpec:
    ffn = 4 * c.integer("hidden_size", "n_embed")
    feed = Mlp(ffn=ffn, gated=False, bias=True, activation="gelu")
    layer = Layer(mixer=attention(_multi_head(c), qkv_bias=True, out_bias=True), mlp=feed)
    return model(c, name, (layer,) * c.layers, tied=True, norm_bias=True, embedding_norm=True, max_positions=None)


def opt(c: Config, name: str) -> ModelSpec:
    hidden = c.integer("hidden_size")
    if c.integer("word_embed_proj_dim", default=hidden) != hidden:
        c.problem("word_embed_proj_dim other than hidden_size is not supported")
    if not c.boolean("do_layer_norm_before", True):
        c.problem("do_layer_norm_before=false is not supported")
    bias = c.boolean("enable_bias", True)
    feed = Mlp(ffn=c.integer("ffn_dim"), gated=False, bias=bias, activation=activation(c, "activation_function", default="relu"))
    layer = Layer(mixer=attention(_multi_head(c), qkv_bias=bias, out_bias=bias), mlp=feed)
    # two rows of the position table are never used
    positions = c.integer("max_position_embeddings", default=2048) + 2
    return model(c, name, (layer,) * c.layers, tied=True, norm_bias=True, positions=positions, dropout=0.1)


def gpt2(c: Config, name: str) -> ModelSpec:
    hidden = c.integer("n_embd", "hidden_size")
    ffn = c.integer("n_inner", default=4 * hidden)
    feed = Mlp(ffn=ffn, gated=False, bias=True, activation="gelu")
    layer = Layer(mixer=attention(_multi_head(c), qkv_bias=True, out_bias=True), mlp=feed)
    positions = c.integer("n_positions", "max_position_embeddings", default=1024)
    return model(c, name, (layer,) * c.layers, tied=True, norm_bias=True, positions=positions, dropout=0.1)


def grok(c: Config, name: str) -> ModelSpec:
    moe = experts(c, ffn=c.integer("intermediate_size"), activation="gelu", pre_softmax=True)
    return model(c, name, (Layer(mixer=attention(c), mlp=moe, norms=4),) * c.layers, tied=True)


def internlm(c: Config, name: str) -> ModelSpec:
    bias = c.boolean("bias", True)
    layer = Layer(mixer=attention(c, qkv_bias=bias, out_bias=bias), mlp=mlp(c))
    return model(c, name, (layer,) * c.layers, tied=False)


def mimo(c: Config, name: str) -> ModelSpec:
    layer = Layer(mixer=attention(c, qkv_bias=c.boolean("attention_bias", True)), mlp=mlp(c))
    return model(c, name, (layer,) * c.layers, tied=False, mtp=mtp(c, layer))


def bailing_moe(c: Config, name: str) -> ModelSpec:
    sparse, qkv_bias, bias = sparse_layers(c), c.boolean("use_qkv_bias", False), c.boolean("use_bias", False)
    mixer = attention(c, qkv_bias=qkv_bias, out_bias=bias, qk_norm="head" if c.boolean("use_qk_norm", True) else "none")
    moe = deepseek_experts(c)
    layers = [Layer(mixer=mixer, mlp=moe if sparse(i) else mlp(c)) for i in range(c.layers)]
    return model(c, name, layers, tied=False, mtp=mtp(c, Layer(mixer=mixer, mlp=moe)))


FAMILIES: dict[str, Builder] = {
    "llama": llama,
    "mistral": mistral,
    "ministral3": mistral,
    "exaone4": exaone4,
    "exaone4_5_text": exaone4,
    "exaone_moe": exaone_moe,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "glm_moe_dsa": glm_moe_dsa,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "deepseek_v4": deepseek_v4,
    "olmoe": olmoe,
    "minimax_m2": minimax_m2,
    "minimax_m3_vl_text": minimax_m3,
    "minimax_m3_text": minimax_m3,
    "step3p5": step3p5,
    "gpt_oss": gpt_oss,
    "llama4_text": llama4,
    "nemotron": nemotron,
    "nemotron_h": nemotron_h,
    "nemotron-nas": nemotron_nas,
    "phi3": phi3,
    "starcoder2": starcoder2,
    "bloom": bloom,
    "opt": opt,
    "gpt2": gpt2,
    "grok-1": grok,
    "internlm": internlm,
    "baichuan": llama,
    "aquila": llama,
    "mimo": mimo,
    "bailing_moe_v2": bailing_moe,
}

# multimodal configs: the language model is the section `text_config`, of this type unless it says its own
WRAPPERS: dict[str, str] = {
    "mistral3": "mistral",
    "exaone4_5": "exaone4",
    "nemotron_h_omni": "nemotron_h",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "step3p7": "step3p5",
    "llama4": "llama4_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}

"""Hugging Face families with blocks of their own: Gemma 4, DeepSeek-V4, MiniMax-M3, Step, Nemotron-H and searched Llama-Nemotron models."""

from __future__ import annotations

from dataclasses import replace

from shardwise.spec.blocks import CompressedAttention, Indexer, Layer, LinearMixer, Mamba2, Mixer, Mlp, Moe
from shardwise.spec.hf_config import Config
from shardwise.spec.hf_parts import FULL, LAYER_WORDS, SLIDING, activation, attention, experts, mlp, model, mtp, sparse_layers
from shardwise.spec.model import ModelSpec


def gemma4(c: Config, name: str) -> ModelSpec:
    """Full-attention layers have their own head size and, with `attention_k_eq_v`, one projection for keys and values.

    The last `num_kv_shared_layers` use the keys and values of an earlier layer; every layer may have an embedding of its own.
    """
    hidden, bias, shared_kv = c.integer("hidden_size"), c.boolean("attention_bias", False), c.boolean("attention_k_eq_v", False)
    local = attention(c, qkv_bias=bias, out_bias=bias, qk_norm="head", window=c.integer("sliding_window", default=512))
    wide = attention(
        c,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        head_dim=c.integer("global_head_dim", default=512),
        kv_heads=c.optional("num_global_key_value_heads") if shared_kv else None,
        shared_kv=shared_kv,
    )
    kinds = c.kinds("layer_types", LAYER_WORDS, lambda i: SLIDING if (i + 1) % 6 else FULL)
    kinds[-1] = FULL  # always
    own = c.layers - c.integer("num_kv_shared_layers", default=0, least=0, most=c.layers)
    double = c.boolean("use_double_wide_mlp", False)
    inputs = c.integer("hidden_size_per_layer_input", default=256, least=0)
    sparse = c.boolean("enable_moe_block", False)

    def feed(ffn: int) -> Mlp | Moe:
        if not sparse:
            return mlp(c, act="gelu", ffn=ffn)
        # the dense MLP runs beside the experts; the router has a scale per feature and per expert
        scale = hidden + c.integer("num_experts")
        return experts(c, shared_ffn=ffn, router_params=scale, activation=activation(c, default="gelu"))

    ffn, norms = c.integer("intermediate_size"), (7 if sparse else 4) + (inputs > 0)
    layers = []
    for i, kind in enumerate(kinds):
        mixer = replace(local if kind == SLIDING else wide, own_kv=i < own)
        layers.append(Layer(mixer=mixer, mlp=feed(2 * ffn if double and i >= own else ffn), norms=norms, input_width=inputs))
    rows = c.integer("vocab_size_per_layer_input", default=262_144) if inputs else 0
    return model(c, name, layers, tied=True, input_vocab=rows)


def minimax_m3(c: Config, name: str) -> ModelSpec:
    """Queries of sparse layers attend to the blocks of keys an indexer scores highest, chosen anew for each KV head."""
    nested = c.section("sparse_attention_config") if c.has("sparse_attention_config") else Config({}, c.problems)
    flags = nested.sequence("sparse_attention_freq", int, c.layers)
    words = {"full_attention": FULL, "minimax_m3_sparse": "sparse"}
    kinds = c.kinds("layer_types", words, lambda i: "sparse" if flags and flags[i] else FULL)

    def read(field: str, nested_field: str) -> int:
        return nested.integer(nested_field) if nested.has(nested_field) else c.integer(field)

    full = attention(c, qk_norm="head")
    mixers = {FULL: full}
    if "sparse" in kinds:
        heads, dim = read("index_n_heads", "sparse_num_index_heads"), read("index_head_dim", "sparse_index_dim")
        chosen = read("index_topk_blocks", "sparse_topk_blocks") * read("index_block_size", "sparse_block_size")
        # queries, keys of one head, and a norm on each
        exact = c.integer("hidden_size") * (heads + 1) * dim + 2 * dim
        mixers["sparse"] = replace(full, indexer=Indexer(heads=heads, head_dim=dim, top_k=chosen, params=exact))
    ffn, shared = c.integer("intermediate_size"), c.integer("shared_intermediate_size")
    moe = experts(c, ffn=ffn, shared_ffn=shared, score="sigmoid", expert_bias=True)
    sparse, dense = sparse_layers(c), mlp(c, ffn=c.integer("dense_intermediate_size"))
    layers = [Layer(mixer=mixers[kind], mlp=moe if sparse(i) else dense) for i, kind in enumerate(kinds)]
    return model(c, name, layers, tied=False)


def step3p5(c: Config, name: str) -> ModelSpec:
    """Windowed layers have another number of heads (`attention_other_setting`); every head's output has a gate."""
    if c.boolean("mlp_bias", False):
        c.problem("mlp_bias=true is not supported: the bias of shared experts is not described")
    bias, kv_heads = c.boolean("attention_bias", False), c.integer("num_attention_groups", "num_key_value_heads")
    full = attention(c, kv_heads=kv_heads, qkv_bias=bias, out_bias=bias, qk_norm="head", head_gate=True)
    kinds = c.kinds("layer_types", LAYER_WORDS, lambda i: FULL)
    local = full
    if SLIDING in kinds:
        other = c.section("attention_other_setting") if c.has("attention_other_setting") else Config({}, c.problems)
        local = replace(
            full,
            heads=other.integer("num_attention_heads", default=c.integer("num_sliding_attention_heads", default=full.heads)),
            kv_heads=other.integer("num_attention_groups", default=kv_heads),
            head_dim=other.integer("head_dim", default=full.head_dim),
            window=c.integer("sliding_window"),
        )
    ffn, shared = c.integer("moe_intermediate_size"), c.integer("share_expert_dim", "share_expert_dims")
    moe = experts(c, ffn=ffn, shared_ffn=shared, score="sigmoid", expert_bias=True)
    sparse, dense = sparse_layers(c, 3), mlp(c)
    layers = [Layer(mixer=local if kind == SLIDING else full, mlp=moe if sparse(i) else dense) for i, kind in enumerate(kinds)]
    return model(c, name, layers, tied=False, mtp=mtp(c, Layer(mixer=local, mlp=dense)))


_V4_WORDS = {"compressed_sparse_attention": "sparse", "heavily_compressed_attention": "heavy", "sliding_attention": "window"}


def _v4_attention(c: Config, kind: str) -> CompressedAttention:
    hidden, heads, dim = c.integer("hidden_size"), c.integer("num_attention_heads"), c.integer("head_dim")
    q_lora, o_lora, o_groups = c.integer("q_lora_rank"), c.integer("o_lora_rank"), c.integer("o_groups")
    # query up-projection, grouped output projections, one sink per head
    split = q_lora * heads * dim + heads * dim * o_lora + o_groups * o_lora * hidden + heads
    replicated = hidden * q_lora + q_lora + hidden * dim + dim
    rates = c.values.get("compress_rates")
    rates = rates if isinstance(rates, dict) else {}
    indexer, compress = None, None
    if kind != "window":
        word, usual, width = ("compressed_sparse_attention", 4, 2 * dim) if kind == "sparse" else ("heavily_compressed_attention", 128, dim)
        compress = Config(rates, c.problems).integer(word, default=usual)
        replicated += compress * width + 2 * hidden * width + dim
        if kind == "sparse":
            index_heads, index_dim = c.integer("index_n_heads"), c.integer("index_head_dim")
            exact = (
                compress * 2 * index_dim + 2 * hidden * 2 * index_dim + index_dim + q_lora * index_heads * index_dim + hidden * index_heads
            )
            indexer = Indexer(heads=index_heads, head_dim=index_dim, top_k=c.integer("index_topk"), params=exact)
    return CompressedAttention(
        heads=heads,
        head_dim=dim,
        q_lora=q_lora,
        o_lora=o_lora,
        o_groups=o_groups,
        window=c.integer("sliding_window"),
        compress=compress,
        indexer=indexer,
        split_params=split,
        replicated_params=replicated,
    )


def deepseek_v4(c: Config, name: str) -> ModelSpec:
    """Compressed attention and hyper-connections: `hc_mult` residual streams mixed before and after each block."""
    ratios = c.sequence("compress_ratios", int, c.layers)
    words = {0: "window", 4: "sparse", 128: "heavy"}
    if ratios is not None:
        kinds = [words.get(ratio, "sparse") for ratio in ratios[: c.layers]]
    else:
        kinds = c.kinds("layer_types", _V4_WORDS, lambda i: "heavy" if i < 2 or i % 2 == 0 else "sparse")
    hidden, streams = c.integer("hidden_size"), c.integer("hc_mult")
    moe = experts(
        c,
        shared_ffn=c.integer("moe_intermediate_size"),
        score="sqrtsoftplus",
        expert_bias=True,
    )
    mixes = streams * (streams + 2)
    hyper = 2 * (mixes * streams * hidden + mixes + 3)
    layers = [Layer(mixer=_v4_attention(c, kind), mlp=moe, other_params=hyper) for kind in kinds]
    extra = mtp(c, layers[-1]) if layers else ()
    return model(c, name, layers, tied=False, mtp=extra, other_params=streams * streams * hidden + streams + 1)


_NEMOTRON_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _nemotron_kinds(c: Config) -> list[str]:
    pattern = c.values.get("hybrid_override_pattern")
    listed = c.sequence("layers_block_type", str) or c.sequence("layer_types", str)
    if listed is None and isinstance(pattern, str) and pattern:
        listed = [_NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]
    if not listed:
        c.problem("hybrid_override_pattern (letters M, *, -, E) or layers_block_type is missing")
        return []
    same = {"mamba": "linear_attention", "attention": "full_attention"}
    kinds = [same.get(kind, kind) for kind in listed]
    unknown = sorted(set(kinds) - set(_NEMOTRON_LETTERS.values()))
    if unknown:
        c.problem(f"unknown layers {', '.join(unknown)}; known: {', '.join(_NEMOTRON_LETTERS.values())}")
    if len(kinds) > 10_000:
        c.problem("more than 10000 layers")
        return []
    return kinds


def nemotron_h(c: Config, name: str) -> ModelSpec:
    """Every layer is one block with one norm: Mamba-2, attention, MLP or experts."""
    act, bias = activation(c, "mlp_hidden_act", default="relu2"), c.boolean("attention_bias", False)
    blocks: dict[str, Layer] = {}

    def block(kind: str) -> Layer:
        mixer: Mixer | None = None
        feed: Mlp | Moe | None = None
        if kind == "linear_attention":
            mixer = Mamba2(
                heads=c.integer("mamba_num_heads"),
                head_dim=c.integer("mamba_head_dim"),
                state=c.integer("ssm_state_size"),
                groups=c.integer("n_groups"),
                conv=c.integer("conv_kernel", default=4),
                chunk=c.integer("chunk_size", default=128),
                conv_bias=c.boolean("use_conv_bias", True),
                proj_bias=c.boolean("use_bias", False),
            )
        elif kind == "full_attention":
            mixer = attention(c, qkv_bias=bias, out_bias=bias, head_dim=c.integer("head_dim", "attention_head_dim", default=128))
        elif kind == "mlp":
            feed = Mlp(ffn=c.integer("intermediate_size"), gated=False, bias=c.boolean("mlp_bias", False), activation=act)
        else:
            shared = c.integer("n_shared_experts", default=1, least=0) * c.integer("moe_shared_expert_intermediate_size")
            feed = experts(
                c, gated=False, activation=act, shared_ffn=shared, latent=c.optional("moe_latent_size"), score="sigmoid", expert_bias=True
            )
        return Layer(mixer=mixer, mlp=feed, norms=1)

    def layer(kind: str) -> Layer:
        if kind not in blocks:
            blocks[kind] = block(kind)
        return blocks[kind]

    kinds = _nemotron_kinds(c)
    depth = c.integer("num_nextn_predict_layers", default=0, least=0, most=16)
    extra: tuple[Layer, ...] = ()
    if depth:
        full, sparse = layer("full_attention"), layer("moe" if "moe" in kinds else "mlp")
        extra = (Layer(mixer=full.mixer, mlp=sparse.mlp, norms=2),) * depth
    return model(c, name, [layer(kind) for kind in kinds], tied=False, mtp=extra)


def nemotron_nas(c: Config, name: str) -> ModelSpec:
    """Llama blocks found by architecture search: each layer's attention or MLP may be absent, linear, or of its own size."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    configs = c.sequence("block_configs", dict, c.layers)
    layers = []
    for each in configs or ():
        part, feed = Config(each, c.problems).section("attention"), Config(each, c.problems).section("ffn")
        mixer: Mixer | None = None
        norms = 2
        if part.boolean("replace_with_linear", False):
            mixer = LinearMixer()
        elif not part.boolean("no_op", False):
            mixer = attention(c, kv_heads=max(1, heads // part.integer("n_heads_in_group")))
        else:
            norms -= 1
        block: Mlp | None = None
        if feed.boolean("replace_with_linear", False):
            c.problem("block_configs: an MLP replaced by a linear layer is not described")
        elif not feed.boolean("no_op", False):
            factor = feed.values.get("ffn_mult")
            if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 100:
                c.problem(f"block_configs: ffn_mult must be a positive number, got {factor!r}")
                factor = 1.0
            block = Mlp(ffn=-(-int(2 * factor * hidden / 3) // 256) * 256)
        else:
            norms -= 1
        layers.append(Layer(mixer=mixer, mlp=block, norms=norms))
    if configs is None:
        c.problem("block_configs is missing")
    return model(c, name, layers, tied=False)

"""Parameter counts against `transformers` models built on the meta device, and what malformed configs give."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ModelError
from shardwise.spec import catalog, hf
from shardwise.spec.blocks import Attention, DeltaNet, Mamba2, Mla, Moe
from shardwise.spec.hf_families import WRAPPERS

SMALL = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED = {**MOE, "shared_expert_intermediate_size": 40}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2}
LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 8, "head_dim": None}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2, "conv_kernel": 3}
INDEX = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 32}
BLOCKS = {"index_n_heads": 2, "index_head_dim": 24, "index_topk_blocks": 4, "index_block_size": 8}
GATED_HEADS = {
    "num_sliding_attention_heads": 12, "sliding_window": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "share_expert_dim": 40, "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
}  # fmt: skip

CASES = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 8}),
    ("mistral", {"sliding_window": 32}),
    ("ministral3", {"tie_word_embeddings": True}),
    ("exaone4", {"sliding_window": 32}),
    ("exaone4", {"layer_types": ["full_attention"] * 5, "tie_word_embeddings": True}),
    ("exaone_moe", {**MOE, "sliding_window": 32, "num_shared_experts": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}),
    ("qwen2_moe", {**SHARED, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3_moe", {**MOE, "mlp_only_layers": [0, 3]}),
    ("qwen3_next", {**SHARED, **LINEAR}),
    ("qwen3_5_text", LINEAR),
    ("qwen3_5_moe_text", {**SHARED, **LINEAR, "tie_word_embeddings": True}),
    ("gemma", {"num_key_value_heads": 1}),
    ("gemma2", {"sliding_window": 32}),
    ("gemma3_text", {"sliding_window": 32}),
    ("gemma4_text", {"hidden_size_per_layer_input": 0, "global_head_dim": 32, "sliding_window": 32}),
    (
        "gemma4_text",
        {**MOE, "top_k_experts": 2, "hidden_size_per_layer_input": 0, "global_head_dim": 32, "enable_moe_block": True,
         "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_hidden_layers": 7},
    ),
    (
        "gemma4_text",
        {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 700, "global_head_dim": 32, "sliding_window": 32,
         "num_hidden_layers": 12, "num_kv_shared_layers": 5, "use_double_wide_mlp": True, "attention_bias": True},
    ),
    ("glm4", {"attention_bias": True, "pad_token_id": 0}),
    ("glm4_moe", {**ROUTED, "first_k_dense_replace": 2, "use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe_lite", {**ROUTED, **LATENT, "q_lora_rank": 20}),
    ("glm_moe_dsa", {**ROUTED, **LATENT, **INDEX, "q_lora_rank": 20, "first_k_dense_replace": 1}),
    ("deepseek_v2", {**ROUTED, **LATENT, "q_lora_rank": 0, "first_k_dense_replace": 1}),
    ("deepseek_v3", {**ROUTED, **LATENT, "q_lora_rank": 20, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2}),
    ("deepseek_v3", {**ROUTED, **LATENT, "q_lora_rank": 20, "attention_bias": True, "n_group": 1, "topk_group": 1}),
    (
        "deepseek_v4",
        {**ROUTED, **INDEX, "q_lora_rank": 20, "o_lora_rank": 12, "o_groups": 2, "head_dim": 32, "num_key_value_heads": 1, "hc_mult": 3,
         "sliding_window": 16, "qk_rope_head_dim": 8, "intermediate_size": None},
    ),
    ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": None}),
    ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    (
        "minimax_m3_vl_text",
        {**BLOCKS, "num_local_experts": 8, "num_experts_per_tok": 2, "dense_intermediate_size": 112, "shared_intermediate_size": 40,
         "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 4, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3},
    ),
    ("step3p5", {**GATED_HEADS, "attention_bias": True}),
    ("step3p5", {**GATED_HEADS, "mlp_layer_types": ["dense"] + ["sparse"] * 4}),
    ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16}),
    ("llama4_text", {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 80}),
    ("nemotron", {"mlp_bias": True, "attention_bias": True}),
    ("nemotron_h", {**MAMBA, "hybrid_override_pattern": "M-M*-", "mlp_bias": True, "use_bias": True}),
    (
        "nemotron_h",
        {**MAMBA, **ROUTED, "hybrid_override_pattern": "MEM*E", "moe_latent_size": 32, "n_shared_experts": 1,
         "moe_shared_expert_intermediate_size": 56, "use_conv_bias": False},
    ),
    ("phi3", {"head_dim": None, "pad_token_id": 0}),
    ("starcoder2", {"use_bias": True, "head_dim": None}),
    ("starcoder2", {"use_bias": False, "head_dim": None}),
    ("bloom", {"n_layer": 5, "n_head": 8}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    ("gpt2", {"n_embd": 64, "n_layer": 5, "n_head": 8, "n_positions": 128}),
]  # fmt: skip


def published_params(config: dict) -> int:
    """Parameters of the `transformers` model of a config dict."""
    reason = "the models extra is not installed"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    values = {key: value for key, value in config.items() if key != "model_type"}
    if values.get("q_lora_rank") == 0:
        values["q_lora_rank"] = None
    built = transformers.AutoConfig.for_model(config["model_type"], **values)
    with torch.device("meta"):
        if config["model_type"] in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            model = transformers.AutoModelForCausalLM.from_config(built)
        else:  # only as part of a multimodal model
            (outer,) = (name for name, inner in WRAPPERS.items() if inner == config["model_type"])
            whole = transformers.AutoConfig.for_model(outer, text_config=values)
            model = transformers.AutoModelForImageTextToText.from_config(whole)
            model = torch.nn.ModuleList([model.model.language_model, model.lm_head])
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "fields"), CASES, ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(CASES)])
def test_exact_parameter_count(kind: str, fields: dict) -> None:
    config = {key: value for key, value in {"model_type": kind, **SMALL, **fields}.items() if value is not None}
    assert hf.from_config(config).total_params == published_params(config)


REMOTE = (  # code outside transformers
    "kimi_k2", "nemotron-nas", "grok-1", "internlm", "baichuan", "aquila", "mimo", "bailing_moe_v2", "exaone4_5_text", "minimax_m3_text",
)  # fmt: skip


def test_every_family_of_transformers_has_a_case() -> None:
    assert {kind for kind, _ in CASES} == set(hf.FAMILIES) - set(REMOTE)


# one model of each family as published, at full size
FULL_SIZE = [
    "llama-3.1-405b", "mistral-large-123b", "ministral-3-3b", "ministral-3-8b", "ministral-3-14b", "exaone-4.0-1.2b", "mixtral-8x22b",
    "exaone-4.5-33b", "k-exaone-236b-a23b", "k-exaone-2.0-750b-a37b", "qwen2.5-72b", "qwen2-57b-a14b", "qwen3-32b", "qwen3-235b-a22b",
    "qwen3-next-80b-a3b", "qwen3.5-2b", "qwen3.5-27b", "qwen3.5-397b-a17b", "gemma-7b", "gemma-2-27b", "gemma-3-27b", "gemma-4-26b-a4b",
    "gemma-4-e4b", "glm-4-32b", "glm-4.5", "glm-4.7-flash", "glm-5.2", "deepseek-v2", "deepseek-v3", "deepseek-v4-flash", "olmoe-1b-7b",
    "minimax-m2", "minimax-m3", "step-3.5-flash", "gpt-oss-120b", "llama-4-maverick", "nemotron-4-340b", "nemotron-h-56b",
    "nemotron-3-nano-omni-30b-a3b", "nemotron-3-super-120b-a12b", "starcoder2-15b", "bloom-176b", "opt-175b", "gpt-3-175b",
]  # fmt: skip


@pytest.mark.parametrize("name", FULL_SIZE)
def test_published_models(name: str) -> None:
    from shardwise.spec.catalog.tables import table

    assert catalog.model(name).total_params == published_params(table("models")[name]["config"])


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [  # totals computed from the published configurations, as given with the sources of the layout rules
        ("llama-3.2-1b", 1_235_814_400, 1_235_814_400),
        ("olmoe-1b-7b", 6_919_161_856, 1_282_017_280),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("deepseek-v2-lite", 15_706_484_224, 2_661_150_208),
        ("moonlight-16b-a3b", 15_960_108_544, 2_914_774_528),
    ],
)
def test_total_and_active(name: str, total: int, active: int) -> None:
    model = catalog.model(name)
    assert (model.total_params, model.active_params) == (total, active)


def test_kinds_of_layers() -> None:
    assert isinstance(catalog.model("deepseek-v3").layers[0].mixer, Mla)
    assert [layer.is_moe for layer in catalog.model("deepseek-v3").layers[:5]] == [False] * 3 + [True] * 2
    gemma = catalog.model("gemma-3-1b").layers
    assert [layer.mixer.window for layer in gemma[:6]] == [512] * 5 + [None]
    hybrid = catalog.model("qwen3-next-80b-a3b").layers
    assert [type(layer.mixer) for layer in hybrid[:4]] == [DeltaNet] * 3 + [Attention]
    assert isinstance(catalog.model("nemotron-h-8b").layers[0].mixer, Mamba2)
    moe = catalog.model("qwen2-57b-a14b").moe
    assert isinstance(moe, Moe) and moe.shared_gate and moe.shared_ffn == 20480
    assert len(catalog.model("glm-4.5").mtp) == 1


@pytest.mark.parametrize(("outer", "inner", "same"), [("gemma3", "gemma3_text", "gemma3_text"), ("exaone4_5", "exaone4_5_text", "exaone4")])
def test_multimodal_config_gives_its_language_model(outer: str, inner: str, same: str) -> None:
    text = {**SMALL, "sliding_window": 32}
    whole = hf.from_config({"model_type": outer, "text_config": {"model_type": inner, **text}})
    assert whole.total_params == hf.from_config({"model_type": same, **text}).total_params


@pytest.mark.parametrize(
    ("name", "total", "stored"),
    [  # parameters of the published checkpoints; MTP layers included, of multimodal models the language model
        ("qwen3.5-2b", 1_881_825_088 + 60_828_160, 0),
        ("k-exaone-2.0-750b-a37b", 1_498_715_008_512 // 2, 2 * 76 * 256),  # bytes of bf16; the balance biases of its experts are fp32
        ("step-3.5-flash", (398_768_626_944 - 3 * 1_055_916_032) // 2, 2 * 42 * 288),  # bytes; each MTP layer has a copy of the head
    ],
)
def test_published_checkpoints(name: str, total: int, stored: int) -> None:
    model = catalog.model(name)
    assert model.total_params + model.mtp_params().total == total - stored


def test_layers_are_described_as_listed() -> None:
    windows = [layer.mixer.window for layer in catalog.model("k-exaone-2.0-750b-a37b").layers]
    assert windows == [None, 4096, *[128, 128, 128, None] * 19]
    config = {"model_type": "exaone_moe", **SMALL, **MOE, "mtp_layer_types": ["sliding_attention"], "num_nextn_predict_layers": 3}
    assert len(hf.from_config(config).mtp) == 1
    step = catalog.model("step-3.5-flash")
    assert [(each.heads, each.window) for each in (layer.mixer for layer in step.layers[:4])] == [(64, None), *[(96, 512)] * 3]
    assert [layer.is_moe for layer in step.layers[:5]] == [False] * 3 + [True] * 2
    sparse = catalog.model("minimax-m3").layers
    assert [layer.mixer.indexer and layer.mixer.indexer.top_k for layer in sparse[2:5]] == [None, 2048, 2048]
    gemma = catalog.model("gemma-4-e4b").layers
    assert [layer.mixer.own_kv for layer in gemma] == [True] * 24 + [False] * 18
    config = {"model_type": "step3p5", **SMALL, **GATED_HEADS, "moe_layers_enum": "1, 3"}
    assert [layer.is_moe for layer in hf.from_config(config).layers] == [False, True, False, True, False]
    widths = {"dense_intermediate_size": 112, "shared_intermediate_size": 40, "num_local_experts": 8, "num_experts_per_tok": 2}
    config = {"model_type": "minimax_m3_vl_text", **SMALL, **widths, "moe_layer_freq": [0, 0, 1, 1, 1]}
    assert [layer.is_moe for layer in hf.from_config(config).layers] == [False] * 2 + [True] * 3


def test_embeddings_of_layers_are_split_as_the_token_embedding_is() -> None:
    model = catalog.model("gemma-4-e4b")
    assert model.layer_inputs_params() == (262_144 + 2560) * 42 * 256 + 256
    whole, half = model.embedding_params_on_rank(1), model.embedding_params_on_rank(2)
    assert 2 * half - whole == 256  # the norm


def test_searched_blocks() -> None:
    def block(attention: dict, ffn: dict) -> dict:
        return {"attention": attention, "ffn": ffn}

    config = {
        **SMALL,
        "model_type": "nemotron-nas",
        "hidden_size": 1024,
        "num_hidden_layers": 3,
        "head_dim": 128,
        "block_configs": [
            block({"n_heads_in_group": 4, "no_op": False}, {"ffn_mult": 1.95, "no_op": False}),
            block({"no_op": True}, {"no_op": True}),
            block({"replace_with_linear": True}, {"ffn_mult": 0.5}),
        ],
    }
    first = 1024 * 128 * (8 + 8 + 2 + 2) + 3 * 1024 * 1536 + 2 * 1024  # 2/3 * 1.95 * 1024 = 1331, up to a multiple of 256: 1536
    last = 1024 * 1024 + 3 * 1024 * 512 + 2 * 1024
    assert hf.from_config(config).total_params == 2 * 1000 * 1024 + first + last + 1024


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        ({}, ["model_type is missing"]),
        ({"model_type": 3}, ["model_type is missing"]),
        ([1], ["must be a JSON object"]),
        ({"model_type": "llamo"}, ["'llamo' is not known", "llama"]),
        ({"model_type": "llama"}, ["hidden_size is missing", "vocab_size is missing", "num_hidden_layers is missing"]),
        ({"model_type": "llama", **SMALL, "hidden_size": "64"}, ["hidden_size must be a whole number"]),
        ({"model_type": "llama", **SMALL, "num_hidden_layers": -1}, ["num_hidden_layers must be a whole number from 1 to 10000"]),
        ({"model_type": "llama", **SMALL, "num_key_value_heads": 3}, ["no multiple of num_key_value_heads 3"]),
        ({"model_type": "llama", **SMALL, "tie_word_embeddings": "no"}, ["true or false"]),
        ({"model_type": "gemma3", "text_config": 5}, ["text_config must be an object"]),
        ({"model_type": "nemotron_h", **SMALL, **MAMBA, "hybrid_override_pattern": "MX"}, ["unknown layers X"]),
        ({"model_type": "qwen3_moe", **SMALL, **MOE, "num_experts_per_tok": 9}, ["more than the 8 experts"]),
        ({"model_type": "gemma2", **SMALL, "sliding_window": 8, "layer_types": ["full_attention"]}, ["1 items for 5 layers"]),
        ({"model_type": "gemma4_text", **SMALL, "num_kv_shared_layers": 6}, ["num_kv_shared_layers must be a whole number from 0 to 5"]),
        ({"model_type": "exaone4", **SMALL, "sliding_windows": [8, 0, -1, 0, 8]}, ["sliding_windows must be 0 or more"]),
        ({"model_type": "step3p5", **SMALL, **GATED_HEADS, "attention_other_setting": 3}, ["attention_other_setting must be an object"]),
    ],
)
def test_bad_configs_say_what_is_wrong(config: dict, texts: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        hf.from_config(config)
    for text in texts:
        assert text in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content in (b"{", b"\xff\xfe\x00", b"[" * 100_000, b"[]"):
        path.write_bytes(content)
        with pytest.raises(ModelError):
            hf.from_file(path)
    with pytest.raises(ModelError, match="cannot read"):
        hf.from_file(tmp_path / "absent.json")
    path.write_text(json.dumps({"model_type": "llama", **SMALL}))
    assert catalog.model(str(path)).total_params == catalog.model(str(tmp_path)).total_params


values = st.one_of(
    st.integers(-2, 64), st.none(), st.booleans(), st.floats(allow_nan=True), st.text(max_size=3),
    st.lists(st.integers(-1, 9), max_size=6), st.lists(st.sampled_from(["full_attention", "sparse", "x"]), max_size=6),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip
field_names = sorted({key for _, fields in CASES for key in fields} | set(SMALL) | {"layer_types", "block_configs", "text_config"})


@given(st.sampled_from(hf.model_types()), st.booleans(), st.dictionaries(st.sampled_from(field_names), values, max_size=12))
def test_any_config_is_read_or_refused(kind: str, filled: bool, fields: dict) -> None:
    base = {**SMALL, **ROUTED, **LATENT, **LINEAR, **MAMBA, **INDEX} if filled else {}
    with contextlib.suppress(ModelError):
        model = hf.from_config({"model_type": kind, **base, **fields})
        assert model.total_params > 0

"""The model of a published run: shape from the columns of its row, the rest from what the model family is known to be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeVar

from shardwise.planner.flops import model_flops
from shardwise.spec.blocks import Attention, DeltaNet, Indexer, Layer, Mamba2, Mixer, Mla, Mlp, Moe
from shardwise.spec.model import ModelSpec

Row = Mapping[str, str]
Value = TypeVar("Value")

# Feed-forward blocks without a gate: GPT-2/3 and its descendants, squared-ReLU Nemotron models.
PLAIN_MLP = re.compile(r"gpt-?3|gpt-\d|megatron-|mpt|bloom|^opt|turing|^nemotron|starcoder|mt-nlg", re.I)
LAYER_NORM = re.compile(r"gpt(?!-oss)|megatron-|mpt|bloom|^opt|turing|starcoder", re.I)
# Latent attention: (pattern, query rank, KV rank, nope, rope, value width).
LATENT: tuple[tuple[str, tuple[int | None, int, int, int, int]], ...] = (
    (r"deepseek-?v3|deepseekv3|kimi|deepseek-?v2(?!-lite)", (1536, 512, 128, 64, 128)),
    (r"moonlight|v2-lite", (None, 512, 128, 64, 128)),
    (r"glm-?5", (2048, 512, 192, 64, 256)),
    (r"glm-4.7-flash", (768, 512, 192, 64, 256)),
    (r"megatron-ci.*(mla|deepseek|gpt3_moe_mcore_te_tp2_pp2_ep4)", (512, 512, 128, 64, 128)),
)
# Layer patterns of hybrids, one letter per layer: M state space, * attention, - MLP, E experts.
PATTERNS = (
    (
        r"nemotron-h-56b",
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-",
    ),
    (r"nemotron-3-nano-4b", "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"),
    (r"nano-30b|lightning|nano-omni-30b", "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
    (r"nemotron-3-super", "MEMEMEM*E" * 8 + "MEMEMEMEMEMEMEME"),
    (r"nemotron-3-ultra", "MEMEMEM*E" * 12),
)
# State-space heads, head width, state, groups.
MAMBA = (
    (r"nemotron-h-56b", (256, 64, 256)),
    (r"nemotron-3-nano-4b", (96, 80, 128)),
    (r"nano-30b|lightning|nano-omni-30b", (64, 64, 128)),
    (r"nemotron-3-super", (128, 64, 128)),
    (r"nemotron-3-ultra", (256, 64, 128)),
)
LATENT_MOE = ((r"nemotron-3-super", 1024), (r"nemotron-3-ultra", 2048))
MTP = ((r"deepseek-?v3|glm-?5", 1), (r"nemotron-3-super|lightning", 2))
# Largest number a column can sensibly hold; larger ones are typing errors that would only cost memory here.
LIMITS = {"num_layers": 10_000, "vpp": 1_000, "gpus": 1_000_000, "mbs": 1_000_000, "seq_len": 1_000_000_000}
LIMIT = 10_000_000
DEFAULT_VOCAB = 50257  # GPT-2 tokenizer
VOCABS = ((r"nemotron-?3", 131072), (r"nemotron-?4|gpt3_15b", 256000), (r"deepseekv3", 129280), (r"mixtral", 32000))


class Inexpressible(Exception):
    """A row lacks what a prediction needs, or describes what cannot be expressed; the message says what."""


def _find(table: tuple[tuple[str, Value], ...], name: str) -> Value | None:
    """Value of the first entry whose pattern is in the name."""
    return next((value for pattern, value in table if re.search(pattern, name, re.I)), None)


def number(row: Row, column: str) -> int | None:
    """Integer in a column, None when empty. Raises `Inexpressible` on text."""
    text = (row.get(column) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise Inexpressible(f"{column} is {text!r}, not a number") from None
    if not 0 <= value <= LIMITS.get(column, LIMIT):
        raise Inexpressible(f"{column} is {text!r}, outside 0 to {LIMITS.get(column, LIMIT)}")
    if value != int(value):
        raise Inexpressible(f"{column} is {text!r}, not a whole number")
    return int(value)


def required(row: Row, column: str) -> int:
    value = number(row, column)
    if not value:
        raise Inexpressible(f"{column} not given")
    return value


def _moe_flags(text: str, layers: int) -> list[bool]:
    """Which layers are MoE, from `all MoE`, `dense first N`, or a Megatron list such as `([0]*3+[1]*58)`."""
    lists = re.findall(r"\[([01])\](?:\*(\d+))?", text)
    if lists:
        flags = [value == "1" for value, times in lists for _ in range(int(times or 1))]
        return (flags * layers)[:layers] if len(flags) < layers else flags[:layers]
    dense = re.search(r"dense first (\d+)", text)
    first = int(dense.group(1)) if dense else 0
    every = 2 if re.search(r"every 2nd|interleav", text) else 1
    return [index >= first and (index - first) % every == every - 1 for index in range(layers)]


def _mixer(row: Row, name: str, hidden: int, heads: int) -> Mixer:
    latent = _find(LATENT, name)
    if latent or "--multi-latent-attention=True" in row.get("notes", ""):
        q_lora, kv_lora, nope, rope, value = latent or (512, 512, 128, 64, 128)
        indexer = (
            Indexer(heads=32, head_dim=128, top_k=2048, params=32 * 128 * 2048 + hidden * (128 + 32)) if "glm" in name.lower() else None
        )
        return Mla(heads=heads, q_lora=q_lora, kv_lora=kv_lora, nope_dim=nope, rope_dim=rope, v_head_dim=value, indexer=indexer)
    head_dim = number(row, "head_dim") or hidden // heads
    norm: Literal["none", "head"] = "head" if re.search(r"qwen3|glm-4.5", name, re.I) else "none"
    gated = bool(re.search(r"qwen3-next|qwen3\.[5-9]", name, re.I))
    return Attention(heads=heads, kv_heads=number(row, "num_kv_heads") or heads, head_dim=head_dim, qk_norm=norm, gated=gated)


def _heads(row: Row, hidden: int) -> int:
    heads = number(row, "num_heads")
    if heads:
        return heads
    tp = number(row, "tp") or 1
    return max(tp, round(hidden / 128 / tp) * tp)  # usual width of a head


def model_from_row(row: Row) -> ModelSpec:
    """The model of a run. Raises `Inexpressible` when the shape is not given."""
    name = (row.get("model_name") or "").strip()
    layers, hidden = required(row, "num_layers"), required(row, "hidden")
    notes, kind = row.get("notes", ""), row.get("arch", "")
    experts = number(row, "num_experts")
    ffn = number(row, "ffn_hidden")
    gated = not PLAIN_MLP.search(name) or "--swiglu=True" in notes or bool(re.search(r"mixtral|deepseek", name, re.I))
    width = ffn or (int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)  # Megatron's defaults
    mlp: Mlp = Mlp(ffn=width, gated=gated, bias=bool(LAYER_NORM.search(name)), activation="silu" if gated else "gelu")
    heads = _heads(row, hidden)
    mixer = _mixer(row, name, hidden, heads)
    moe: Moe | None = None
    if experts:
        top_k = required(row, "top_k")
        expert = number(row, "moe_ffn_hidden") or width
        moe = Moe(
            experts=experts,
            top_k=top_k,
            ffn=expert,
            gated=gated and "nemotron" not in name.lower(),
            bias="gpt-oss" in name.lower(),
            shared_ffn=number(row, "shared_expert_ffn") or 0,
            latent=_find(LATENT_MOE, name),
        )
    spec = ModelSpec(
        name=name,
        hidden=hidden,
        vocab=number(row, "vocab") or _find(VOCABS, name) or DEFAULT_VOCAB,
        layers=_layers(row, name, kind, layers, mixer, mlp, moe),
        tied=(row.get("tie_embeddings") or "").strip().lower() == "yes",
        norm_bias=bool(LAYER_NORM.search(name)),
        positions=(number(row, "seq_len") or 0) if LAYER_NORM.search(name) and not re.search(r"bloom|megatron-ci", name, re.I) else 0,
        dropout=0.1 if re.search(r"gpt|megatron-|turing", name, re.I) and not gated else 0.0,
        source=row.get("source", ""),
    )
    depth = _mtp_depth(row, name, spec)
    last = Layer(mixer=mixer, mlp=moe or mlp) if kind.startswith("hybrid") else spec.layers[-1]
    return replace(spec, mtp=(last,) * depth) if depth else spec


def _layers(row: Row, name: str, kind: str, count: int, mixer: Mixer, mlp: Mlp, moe: Moe | None) -> tuple[Layer, ...]:
    pattern = _find(PATTERNS, name)
    if pattern:
        heads, head_dim, state = _find(MAMBA, name) or (64, 64, 128)
        blocks = {
            "M": Layer(mixer=Mamba2(heads=heads, head_dim=head_dim, state=state, groups=8, conv=4), mlp=None, norms=1),
            "*": Layer(mixer=mixer, mlp=None, norms=1),
            "-": Layer(mixer=None, mlp=mlp, norms=1),
            "E": Layer(mixer=None, mlp=moe or mlp, norms=1),
        }
        return tuple(blocks[letter] for letter in (pattern * (count // len(pattern) + 1))[:count])
    if kind in ("hybrid", "hybrid-moe") and re.search(r"qwen3", name, re.I):
        delta = DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv=4)
        return tuple(Layer(mixer=mixer if index % 4 == 3 else delta, mlp=moe or mlp) for index in range(count))
    if kind.startswith("hybrid"):
        raise Inexpressible(f"layer pattern of the hybrid {name} not known")
    flags = _moe_flags(row.get("moe_layer_freq_or_dense_first") or "", count) if moe else [False] * count
    windowed = mixer
    if re.search(r"gpt-oss", name, re.I) and isinstance(mixer, Attention):
        windowed = replace(mixer, window=128, sinks=True)
    return tuple(
        Layer(mixer=windowed if index % 2 == 0 else mixer, mlp=moe if is_moe and moe else mlp) for index, is_moe in enumerate(flags)
    )


def _mtp_depth(row: Row, name: str, spec: ModelSpec) -> int:
    """Multi-token prediction layers that ran: as noted, as the printed FLOPs imply, or as the family has."""
    notes = row.get("notes", "")
    noted = re.search(r"--mtp-num-layers=(\d+)", notes)
    if noted:
        return int(noted.group(1))
    depth = _find(MTP, name)
    if not depth or "--pipeline-model-parallel-layout" in notes:
        return 0
    try:
        printed = float(row["tflops_per_gpu"]) * 1e12 / float(row["tokens_per_s_per_gpu"])
        seq = required(row, "seq_len")
    except (KeyError, ValueError):
        return depth if "automodel" not in row.get("source", "").lower() else 0
    plain = model_flops(spec, seq)
    return 0 if abs(plain / printed - 1) < 0.025 else depth

"""Parts of a transformer layer and their exact parameter counts.

A layer is a mixer (attention of some kind, a state-space or linear-attention block, or none) and an MLP (dense, mixture of experts,
or none). `params(hidden, tp, ep, etp)` counts the parameters one rank holds; with the default degrees it is the whole block.
Parameters split over tensor parallel ranks are divided by `tp`; norms, routers and MLA down projections are replicated; with fewer
KV heads than ranks each rank holds one KV head (Megatron Core `Attention`, `MLASelfAttention`, `MoELayer`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Params(NamedTuple):
    """Parameters by the ranks that share them: `dense` over the data parallel group, `expert` over the expert data parallel group."""

    dense: int
    expert: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def plus(self, other: Params) -> Params:
        return Params(self.dense + other.dense, self.expert + other.expert)


def _share(count: int, ranks: int) -> int:
    return -(-count // ranks)


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Selects the `top_k` keys a query attends to (one by one or in blocks): its own small projections, replicated."""

    heads: int
    head_dim: int
    top_k: int  # keys, also where they are chosen in blocks
    params: int  # exact parameters


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Softmax attention with `heads` query heads and `kv_heads` key/value heads (MHA, GQA and MQA)."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None  # None = head_dim
    window: int | None = None  # tokens a query sees at most (sliding window or chunk)
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "head_bias", "full"] = "none"  # per head (with or without bias) or over all heads together
    gated: bool = False  # the query projection also makes a sigmoid gate of the output, as wide as the query
    head_gate: bool = False  # a projection of its own makes one sigmoid gate per head
    sinks: bool = False  # one learned logit per head
    shared_kv: bool = False  # keys and values come from one projection
    own_kv: bool = True  # False: keys and values are those of an earlier layer
    indexer: Indexer | None = None

    @property
    def v_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def q_width(self) -> int:
        """Output features of the query projection."""
        return self.heads * self.head_dim * (2 if self.gated else 1)

    @property
    def kv_width(self) -> int:
        """Output features of the key and value projections together."""
        return self.own_kv * self.kv_heads * (self.head_dim + (0 if self.shared_kv else self.v_dim))

    def params(self, hidden: int, tp: int = 1, ep: int = 1, etp: int = 1) -> Params:
        fan_in = hidden + self.qkv_bias
        count = _share(self.q_width * fan_in, tp) + _share(self.kv_width * fan_in, min(tp, self.kv_heads))
        count += _share(self.heads * self.v_dim * hidden, tp) + hidden * self.out_bias
        count += _share(self.heads, tp) * self.sinks + _share(self.heads * hidden, tp) * self.head_gate
        if self.qk_norm in ("head", "head_bias"):
            count += (1 + self.own_kv) * self.head_dim * (2 if self.qk_norm == "head_bias" else 1)
        elif self.qk_norm == "full":
            count += (self.heads + self.own_kv * self.kv_heads) * self.head_dim
        return Params(count + (self.indexer.params if self.indexer else 0))


@dataclass(frozen=True, kw_only=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): low-rank latents are expanded per head.

    Queries and keys have `nope_dim + rope_dim` features per head, values `v_head_dim`; the rotary key is shared by all heads.
    """

    heads: int
    q_lora: int | None  # rank of the query latent; None = full projection
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    bias: bool = False  # on the down projections and the output projection
    indexer: Indexer | None = None

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def v_dim(self) -> int:
        return self.v_head_dim

    @property
    def window(self) -> int | None:
        return None

    def params(self, hidden: int, tp: int = 1, ep: int = 1, etp: int = 1) -> Params:
        q_up = self.heads * self.head_dim
        if self.q_lora is None:
            count = _share(hidden * q_up, tp)
        else:
            count = (hidden + self.bias) * self.q_lora + self.q_lora + _share(self.q_lora * q_up, tp)
        count += (hidden + self.bias) * (self.kv_lora + self.rope_dim) + self.kv_lora
        count += _share(self.kv_lora * self.heads * (self.nope_dim + self.v_head_dim), tp)
        count += _share(self.heads * self.v_head_dim * hidden, tp) + hidden * self.bias
        return Params(count + (self.indexer.params if self.indexer else 0))


@dataclass(frozen=True, kw_only=True)
class CompressedAttention:
    """Attention of DeepSeek-V4: one latent KV head, a sliding window and, further back, keys compressed `compress` to one."""

    heads: int
    head_dim: int
    q_lora: int
    o_lora: int
    o_groups: int
    window: int
    compress: int | None  # None = window only
    indexer: Indexer | None
    split_params: int  # exact parameters split over tp
    replicated_params: int

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def v_dim(self) -> int:
        return self.head_dim

    def params(self, hidden: int, tp: int = 1, ep: int = 1, etp: int = 1) -> Params:
        return Params(_share(self.split_params, tp) + self.replicated_params + (self.indexer.params if self.indexer else 0))


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """State-space block (Mamba-2, arXiv:2405.21060): in projection, short convolution over x, B and C, scan, gated norm, out projection."""

    heads: int
    head_dim: int
    state: int
    groups: int
    conv: int  # convolution kernel
    chunk: int = 256  # tokens of a scan chunk
    conv_bias: bool = True
    proj_bias: bool = False

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def in_width(self) -> int:
        """Output features of the in projection: gate, x, B, C and one step size per head."""
        return 2 * self.inner + 2 * self.groups * self.state + self.heads

    @property
    def conv_width(self) -> int:
        return self.inner + 2 * self.groups * self.state

    def params(self, hidden: int, tp: int = 1, ep: int = 1, etp: int = 1) -> Params:
        count = self.in_width * (hidden + self.proj_bias) + self.conv_width * (self.conv + self.conv_bias)
        count += 3 * self.heads + self.inner + self.inner * hidden
        return Params(_share(count, tp) + hidden * self.proj_bias)


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Gated delta rule linear attention (arXiv:2412.06464) as in Qwen3-Next: projections, short convolution, scan, gated norm."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    chunk: int = 64

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def in_width(self) -> int:
        """Output features of the in projections: query, key, value, gate, and two scalars per value head."""
        return 2 * self.key_width + 2 * self.value_width + 2 * self.value_heads

    @property
    def conv_width(self) -> int:
        return 2 * self.key_width + self.value_width

    def params(self, hidden: int, tp: int = 1, ep: int = 1, etp: int = 1) -> Params:
        split = self.in_width * hidden + self.conv_width * self.conv + 2 * self.value_heads + self.value_width * hidden
        return Params(_share(split, tp) + self.value_dim)


@dataclass(frozen=True, kw_only=True)
class LinearMixer:
    """A square linear layer in place of attention (Llama-Nemotron blocks found by architecture search)."""

    def params(self, hidden: int, tp: int = 1, ep: int = 1, etp: int = 1) -> Params:
        return Params(_share(hidden * hidden, tp))


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """Dense feed-forward block: two matrices, or three when gated."""

    ffn: int
    gated: bool = True
    bias: bool = False
    activation: str = "silu"  # silu, gelu, relu, relu2

    def params(self, hidden: int, tp: int = 1, ep: int = 1, etp: int = 1) -> Params:
        ups = 2 if self.gated else 1
        count = _share(ups * self.ffn * (hidden + self.bias), tp) + _share(self.ffn * hidden, tp) + hidden * self.bias
        return Params(count)


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Mixture of experts: a replicated router picks `top_k` of `experts`; shared experts see every token with the dense TP."""

    experts: int
    top_k: int
    ffn: int  # of one routed expert
    gated: bool = True
    bias: bool = False  # on the experts
    activation: str = "silu"
    shared_ffn: int = 0  # of all shared experts together
    shared_gate: bool = False  # one sigmoid gate on the shared output
    latent: int | None = None  # experts work in this width, with projections before and after (latent MoE); None = hidden
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    pre_softmax: bool = False  # softmax over all experts before the choice
    router_bias: bool = False  # trained bias of the router
    expert_bias: bool = False  # balance bias per expert, kept as a buffer or a frozen parameter
    groups: int | None = None  # group-limited routing: groups and groups kept
    group_topk: int | None = None
    router_params: int = 0  # further router parameters (scales), exact
    shared_gated: bool | None = None  # None = as the experts

    def expert_params(self, hidden: int) -> int:
        """Parameters of one routed expert."""
        width = self.latent or hidden
        ups = 2 if self.gated else 1
        return ups * self.ffn * (width + self.bias) + self.ffn * width + width * self.bias

    def params(self, hidden: int, tp: int = 1, ep: int = 1, etp: int = 1) -> Params:
        dense = self.experts * (hidden + self.router_bias) + self.router_params + hidden * self.shared_gate
        if self.shared_ffn:
            gated = self.gated if self.shared_gated is None else self.shared_gated
            dense += _share((3 if gated else 2) * self.shared_ffn * hidden, tp)
        if self.latent:
            dense += 2 * hidden * self.latent
        return Params(dense, _share(_share(self.experts, ep) * self.expert_params(hidden), etp))


Mixer = Attention | Mla | CompressedAttention | Mamba2 | DeltaNet | LinearMixer


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: mixer, then MLP, each with its norms; either may be absent."""

    mixer: Mixer | None
    mlp: Mlp | Moe | None
    norms: int = 2  # norms as wide as the hidden size
    input_width: int = 0  # features of an embedding of its own the layer mixes in: projected to, gated, and projected back
    other_params: int = 0  # replicated parameters not covered above (layer scales, hyper-connections), exact

    @property
    def is_moe(self) -> bool:
        return isinstance(self.mlp, Moe)

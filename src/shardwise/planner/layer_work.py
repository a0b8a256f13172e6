"""Work and communication of one layer on one rank: which kernels run, what they send.

A layer is a set of named parts (the words of Megatron's `recompute_modules` where one exists), each with forward and
backward `Work`.  Tokens: ``T = mbs * seq / cp`` enter a rank; with sequence parallel each rank keeps ``T / tp`` of them
outside the tensor parallel regions.  Sources: Korthikanti et al. 2022, arXiv:2205.05198 (tensor and sequence parallel
volumes); Liu et al. 2025, arXiv:2504.14960 (expert and expert-tensor volumes); Dao and Gu 2024, arXiv:2405.21060 (scan).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from shardwise.planner.kernels import FLASH_BACKWARD, Work, grouped_flops, linear_work, matmul_flops, total
from shardwise.spec.blocks import Attention, CompressedAttention, DeltaNet, Layer, LinearMixer, Mamba2, Mla, Mlp, Moe
from shardwise.spec.layout import DTYPE_BYTES, Layout
from shardwise.spec.model import ModelSpec

BF16 = 2
SCAN_PASSES = 12  # elementwise passes over the inner width of a state-space or delta-rule block
SCAN_COST = 4.0  # chunked scan runs on small tiles: FLOPs charged per useful one
CHECKPOINT_LAUNCHES = 20  # host time of one checkpointed region (saving and restoring random state) in kernels
# Reads and writes of every routed copy of a token around the exchange; HybridEP permutes while it sends.
PERMUTE_PASSES = {"allgather": 4, "alltoall": 4, "deepep": 3, "hybridep": 2}
LOW_PRECISION = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4")
# Bytes per element to make the low-precision copies of an input (read bf16, write row and column copies, find the maximum).
QUANTISE_BYTES = {
    "fp8-delayed": 4.0,
    "fp8-current": 6.0,
    "fp8-rowwise": 8.0,
    "fp8-blockwise": 5.0,
    "mxfp8": 4.5,
    "nvfp4": 7.0,
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A named piece of a layer: its kernels forward and backward."""

    name: str
    forward: Work
    backward: Work


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """One layer on one rank.  Volumes are bytes per micro batch of the full (gathered or local) buffers.

    ``tp_bytes`` are gathered and scattered once per pass; ``ep_bytes`` is one dispatch (or combine) of this rank's
    tokens; ``etp_bytes`` the tokens gathered over the expert tensor group; ``cp_bytes`` keys and values of this rank.
    """

    parts: tuple[Part, ...]
    tp_bytes: float
    tp_regathers: float
    ep_bytes: float
    copies: int  # experts a token goes to
    etp_bytes: float
    cp_bytes: float
    cp_query_bytes: float

    def forward(self) -> Work:
        return total(part.forward for part in self.parts)

    def backward(self) -> Work:
        return total(part.backward for part in self.parts)

    def select(self, names: tuple[str, ...]) -> Work:
        """Forward work of the named parts, and the host work of a checkpoint around each (what recomputing them costs)."""
        again = [part.forward for part in self.parts if part.name in names]
        if "half_layer" in names:
            return Work().plus(self.forward(), 0.5)
        if "half_products" in names:
            whole = self.forward()
            again.append(Work(matmul=whole.matmul / 2, grouped=whole.grouped / 2, quantise=whole.quantise / 2, launches=whole.launches / 2))
        return total(again).plus(Work(launches=CHECKPOINT_LAUNCHES * len(again)))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one rank works on: tokens, split degrees, precision.

    seq: positions attention looks at; keys: positions a kernel that writes scores out has columns for, of a packed sample all.
    """

    tokens: int
    seq: int
    keys: int
    tp: int
    ep: int
    etp: int
    sp: bool
    cp: int
    precision: str
    fused_attention: bool
    capacity: float | None
    dispatcher: str
    grad_bytes: int
    processors: int

    @property
    def weight_traffic(self) -> float:
        """Bytes moved per weight and micro batch, however few tokens there are: read twice, gradient read and written."""
        return 2.0 * BF16 + 2.0 * self.grad_bytes

    @property
    def split_tokens(self) -> int:
        """Tokens outside the tensor parallel regions."""
        return max(1, self.tokens // self.tp) if self.sp else self.tokens

    @property
    def routed_tokens(self) -> int:
        """Tokens a rank routes: tensor parallel ranks always split them."""
        return max(1, self.tokens // self.tp)


def shape_of(layout: Layout, seq_len: int, processors: int, *, document: int | None = None) -> Shape:
    """``document``: tokens of one packed document, which attention does not look beyond; None = the sample is one."""
    return Shape(
        tokens=max(1, layout.mbs * seq_len // layout.cp),
        seq=min(seq_len, document or seq_len),
        keys=seq_len,
        tp=layout.tp,
        ep=layout.ep,
        etp=layout.etp,
        sp=layout.sp and layout.tp > 1,
        cp=layout.cp,
        precision=layout.precision,
        fused_attention=layout.attention == "flash",
        capacity=layout.capacity_factor,
        dispatcher=layout.dispatcher,
        grad_bytes=DTYPE_BYTES[layout.grad_dtype],
        processors=processors,
    )


def _linear(shape: Shape, tokens: int, inputs: int, outputs: int, *, launches: int = 1) -> tuple[Work, Work]:
    forward, backward = linear_work(tokens, inputs, outputs, shape.processors)
    quantise = QUANTISE_BYTES.get(shape.precision, 0.0)
    extra = 2 if quantise else 0
    return (
        Work(matmul=forward, quantise=quantise * tokens * inputs, launches=launches + extra),
        Work(
            matmul=backward,
            quantise=quantise * tokens * outputs,
            accumulate=shape.weight_traffic * inputs * outputs,
            launches=2 * launches + extra,
        ),
    )


def _stream(elements: float, reads_and_writes: float, launches: int) -> tuple[Work, Work]:
    """Memory-bound op: forward passes over ``elements``, twice as much backward."""
    moved = BF16 * elements * reads_and_writes
    return Work(stream=moved, launches=launches), Work(stream=2 * moved, launches=1.5 * launches)


def _shuffle(elements: float, reads_and_writes: float) -> tuple[Work, Work]:
    """Gathering tokens by expert and back; the backward pass moves them the other way."""
    moved = BF16 * elements * reads_and_writes
    return Work(permute=moved, launches=16), Work(permute=moved, launches=16)


def _part(name: str, *pairs: tuple[Work, Work]) -> Part:
    return Part(
        name=name,
        forward=total(pair[0] for pair in pairs),
        backward=total(pair[1] for pair in pairs),
    )


def mean_keys(seq: int, window: int | None) -> float:
    """Keys a query sees on average under a causal mask, with at most ``window`` of them."""
    if window is None or window >= seq:
        return seq / 2
    return window - window * window / (2 * seq)


def _core_attention(shape: Shape, heads: int, head_dim: int, v_dim: int, window: int | None) -> tuple[Work, Work]:
    heads = max(1, heads // shape.tp)
    if shape.fused_attention:
        flops = 2.0 * shape.tokens * mean_keys(shape.seq, window) * heads * (head_dim + v_dim)
        return Work(attention=flops, launches=1), Work(attention=FLASH_BACKWARD * flops, launches=2)
    batch = max(1, shape.tokens // shape.seq) * heads
    rows = min(shape.seq, shape.tokens)
    flops = batch * (matmul_flops(rows, shape.seq, head_dim, shape.processors) + matmul_flops(rows, v_dim, shape.seq, shape.processors))
    scores = float(shape.tokens) * shape.seq * heads
    forward = Work(wide=flops, stream=BF16 * 6 * scores, launches=5)
    return forward, Work(wide=2 * flops, stream=BF16 * 7 * scores, launches=7)


def _attention_parts(block: Attention | Mla | CompressedAttention, shape: Shape, hidden: int) -> list[Part]:
    tokens, tp = shape.tokens, shape.tp
    parts = []
    if isinstance(block, Attention):
        width = block.q_width // tp + block.kv_width // min(tp, block.kv_heads) + block.head_gate * block.heads // tp
        parts.append(_part("qkv", _linear(shape, tokens, hidden, width)))
        parts.append(_part("rope", _stream(tokens * (block.q_width / tp + block.kv_width / 2 / min(tp, block.kv_heads)), 2, 2)))
        if block.qk_norm != "none":
            parts.append(_part("qk_norm", _stream(tokens * (block.q_width / tp + block.kv_width / 2 / min(tp, block.kv_heads)), 2, 2)))
    elif isinstance(block, Mla):
        queries = block.heads * block.head_dim // tp
        expanded = block.heads * (block.nope_dim + block.v_head_dim) // tp
        down = [_linear(shape, shape.split_tokens, hidden, block.kv_lora + block.rope_dim)]
        up = [_linear(shape, tokens, block.kv_lora, expanded)]
        if block.q_lora is None:
            down.append(_linear(shape, tokens, hidden, queries))
        else:
            down.append(_linear(shape, shape.split_tokens, hidden, block.q_lora))
            up.append(_linear(shape, tokens, block.q_lora, queries))
        rotated = block.rope_dim / block.head_dim
        up.append(_stream(tokens * (queries * rotated + expanded), 2, 5))  # rotary part of Q, assembly of K and V
        parts.append(_part("mla_down_proj", *down, _stream(shape.split_tokens * (block.kv_lora + (block.q_lora or 0)), 2, 2)))
        parts.append(_part("mla_up_proj", *up))
    else:
        queries = block.heads * block.head_dim // tp
        parts.append(_part("qkv", _linear(shape, tokens, hidden, block.q_lora), _linear(shape, tokens, block.q_lora, queries)))
        parts.append(_part("rope", _stream(tokens * queries, 2, 4)))
    window = block.window
    if isinstance(block, CompressedAttention) and block.compress:
        window = int(min(mean_keys(shape.seq, None) / block.compress, block.indexer.top_k if block.indexer else shape.seq)) + block.window
    if isinstance(block, (Attention, Mla)) and block.indexer and block.indexer.top_k < shape.seq:
        scored = 2.0 * tokens * mean_keys(shape.seq, None) * block.indexer.heads * block.indexer.head_dim / tp
        parts.append(Part(name="indexer", forward=Work(attention=scored, launches=6), backward=Work(attention=2 * scored, launches=8)))
        if isinstance(block, Attention):  # whole blocks of keys: kernels skip the others
            window = block.indexer.top_k
    parts.append(_part("core_attn", _core_attention(shape, block.heads, block.head_dim, block.v_dim, window)))
    if isinstance(block, Attention) and block.head_gate:
        parts.append(_part("gate", _stream(tokens * block.heads * block.v_dim / tp, 2, 2)))
    parts.append(_part("proj", _linear(shape, tokens, block.heads * block.v_dim // tp, hidden)))
    return parts


def _scan_parts(block: Mamba2 | DeltaNet, shape: Shape, hidden: int) -> list[Part]:
    tokens, tp = shape.tokens, shape.tp
    if isinstance(block, Mamba2):
        inner, chunk = block.inner, block.chunk
        per_token = 2.0 * chunk * (block.groups * block.state + inner) / 2 + 4.0 * block.state * inner
    else:
        inner, chunk = block.value_width, block.chunk
        per_token = 6.0 * chunk * (block.key_width + inner) + 6.0 * block.key_dim * inner
    flops = SCAN_COST * tokens * per_token / tp
    scan = (
        Work(attention=flops, scan=BF16 * SCAN_PASSES * tokens * inner / tp, launches=12),
        Work(attention=2 * flops, scan=2 * BF16 * SCAN_PASSES * tokens * inner / tp, launches=20),
    )
    conv = _stream(tokens * block.conv_width / tp, 4, 3)
    return [
        _part("in_proj", _linear(shape, tokens, hidden, block.in_width // tp)),
        _part("scan", scan, conv),
        _part("proj", _linear(shape, tokens, inner // tp, hidden)),
    ]


def _mlp_parts(block: Mlp, shape: Shape, hidden: int) -> list[Part]:
    ffn = max(1, block.ffn // shape.tp)
    up = ffn * (2 if block.gated else 1)
    return [
        _part("mlp", _linear(shape, shape.tokens, hidden, up), _linear(shape, shape.tokens, ffn, hidden)),
        _part("mlp_act", _stream(shape.tokens * (up + ffn), 1, 1)),
    ]


def _moe_parts(block: Moe, shape: Shape, hidden: int) -> list[Part]:
    width = block.latent or hidden
    routed = shape.routed_tokens
    copies = routed * block.top_k * (min(1.0, shape.capacity) if shape.capacity else 1.0)
    received = int(copies * shape.etp)
    experts = max(1, block.experts // shape.ep)
    ffn = max(1, block.ffn // shape.etp)
    up = ffn * (2 if block.gated else 1)
    fc1 = grouped_flops(received, width, up, experts, shape.processors)
    fc2 = grouped_flops(received, ffn, width, experts, shape.processors)
    quantise = QUANTISE_BYTES.get(shape.precision, 0.0)
    launches = experts * (6 if quantise else 1)  # behind the grouped call: one product per expert; casts and scale layout of its input
    grouped = (
        Work(grouped=fc1[0] + fc2[0], quantise=quantise * received * (width + ffn), eager=2 * launches),
        Work(grouped=fc1[1] + fc2[1], quantise=quantise * received * (up + width), eager=4 * launches),
    )
    weight_traffic = (Work(), Work(accumulate=shape.weight_traffic * experts * (up + ffn) * width))
    router = matmul_flops(routed, block.experts, hidden, shape.processors)
    parts = [
        _part("router", (Work(wide=router, permute=24.0 * routed * block.experts, launches=14), Work(wide=2 * router, launches=14))),
        _part("moe_permute", _shuffle(copies * width, PERMUTE_PASSES[shape.dispatcher] if shape.ep * shape.etp > 1 else 3)),
        _part("moe", grouped, weight_traffic),
        _part("moe_act", _stream(received * (up + ffn + block.bias * 4 * (up + width)), 1, 1 + 4 * block.bias)),
    ]
    if block.latent:
        parts.append(_part("latent", _linear(shape, routed, hidden, width), _linear(shape, routed, width, hidden)))
    if block.shared_ffn:
        gated = block.gated if block.shared_gated is None else block.shared_gated
        shared = Mlp(ffn=block.shared_ffn, gated=gated)
        work = _mlp_parts(shared, shape, hidden)
        parts.append(_part("shared_experts", *((part.forward, part.backward) for part in work)))
    return parts


def layer_work(model: ModelSpec, layer: Layer, shape: Shape) -> LayerWork:
    """Kernels and volumes of ``layer`` for one micro batch on one rank."""
    hidden, tokens, split = model.hidden, shape.tokens, shape.split_tokens
    parts: list[Part] = []
    tp_bytes = regathers = cp_bytes = cp_query = ep_bytes = etp_bytes = 0.0
    boundary = float(BF16 * tokens * hidden)
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, (Attention, Mla, CompressedAttention)):
        parts += _attention_parts(mixer, shape, hidden)
        kv_heads = mixer.heads if isinstance(mixer, Mla) else mixer.kv_heads
        cp_bytes = float(BF16 * tokens * kv_heads / min(shape.tp, kv_heads) * (mixer.head_dim + mixer.v_dim))
        cp_query = float(BF16 * tokens * mixer.heads / shape.tp * (mixer.head_dim + mixer.v_dim))
    elif isinstance(mixer, (Mamba2, DeltaNet)):
        parts += _scan_parts(mixer, shape, hidden)
    elif isinstance(mixer, LinearMixer):
        parts.append(_part("proj", _linear(shape, tokens, hidden, hidden // shape.tp)))
    if mixer is not None:
        gathered = boundary
        if isinstance(mixer, Mla) and shape.sp:
            gathered = (boundary + BF16 * tokens * (mixer.kv_lora + mixer.rope_dim + (mixer.q_lora or hidden))) / 2
        tp_bytes += gathered
        regathers += boundary
    if isinstance(mlp, Mlp):
        parts += _mlp_parts(mlp, shape, hidden)
        tp_bytes += boundary
        regathers += boundary
    elif isinstance(mlp, Moe):
        parts += _moe_parts(mlp, shape, hidden)
        width = mlp.latent or hidden
        ep_bytes = float(BF16 * shape.routed_tokens * mlp.top_k * width * (min(1.0, shape.capacity) if shape.capacity else 1.0))
        etp_bytes = ep_bytes * shape.etp
        if mlp.shared_ffn:
            tp_bytes += boundary
            regathers += boundary
    if layer.input_width:
        width = layer.input_width
        made = _linear(shape, tokens, hidden, max(1, width // shape.tp))  # from the token embedding, in the first stage
        gate, back = _linear(shape, split, hidden, width), _linear(shape, split, width, hidden)
        parts.append(_part("layer_input", made, gate, back, _stream(split * width, 4, 4)))
    parts.append(_part("layernorm", _stream(split * hidden * max(1, layer.norms), 2, layer.norms)))
    blocks = (mixer is not None) + (mlp is not None) + (layer.input_width > 0)
    parts.append(_part("residual", _stream(split * hidden * blocks, 3, blocks)))
    return LayerWork(
        parts=tuple(parts),
        tp_bytes=tp_bytes,
        tp_regathers=regathers,
        ep_bytes=ep_bytes,
        copies=mlp.top_k if isinstance(mlp, Moe) else 1,
        etp_bytes=etp_bytes,
        cp_bytes=cp_bytes,
        cp_query_bytes=cp_query,
    )


def head_work(model: ModelSpec, shape: Shape, *, fused_loss: bool) -> tuple[Work, Work]:
    """Output projection and loss of one micro batch (vocabulary split over tensor parallel ranks)."""
    vocab = model.padded_vocab(shape.tp) // shape.tp
    forward, backward = linear_work(shape.tokens, model.hidden, vocab, shape.processors)
    passes = 6.0 if fused_loss else 24.0
    moved = passes * shape.tokens * vocab
    return Work(wide=forward, stream=moved, launches=6), Work(wide=backward, stream=moved / 2, launches=6)


def embedding_work(model: ModelSpec, shape: Shape) -> tuple[Work, Work]:
    """Lookup forward, scatter-add backward."""
    return _stream(shape.tokens * model.hidden, 2 + log2(shape.tp) / 4, 3)

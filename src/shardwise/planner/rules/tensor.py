"""Tensor and sequence parallel (T rules)."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planner.rules.alternatives import legal_tp, listed, multiples, nearest, sequence_step
from shardwise.planner.rules.rule import MEGATRON, MEGATRONS, SHARDWISE, TITAN, Case, Problem, rule
from shardwise.spec.blocks import Attention, DeltaNet, Mamba2, Mla

_CONFIG = "Megatron Core TransformerConfig.__post_init__"


def _instead(case: Case) -> str:
    """Tensor parallel sizes near the given one that every part of the model allows."""
    assert case.model is not None
    legal = legal_tp(case.model, most=max(8, 2 * case.layout.tp), replicate_kv=case.framework != TITAN)
    return listed("tp", nearest(legal, case.layout.tp))


def _heads(case: Case) -> Iterator[tuple[int, int]]:
    if case.model:
        yield from {(each.heads, each.kv_heads): None for each in case.model.attentions if isinstance(each, (Attention, Mla))}


@rule("T1", f"{_CONFIG}; torchtitan models/common/attention.py")
def heads_split(case: Case) -> Iterator[Problem]:
    for heads, _ in _heads(case):
        if heads % case.layout.tp:
            yield Problem(f"{heads} heads, tp={case.layout.tp}", "each rank takes whole attention heads", _instead(case))


@rule("T2", f"{_CONFIG}; torchtitan models/common/attention.py")
def key_heads_split_or_repeat(case: Case) -> Iterator[Problem]:
    """With fewer key heads than ranks, each rank keeps one and they are replicated; torchtitan does not replicate."""
    tp = case.layout.tp
    for heads, kv in _heads(case):
        repeats = tp % kv == 0 and case.framework != TITAN
        if heads % tp == 0 and kv % tp and not repeats:
            why = "key and value heads are neither split nor repeated evenly"
            if case.framework == TITAN:
                why = "torchtitan does not replicate key and value heads, they must split"
            yield Problem(f"{kv} key heads, tp={tp}", why, _instead(case))


@rule("T3", "Megatron Core attention.py divide; torchtitan models/common/attention.py")
def heads_group_evenly(case: Case) -> Iterator[Problem]:
    for heads, kv in _heads(case):
        if heads % kv:
            yield Problem(
                f"{heads} heads, {kv} key heads", "each key head serves the same number of heads", "a model with heads % kv_heads == 0"
            )


@rule("T4", "Megatron Core ColumnParallelLinear and RowParallelLinear (divide)")
def feed_forward_splits(case: Case) -> Iterator[Problem]:
    if case.model is None:
        return
    tp, etp = case.layout.tp, case.layout.etp
    for mlp in case.model.dense_mlps:
        if mlp.ffn % tp:
            yield Problem(f"feed-forward width {mlp.ffn}, tp={tp}", "the width is split over tp", _instead(case))
    moe = case.model.moe
    if moe and moe.ffn % etp:
        legal = [each for each in range(1, 2 * etp) if moe.ffn % each == 0]
        yield Problem(f"expert width {moe.ffn}, etp={etp}", "the width of an expert is split over etp", listed("etp", nearest(legal, etp)))
    if moe and moe.shared_ffn % tp:
        yield Problem(f"shared expert width {moe.shared_ffn}, tp={tp}", "shared experts are split over tp", _instead(case))


@rule("T7", "Megatron Core VocabParallelEmbedding; calculate_padded_vocab_size", severity="info", titan=None)
def vocabulary_is_padded(case: Case) -> Iterator[Problem]:
    if case.model and case.model.vocab % case.layout.tp:
        padded = case.model.padded_vocab(case.layout.tp)
        why = f"rows are split over tp, so the vocabulary has to be padded to {padded} (should_pad_vocab)"
        yield Problem(f"vocabulary {case.model.vocab}, tp={case.layout.tp}", why, f"a padded vocabulary of {padded}")


@rule(
    "T8",
    "Megatron Core ModelParallelConfig; Megatron Bridge TransformerConfig.finalize",
    severity="warning",
    megatron="error",
    titan="info",
)
def sequence_parallel_needs_tensor_parallel(case: Case) -> Iterator[Problem]:
    if case.layout.sp and case.layout.tp == 1:
        why = "sequence parallelism splits activations over the tp group, which has one rank"
        if case.framework != MEGATRON:
            why += "; it is turned off"
        yield Problem("sp=true tp=1", why, "sp=false, or tp=2 or more")


@rule("T9", "Megatron Core tensor_parallel/mappings (sequence scatter)", shardwise=None)
def sequence_splits_over_tensor_ranks(case: Case) -> Iterator[Problem]:
    layout, seq = case.layout, case.seq_len
    if seq is None or not layout.sp or layout.tp == 1 or seq % layout.cp or seq // layout.cp % layout.tp == 0:
        return
    step = sequence_step(layout.tp, layout.cp, True)
    given = f"sequence {seq}, cp={layout.cp} tp={layout.tp} sp=true"
    yield Problem(given, f"the {seq // layout.cp} tokens of a context rank are split over tp", listed("seq_len", multiples(step, seq)))


@rule("T10", f"{_CONFIG}; Megatron-LM validate_args", only=MEGATRONS)
def saved_activations_are_distributed_once(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if not case.settings.get("distribute_saved_activations"):
        return
    if layout.sp:
        yield Problem("distribute_saved_activations=true sp=true", "with SP they are already split", "distribute_saved_activations=false")
    elif layout.tp == 1 or layout.recompute.granularity != "full":
        given = f"distribute_saved_activations=true tp={layout.tp} recompute={layout.recompute}"
        yield Problem(given, "it splits the inputs that full recompute keeps over tp", "tp=2 or more with recompute=full:uniform:1")


@rule("T11", "Megatron-LM validate_args; Megatron Bridge comm_overlap", bridge="warning", titan=None, shardwise="warning")
def overlapped_tensor_parallel_needs_sequence_parallel(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if layout.overlap_tp and (layout.tp == 1 or not layout.sp):
        why = "overlap splits the gathers and scatters of sequence parallelism"
        if case.framework not in MEGATRONS[:1]:
            why += "; it is turned off"
        yield Problem(f"overlap_tp=true tp={layout.tp} sp={str(layout.sp).lower()}", why, "sp=true with tp=2 or more, or overlap_tp=false")


@rule("T12", "Megatron-LM validate_args", only=MEGATRONS)
def one_device_connection(case: Case) -> Iterator[Problem]:
    layout, connections = case.layout, case.settings.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections is None or str(connections) == "1" or case.cluster is None or case.cluster.gpu.arch not in ("ampere", "hopper", "ada"):
        return
    if layout.tp > 1 or layout.cp > 1:
        relaxed = layout.overlap_moe or layout.sharding in ("fsdp2", "megatron_fsdp")
        why = "before Blackwell, one connection keeps communication ahead of the computation it overlaps"
        given = f"CUDA_DEVICE_MAX_CONNECTIONS={connections} tp={layout.tp} cp={layout.cp}"
        yield Problem(given, why, "CUDA_DEVICE_MAX_CONNECTIONS=1", "warning" if relaxed else "error")


@rule("T13", "Megatron Core transformer/torch_norm.py; dot_product_attention.py", only=MEGATRONS)
def local_layers_are_limited(case: Case) -> Iterator[Problem]:
    """Without Transformer Engine: no sequence parallelism in torch norms, no context parallelism in local attention (C17)."""
    if case.settings.get("transformer_impl") != "local":
        return
    if case.layout.sp and case.layout.tp > 1:
        yield Problem(
            "transformer_impl=local sp=true", "torch norms do not take sequence parallelism", "transformer_impl=transformer_engine"
        )
    if case.layout.cp > 1:
        given = f"transformer_impl=local cp={case.layout.cp}"
        yield Problem(given, "local attention has no context parallelism", "transformer_impl=transformer_engine, or cp=1")


@rule("T14", f"{_CONFIG}, gated delta net")
def linear_attention_heads_split(case: Case) -> Iterator[Problem]:
    tp, cp = case.layout.tp, case.layout.cp
    mixers = {layer.mixer for layer in case.model.kinds if isinstance(layer.mixer, DeltaNet)} if case.model else set()
    for mixer in mixers:
        if mixer.key_heads % (tp * cp) or mixer.value_heads % (tp * cp):
            legal = [n for n in range(1, mixer.key_heads + 1) if mixer.key_heads % n == 0 and mixer.value_heads % n == 0]
            given = f"{mixer.key_heads} key and {mixer.value_heads} value heads of linear attention, tp={tp} cp={cp}"
            yield Problem(given, "they are split over TP*CP", f"TP*CP of {', '.join(str(n) for n in nearest(legal, tp * cp))}")


@rule("T15", "Megatron Core multi_latent_attention.py", only=MEGATRONS)
def fused_down_projection_splits(case: Case) -> Iterator[Problem]:
    if not case.settings.get("mla_down_proj_fusion") or case.model is None:
        return
    for mixer in case.model.attentions:
        if isinstance(mixer, Mla) and ((mixer.q_lora or 0) % case.layout.tp or (mixer.kv_lora + mixer.rope_dim) % case.layout.tp):
            given = f"mla_down_proj_fusion=true tp={case.layout.tp}, latents {mixer.q_lora} and {mixer.kv_lora + mixer.rope_dim}"
            yield Problem(given, "the fused projection is split over tp", "mla_down_proj_fusion=false")


@rule("T16", "Megatron Bridge olmoe_provider.OLMoESelfAttention", titan="warning", shardwise="warning")
def norms_over_all_heads_need_one_rank(case: Case) -> Iterator[Problem]:
    wide = case.model is not None and any(isinstance(each, Attention) and each.qk_norm == "full" for each in case.model.attentions)
    if wide and case.layout.tp > 1:
        why = "queries and keys are normalised over all heads together; a rank that holds some of them computes another norm"
        yield Problem(f"tp={case.layout.tp}", why, "tp=1, with ep or dp instead")


@rule("T17", "Megatron Core ssm/mamba_mixer.py")
def state_space_heads_split(case: Case) -> Iterator[Problem]:
    tp = case.layout.tp
    mixers = {layer.mixer for layer in case.model.kinds if isinstance(layer.mixer, Mamba2)} if case.model else set()
    for mixer in mixers:
        if mixer.heads % tp or mixer.groups % tp:
            yield Problem(
                f"{mixer.heads} Mamba heads in {mixer.groups} groups, tp={tp}", "heads and groups are split over tp", _instead(case)
            )


@rule("T18", "Megatron Bridge, guide to parallelism strategies, hardware topology", severity="warning", only=(*MEGATRONS, TITAN, SHARDWISE))
def tensor_parallel_stays_in_the_fast_domain(case: Case) -> Iterator[Problem]:
    cluster, tp = case.cluster, case.layout.tp
    if cluster and tp > 1 and (tp > cluster.domain or cluster.domain % tp) and cluster.gpus > cluster.domain:
        why = f"a tensor parallel group crosses the {cluster.intra.name} domain of {cluster.domain} GPUs and runs at network speed"
        inside = [size for size in range(1, cluster.domain + 1) if cluster.domain % size == 0]
        yield Problem(
            f"tp={tp}, {cluster.domain} GPUs in a domain", why, f"{listed('tp', nearest(inside, tp, 2))}, with pp or dp across nodes"
        )

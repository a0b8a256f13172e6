"""Context parallelism and sequence lengths (C rules)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from shardwise.planner.rules.alternatives import divisors, listed, multiples, natural_cp_comm, nearest, sequence_step
from shardwise.planner.rules.rule import BRIDGE, MEGATRON, MEGATRONS, SHARDWISE, TITAN, Case, Problem, rule
from shardwise.spec.blocks import Attention, CompressedAttention, Mla

_TE = "Transformer Engine attn_forward_func_with_cp"


@rule(
    "C1",
    "Megatron Bridge ConfigContainer.validate; Megatron-LM validate_args; Transformer Engine; torchtitan trainer",
    shardwise=None,  # rows of a sequence may split unevenly
)
def sequence_splits_into_balanced_chunks(case: Case) -> Iterator[Problem]:
    """The sequence is cut in 2*CP chunks and rank r holds chunks r and 2*CP-1-r, so that causal work is equal."""
    layout, seq = case.layout, case.seq_len
    if seq is None or layout.cp == 1 or seq % (2 * layout.cp) == 0:
        return
    step = sequence_step(layout.tp, layout.cp, layout.sp)
    legal = [cp for cp in divisors(seq) if seq % (2 * cp) == 0 or cp == 1]
    instead = f"{listed('seq_len', multiples(step, seq))}, or {listed('cp', nearest(legal, layout.cp, 2))}"
    yield Problem(f"sequence {seq}, cp={layout.cp}", f"no multiple of 2*CP = {2 * layout.cp}", instead)


@rule("C2", "torchtitan trainer", only=(TITAN,))
def tokens_split_over_tensor_and_context(case: Case) -> Iterator[Problem]:
    """torchtitan asks more: the tokens of a micro batch are a multiple of TP times 2*CP."""
    layout, seq = case.layout, case.seq_len
    if seq is None:
        return
    step = (layout.tp if layout.sp else 1) * (2 * layout.cp if layout.cp > 1 else 1)
    if (seq * layout.mbs) % step:
        given = f"{seq * layout.mbs} tokens of a micro batch, tp={layout.tp} cp={layout.cp}"
        yield Problem(given, f"no multiple of TP*2*CP = {step}", listed("seq_len", multiples(step, seq)))


@rule("C3", "Transformer Engine cu_seqlens_padded; Megatron Bridge sync_offline_packing_alignment", only=(BRIDGE, SHARDWISE))
def packed_sequences_are_padded(case: Case) -> Iterator[Problem]:
    multiple, layout = case.count("pad_seq_to_mult"), case.layout
    step = sequence_step(layout.tp, layout.cp, layout.sp)
    if multiple and layout.cp > 1 and multiple % step:
        given = f"pad_seq_to_mult={multiple} tp={layout.tp} cp={layout.cp}"
        yield Problem(given, "every packed sequence splits like a whole one", listed("pad_seq_to_mult", multiples(step, multiple)))


@rule("C4", "Megatron Core TransformerConfig.__post_init__", only=MEGATRONS)
def one_communication_per_layer(case: Case) -> Iterator[Problem]:
    kinds = case.settings.get("cp_comm_type")
    if case.model and isinstance(kinds, (list, tuple)) and len(kinds) != case.model.num_layers:
        given = f"cp_comm_type of {len(kinds)} entries"
        yield Problem(given, f"a list names one for each of the {case.model.num_layers} layers", "cp_comm_type=p2p, one word for all")


@rule("C5", "Transformer Engine AttnFuncWithCPAndQKVOA2A")
def heads_split_over_the_exchange(case: Case) -> Iterator[Problem]:
    """All-to-all context parallelism trades sequence for heads: heads and key heads of a rank split over the exchange group."""
    layout = case.layout
    if layout.cp == 1 or "a2a" not in layout.cp_comm or case.model is None:
        return
    size = layout.cp if layout.cp_comm == "a2a" else (layout.cp_sizes or (layout.cp,))[0]
    for mixer in case.model.attentions:
        if not isinstance(mixer, (Attention, Mla)) or mixer.heads % layout.tp:
            continue
        heads, kv = mixer.heads // layout.tp, max(mixer.kv_heads // layout.tp, 1)
        if heads % size or kv % size:
            legal = [n for n in divisors(heads) if kv % n == 0]
            given = f"{heads} heads and {kv} key heads on a tp rank, exchange of {size} ranks (cp_comm={layout.cp_comm})"
            ways = [f"exchange of {' or '.join(str(n) for n in nearest(legal, size, 2))} ranks"]
            inner = max((n for n in legal if n < layout.cp and layout.cp % n == 0), default=1)
            other = natural_cp_comm(case.model)
            if other == "p2p" and layout.cp_comm == "a2a" and inner > 1:
                ways.insert(0, f"cp_comm=a2a+p2p cp_sizes={inner}x{layout.cp // inner}")
            if other != "a2a":
                ways.append(f"cp_comm={other}")
            instead = ", or ".join(ways)
            yield Problem(given, "the exchange splits heads over its ranks", instead)


@rule("C6", "Megatron Bridge _validate_cp_comm_type; Megatron-LM validate_args", titan=None)
def hierarchical_exchange_needs_sizes(case: Case) -> Iterator[Problem]:
    """And C7: their product is CP. The first size is the all-to-all group of neighbouring ranks, the second the ring (C8)."""
    layout = case.layout
    if layout.cp == 1 or layout.cp_comm != "a2a+p2p":
        if layout.cp_sizes and prod(layout.cp_sizes) != layout.cp:
            yield Problem(f"cp_sizes={list(layout.cp_sizes)} cp={layout.cp}", "the sizes multiply to cp", "no cp_sizes")
        return
    pairs = [(n, layout.cp // n) for n in divisors(layout.cp) if 1 < n < layout.cp] or [(layout.cp, 1)]
    instead = "cp_sizes=" + " or ".join(f"{a}x{b}" for a, b in pairs[:3])
    if not layout.cp_sizes:
        why = "without the sizes each rank attends only to its own chunk: fast, and wrong"
        yield Problem(f"cp_comm=a2a+p2p cp={layout.cp}", why, instead)
    elif prod(layout.cp_sizes) != layout.cp:
        yield Problem(f"cp_sizes={list(layout.cp_sizes)} cp={layout.cp}", f"the sizes multiply to {prod(layout.cp_sizes)}", instead)


@rule("C9", "Megatron Bridge _create_pg_collection", only=(BRIDGE,))
def hierarchical_exchange_needs_central_groups(case: Case) -> Iterator[Problem]:
    if case.layout.cp_sizes and case.settings.get("use_decentralized_pg"):
        yield Problem("cp_sizes with use_decentralized_pg=true", "not implemented", "use_decentralized_pg=false")


@rule("C10", _TE, only=MEGATRONS)
def windows_need_whole_keys(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if layout.cp == 1 or layout.cp_comm in ("a2a", "all_gather") or case.model is None:
        return
    windows = {each.window for each in case.model.attentions if isinstance(each, Attention) and each.window}
    if windows:
        given = f"sliding window {', '.join(str(each) for each in sorted(windows))}, cp={layout.cp} cp_comm={layout.cp_comm}"
        yield Problem(given, "a sliding window needs the keys in one place", "cp_comm=a2a or all_gather")


@rule("C11", _TE, only=MEGATRONS)
def sinks_need_exchange(case: Case) -> Iterator[Problem]:
    sinks = case.model is not None and any(isinstance(each, Attention) and each.sinks for each in case.model.attentions)
    if sinks and case.layout.cp > 1 and case.layout.cp_comm != "a2a":
        yield Problem(f"attention sinks, cp={case.layout.cp} cp_comm={case.layout.cp_comm}", "sinks enter each softmax once", "cp_comm=a2a")


@rule("C12", "Megatron Core TransformerConfig.__post_init__", only=MEGATRONS)
def sparse_attention_needs_all_keys(case: Case) -> Iterator[Problem]:
    sparse = case.model is not None and any(
        isinstance(each, (Mla, CompressedAttention)) and each.indexer is not None for each in case.model.attentions
    )
    if sparse and case.layout.cp > 1 and case.layout.cp_comm != "all_gather":
        given = f"sparse attention with an indexer, cp={case.layout.cp} cp_comm={case.layout.cp_comm}"
        yield Problem(given, "the indexer chooses among all keys", "cp_comm=all_gather")


@rule("C13", "Megatron Bridge ConfigContainer.validate", only=(BRIDGE, SHARDWISE))
def masked_tokens_need_per_token_loss(case: Case) -> Iterator[Problem]:
    settings = case.settings
    if case.layout.cp > 1 and settings.get("finetuning") and not settings.get("calculate_per_token_loss"):
        why = "a context rank whose tokens are all masked would divide by zero"
        yield Problem(f"fine-tuning, cp={case.layout.cp}", why, "calculate_per_token_loss=true average_in_collective=false")
    if settings.get("calculate_per_token_loss") and settings.get("average_in_collective"):  # C14
        yield Problem("calculate_per_token_loss=true average_in_collective=true", "the sum is divided twice", "average_in_collective=false")


@rule("C15", "Megatron-LM validate_args", only=(MEGATRON,))
def dynamic_context_parallel_is_limited(case: Case) -> Iterator[Problem]:
    layout, settings = case.layout, case.settings
    if not settings.get("hybrid_context_parallel"):
        return
    if layout.pp > 1 or layout.sharding == "megatron_fsdp" or (layout.dp * layout.cp) % 2 or not settings.get("calculate_per_token_loss"):
        given = f"hybrid_context_parallel=true pp={layout.pp} sharding={layout.sharding} DP*CP={layout.dp * layout.cp}"
        yield Problem(given, "it needs pp=1, an even DP*CP, per-token loss and no Megatron FSDP", "hybrid_context_parallel=false")


@rule("C16", "Megatron-LM validate_args; torchtitan decoder", bridge="warning", shardwise="warning")
def positions_reach_the_sequence(case: Case) -> Iterator[Problem]:
    if case.model is None or case.seq_len is None:
        return
    learned = case.model.positions
    if learned and case.seq_len > learned:
        yield Problem(
            f"sequence {case.seq_len}, {learned} learned positions", "later tokens have no position", f"seq_len={learned} or less", "error"
        )
    elif case.model.max_positions and case.seq_len > case.model.max_positions:
        given = f"sequence {case.seq_len}, positions up to {case.model.max_positions}"
        yield Problem(
            given, "the model was not made for positions that far", f"seq_len={case.model.max_positions}, or a longer rotary range"
        )


@rule("C18", "Megatron Core TransformerConfig.__post_init__", only=MEGATRONS)
def batch_invariance_excludes_context_parallel(case: Case) -> Iterator[Problem]:
    if case.settings.get("batch_invariant_mode") and (case.layout.cp > 1 or case.layout.precision != "bf16"):
        given = f"batch_invariant_mode=true cp={case.layout.cp} precision={case.layout.precision}"
        yield Problem(given, "it needs cp=1 and bf16", "cp=1 precision=bf16")


@rule("C19", "Megatron Bridge ConfigContainer.validate", only=(BRIDGE,))
def evaluation_context_parallel_tiles(case: Case) -> Iterator[Problem]:
    cp, layout = case.count("eval_context_parallel_size"), case.layout
    if cp is None:
        return
    mesh = layout.tp * layout.pp * cp
    if not case.settings.get("use_decentralized_pg"):
        yield Problem(f"eval_context_parallel_size={cp}", "it needs groups of its own", "use_decentralized_pg=true")
    if case.world % mesh:
        yield Problem(
            f"eval_context_parallel_size={cp}, {case.world} GPUs", f"the world is no multiple of {mesh}", "a size that tiles the world"
        )

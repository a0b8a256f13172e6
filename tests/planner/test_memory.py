"""Memory prediction: worked numbers, closed forms against action lists, state by sharding mode, the heaviest stage."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.planner import memory
from shardwise.planner.activations import saved_by_layer
from shardwise.planner.estimator import Estimator, estimate_memory
from shardwise.planner.layer_work import shape_of
from shardwise.spec import catalog
from shardwise.spec.blocks import Attention, Layer, Mla, Mlp
from shardwise.spec.catalog import cluster
from shardwise.spec.layout import Layout, Offload, Recompute
from shardwise.spec.model import ModelSpec
from shardwise.spec.schedules import actions, peak_held

GIB = 2**30


def gpt(layers: int, hidden: int, heads: int, *, dropout: float = 0.1, vocab: int = 51200) -> ModelSpec:
    block = Layer(mixer=Attention(heads=heads, kv_heads=heads, head_dim=hidden // heads), mlp=Mlp(ffn=4 * hidden, gated=False))
    return ModelSpec(name="gpt", hidden=hidden, vocab=vocab, layers=(block,) * layers, dropout=dropout)


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int = 128256) -> ModelSpec:
    block = Layer(mixer=Attention(heads=heads, kv_heads=kv_heads, head_dim=hidden // heads), mlp=Mlp(ffn=ffn))
    return ModelSpec(name="llama", hidden=hidden, vocab=vocab, layers=(block,) * layers)


LLAMA_8B = llama(32, 4096, 32, 8, 14336)


def stage_params(layout: Layout) -> list[float]:
    estimator = Estimator(LLAMA_8B, cluster("h100-sxm", 4), seq_len=8192)
    return [sum(chunk.params.total for chunk in chunks) / 1e6 for chunks in estimator.stages(layout)]


def test_the_average_stage_is_not_the_peak() -> None:
    """Llama-3-8B on four stages: ends hold 30 % more than the middles, and two layers fewer there even it out."""
    even = stage_params(Layout(pp=4))
    assert max(even) == pytest.approx(2270.2, abs=0.1)
    assert sum(even) / 4 == pytest.approx(2007.6, abs=0.1)
    assert even[0] / even[1] == pytest.approx(1.30, abs=0.01)
    uneven = stage_params(Layout(pp=4, first_stage_layers=7, last_stage_layers=7))
    assert max(uneven) == pytest.approx(2052.1, abs=0.1)
    assert LLAMA_8B.embedding_params / LLAMA_8B.layer_params(LLAMA_8B.layers[0]).total == pytest.approx(2.41, abs=0.01)


def test_the_even_split_predicts_more_memory_on_the_end_stage() -> None:
    estimator = Estimator(LLAMA_8B, cluster("h100-sxm", 4), seq_len=8192)
    even = estimator.memory(Layout(pp=4, gbs=8))
    uneven = estimator.memory(Layout(pp=4, gbs=8, first_stage_layers=7, last_stage_layers=7))
    assert even.stage in (0, 3)
    assert uneven.allocated_gib < even.allocated_gib


def test_activations_of_a_llama_layer() -> None:
    """8h + 2d(2a + 2k) + 6f + 4a bytes per token (planner equations 3.3): 274,688 for Llama-3-70B."""
    model = llama(1, 8192, 64, 8, 28672)
    shape = shape_of(Layout(), 1, 132)
    assert saved_by_layer(model, model.layers[0], shape).total == 274_688


def test_activations_of_a_gpt_layer() -> None:
    """34 h per token with dropout and without flash attention's log-sum-exp (arXiv:2205.05198)."""
    model = gpt(1, 12288, 96)
    saved = saved_by_layer(model, model.layers[0], shape_of(Layout(), 2048, 108))
    tokens = 2048
    assert saved.total - saved.parts["log_sum_exp"] == 34 * 12288 * tokens


def test_unfused_attention_adds_five_bytes_per_score() -> None:
    model = gpt(1, 2048, 16)
    flash = saved_by_layer(model, model.layers[0], shape_of(Layout(), 1024, 108))
    plain = saved_by_layer(model, model.layers[0], shape_of(Layout(attention="unfused"), 1024, 108))
    assert plain.total - flash.total + flash.parts["log_sum_exp"] == 5 * 16 * 1024 * 1024


def test_sequence_parallel_divides_the_norm_regions_too() -> None:
    model = gpt(1, 8192, 64)
    layer = model.layers[0]
    whole = saved_by_layer(model, layer, shape_of(Layout(), 2048, 108)).total
    split = saved_by_layer(model, layer, shape_of(Layout(tp=8, sp=True), 2048, 108)).total
    without = saved_by_layer(model, layer, shape_of(Layout(tp=8), 2048, 108)).total
    assert split == pytest.approx(whole / 8)
    assert without - split == pytest.approx(10 * 8192 * 2048 * 7 / 8)  # 10 h stay whole


def test_state_of_a_gpt_22b_without_sharding() -> None:
    """12 h^2 L * 18 / 8 bytes: 45.5625 GiB at tensor parallel 8 (norms and embedding left out)."""
    weights = 12 * 6144**2 * 48 / 8
    terms = memory.state_terms(Layout(tp=8, sharding="none"), weights, 0)
    assert sum(terms.values()) / GIB == pytest.approx(45.5625)


@pytest.mark.parametrize(
    ("layout", "bytes_per_param"),
    [
        (Layout(dp=8, sharding="none"), 18),
        (Layout(dp=8, sharding="distributed_optimizer"), 6 + 12 / 8),
        (Layout(dp=4, cp=2, sharding="distributed_optimizer"), 6 + 12 / 8),
        (Layout(dp=8, sharding="distributed_optimizer", grad_dtype="bf16"), 4 + 12 / 8),
        (Layout(dp=8, sharding="distributed_optimizer", grad_dtype="bf16", moment_dtype="bf16"), 4 + 8 / 8),
        (Layout(dp=8, sharding="zero2"), 2 + 16 / 8),
        (Layout(dp=8, sharding="fsdp2", param_dtype="fp32", master_dtype=None), 16 / 8),
        (Layout(dp=8, sharding="fsdp2", param_dtype="fp32", master_dtype=None, shard_group=4), 16 / 4),
        (Layout(dp=8, sharding="distributed_optimizer", offload=Offload(optimizer=0.5)), 6 + 6 / 8),
    ],
)
def test_bytes_per_parameter(layout: Layout, bytes_per_param: float) -> None:
    assert sum(memory.state_terms(layout, 1e9, 0).values()) / 1e9 == pytest.approx(bytes_per_param)


def test_more_fsdp_ranks_free_what_they_shard() -> None:
    """torchtitan Llama-3-8B from 8 to 128 GPUs: 16 B * 8.03e9 * (1/8 - 1/128) = 14.0 GiB."""
    fsdp = Layout(sharding="fsdp2", param_dtype="fp32", master_dtype=None, mbs=2)
    small = Estimator(LLAMA_8B, cluster("h100-sxm", 8), seq_len=8192).memory(fsdp.replace(dp=8, gbs=16))
    large = Estimator(LLAMA_8B, cluster("h100-sxm", 128), seq_len=8192).memory(fsdp.replace(dp=128, gbs=256))
    assert small.allocated_gib - large.allocated_gib == pytest.approx(14.0, abs=0.05)


@settings(max_examples=60, deadline=None)
@given(pp=st.integers(1, 6), vpp=st.integers(1, 4), groups=st.integers(1, 4), schedule=st.sampled_from(["1f1b", "gpipe"]))
def test_micro_batches_in_flight_equal_the_action_list(pp: int, vpp: int, groups: int, schedule: str) -> None:
    vpp = 1 if pp == 1 else vpp
    layout = Layout(pp=pp, vpp=vpp, gbs=pp * groups, schedule=schedule)  # type: ignore[arg-type]
    closed = memory.in_flight(schedule, pp, vpp, pp, pp * groups)
    for rank, each in enumerate(actions(layout)):
        assert sum(closed[rank]) == peak_held(each, [1.0] * layout.stages)


def test_interleaving_costs_the_first_rank() -> None:
    """L (1 + (p - 1) / (p v)) layers of activations on rank 0 (arXiv:2205.05198)."""
    pp, vpp, layers = 4, 2, 32
    kept = memory.in_flight("1f1b", pp, vpp, pp, 64)[0]
    assert sum(kept) * layers / (pp * vpp) == layers * (1 + (pp - 1) / (pp * vpp))


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev"])
def test_zero_bubble_schedules_hold_what_their_lists_hold(schedule: str) -> None:
    vpp = 2 if schedule in ("zbv", "dualpipev") else 1
    layout = Layout(pp=4, vpp=vpp, gbs=16, schedule=schedule)  # type: ignore[arg-type]
    closed = memory.in_flight(schedule, 4, vpp, 4, 16)
    for rank, each in enumerate(actions(layout)):
        held = peak_held(each, [1.0] * layout.stages)
        assert held <= sum(closed[rank]) <= held + 1


def test_the_last_stage_can_be_the_heaviest() -> None:
    """Logits: a large vocabulary on the last stage outweighs the micro batches in flight of the first."""
    model = llama(8, 1024, 16, 8, 4096, vocab=256000)
    found = estimate_memory(model, Layout(pp=2, mbs=4, gbs=64, cross_entropy="unfused"), cluster("h100-sxm", 2), seq_len=4096)
    assert found.stage == 1
    fused = estimate_memory(model, Layout(pp=2, mbs=4, gbs=64, cross_entropy="fused"), cluster("h100-sxm", 2), seq_len=4096)
    assert fused.stages[1]["loss"] < found.stages[1]["loss"]


def test_terms_add_up() -> None:
    found = estimate_memory(LLAMA_8B, Layout(tp=2, pp=2, dp=2, sp=True, gbs=16), cluster("h100-sxm", 8), seq_len=8192)
    assert sum(found.terms.values()) / GIB == pytest.approx(found.allocated_gib)
    assert found.reserved_gib > found.allocated_gib
    assert max(sum(stage.values()) for stage in found.stages) / GIB == pytest.approx(found.allocated_gib)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (Recompute(granularity="full", method="uniform", num_layers=1), Recompute(granularity="selective", modules=("mlp",))),
        (Recompute(granularity="selective", modules=("mlp", "layernorm")), Recompute(granularity="selective", modules=("mlp",))),
        (Recompute(granularity="selective", modules=("mlp",)), Recompute()),
        (Recompute(granularity="full", method="block", num_layers=4), Recompute(granularity="full", method="block", num_layers=2)),
    ],
)
def test_recomputing_more_keeps_less(less: Recompute, more: Recompute) -> None:
    estimator = Estimator(LLAMA_8B, cluster("h100-sxm", 8), seq_len=8192)
    layout = Layout(tp=2, pp=2, dp=2, sp=True, gbs=64)
    low, high = estimator.memory(layout.replace(recompute=less)), estimator.memory(layout.replace(recompute=more))
    assert low.terms["activations"] < high.terms["activations"]


def test_flash_attention_leaves_core_attention_recompute_nothing_to_save() -> None:
    estimator = Estimator(LLAMA_8B, cluster("h100-sxm", 8), seq_len=8192)
    layout = Layout(dp=8, gbs=8)
    plain = estimator.memory(layout)
    again = estimator.memory(layout.replace(recompute=Recompute(granularity="selective", modules=("core_attn",))))
    assert plain.allocated_gib == again.allocated_gib


def test_a_hot_expert_rank_needs_more() -> None:
    from shardwise.spec.catalog.models import model

    moe = model("qwen3-30b-a3b")
    layout = Layout(dp=8, ep=8, gbs=8)
    mean = estimate_memory(moe, layout, cluster("h100-sxm", 8), seq_len=4096)
    hot = estimate_memory(moe, layout, cluster("h100-sxm", 8), seq_len=4096, imbalance=1.5)
    capped = estimate_memory(moe, layout.replace(capacity_factor=1.0), cluster("h100-sxm", 8), seq_len=4096, imbalance=1.5)
    assert hot.allocated_gib > mean.allocated_gib
    assert capped.allocated_gib == pytest.approx(mean.allocated_gib)


def test_a_loss_that_works_in_place_holds_the_logits_once() -> None:
    def loss(word: str) -> float:
        layout = Layout(pp=2, mbs=4, gbs=64, cross_entropy=word)  # type: ignore[arg-type]
        terms = estimate_memory(LLAMA_8B, layout, cluster("h100-sxm", 2), seq_len=4096).stages[-1]
        return terms["loss"] + terms["working_set"]

    logits = 2 * 4 * 4096 * LLAMA_8B.padded_vocab(1)
    assert loss("te") == pytest.approx(logits)
    assert loss("fused") == pytest.approx(2 * logits)


def test_unfused_attention_holds_a_gradient_of_its_scores() -> None:
    scores = 2 * 2 * 8192**2 * 32  # bf16, two samples
    shape = shape_of(Layout(mbs=2, attention="unfused"), 8192, 132)
    saved = saved_by_layer(LLAMA_8B, LLAMA_8B.layers[0], shape)
    assert saved.parts["scores"] == scores
    assert saved.working == scores
    packed = shape_of(Layout(mbs=2, attention="unfused"), 8192, 132, document=512)  # masked, and written out all the same
    assert saved_by_layer(LLAMA_8B, LLAMA_8B.layers[0], packed).parts["scores"] == scores
    fused = saved_by_layer(LLAMA_8B, LLAMA_8B.layers[0], shape_of(Layout(mbs=2), 8192, 132))
    assert fused.working < scores / 2


def test_sparse_attention_without_a_kernel_keeps_scores_in_fp32() -> None:
    model = catalog.model("glm-5")
    shape = shape_of(Layout(attention="unfused"), 2048, 132)
    saved = saved_by_layer(model, model.layers[-1], shape)
    block = model.layers[-1].mixer
    assert isinstance(block, Mla) and block.indexer
    masked_softmax = 4 + 4 + 3 * 1 + 2  # exponentials, masked exponentials, masks, bf16 probabilities
    products = 2 * 4 * (512 + 64) + 2 * 512  # Q and K of the latents in fp32, V in bf16
    assert saved.parts["scores"] == block.heads * (2048**2 * masked_softmax + 2048 * products)
    assert saved.working == 2048**2 * 17 * block.heads


def test_gathered_layers_of_fp8_parameters_are_half_as_large() -> None:
    def gathered(**fields: object) -> float:
        layout = Layout(dp=8, gbs=8, sharding="megatron_fsdp", grad_dtype="bf16", precision="mxfp8", **fields)  # type: ignore[arg-type]
        return estimate_memory(LLAMA_8B, layout, cluster("h100-sxm", 8), seq_len=8192).terms["gathered"]

    assert gathered() - gathered(param_dtype="fp8") == pytest.approx(3 * 218_112_000, rel=1e-3)  # three layers, a byte per parameter less


def test_fp8_weights_are_kept_twice_only_where_products_need_a_transpose() -> None:
    def weights(gpu: str, precision: str, param_dtype: str = "fp8") -> float:
        layout = Layout(tp=2, dp=4, gbs=8, precision=precision, param_dtype=param_dtype)  # type: ignore[arg-type]
        terms = estimate_memory(LLAMA_8B, layout, cluster(gpu, 8), seq_len=8192).terms
        return terms["weights"] + terms["low_precision_weights"] - memory.LOW_PRECISION_SCRATCH

    ends = 2 * LLAMA_8B.padded_vocab(2) // 2 * LLAMA_8B.hidden  # embedding and head of a rank, in bf16
    linear = weights("h100-sxm", "fp8-current") / 2 - ends
    assert linear == pytest.approx(LLAMA_8B.total_params / 2 - ends, rel=1e-3)
    for precision in ("fp8-current", "fp8-delayed"):
        for gpu, copies in (("h100-sxm", 2), ("b200", 1), ("gb300", 1), ("rtx-5090", 2)):
            assert weights(gpu, precision) == pytest.approx(copies * linear + 2 * ends)
    # rows and columns have scales of their own
    assert weights("b200", "mxfp8") == pytest.approx(2 * (1 + 1 / 32) * linear + 2 * ends)
    assert weights("b200", "fp8-current", "bf16") == weights("h100-sxm", "fp8-current", "bf16")
    # embedding and head are multiplied in bf16: no copies of them
    assert weights("b200", "fp8-current", "bf16") == pytest.approx((2 + 2) * linear + 2 * ends)
    assert weights("b200", "nvfp4", "bf16") == pytest.approx((2 + 2 * (1 / 2 + 1 / 16)) * linear + 2 * ends)


def test_nvfp4_as_measured() -> None:
    """DeepSeek-V3 on 256 GB300, first pipeline rank: 235.15 GB at the peak (Megatron Bridge, pull request 3364)."""
    layout = Layout(
        pp=2,
        vpp=8,
        dp=128,
        ep=32,
        mbs=2,
        gbs=4096,
        precision="nvfp4",
        grad_dtype="bf16",
        moment_dtype="bf16",
        cross_entropy="te",
        recompute=Recompute(granularity="selective", modules=("mla_up_proj",)),
        pipeline_layout=("Etttt", *("tttt",) * 14, "tmL"),
    )
    found = estimate_memory(catalog.model("deepseek-v3"), layout, cluster("gb300", 256), seq_len=4096, profile="megatron-bridge")
    assert 235.15e9 < sum(found.stages[0].values()) < 1.05 * 235.15e9


def test_nvfp4_keeps_gathered_norm_outputs_by_rows_and_columns() -> None:
    """Transformer Engine drops the rows of what the backward pass gathers in MXFP8 only."""

    def outputs(precision: str, *, sp: bool) -> float:
        shape = shape_of(Layout(tp=4, sp=sp, precision=precision), 2048, 148)  # type: ignore[arg-type]
        return saved_by_layer(LLAMA_8B, LLAMA_8B.layers[0], shape).parts["norm_output"]

    assert outputs("nvfp4", sp=True) == pytest.approx(outputs("nvfp4", sp=False) / 4 * 2)
    assert outputs("mxfp8", sp=True) == pytest.approx(outputs("mxfp8", sp=False) / 4)


def test_a_gated_delta_rule_layer() -> None:
    """Qwen3-Next, 16 key and 32 value heads of 128, chunks of 64, per token as `ChunkGatedDeltaRuleFunction` and its callers save."""
    model = catalog.model("qwen3-next-80b-a3b")
    saved = saved_by_layer(model, model.layers[0], shape_of(Layout(), 4096, 132))
    convolution, normed, repeated, value, triangle = 8192, 2 * 2048, 2 * 4096, 4096, 32 * 64
    output, norm, gate, projected = 4096, 4096, 4096, 4096
    elements = convolution + normed + repeated + value + triangle + output + norm + gate + projected
    assert saved.parts["scan"] == 4096 * (2 * elements + 32 * (3 * 4 + 2))
    states = 2 * 32 * 128 * 128 / 64  # of every chunk, and their gradients
    assert saved.working == 4096 * 2 * (10 * 4096 + states)


def test_overlapped_experts_hold_one_layer_more() -> None:
    """Combined 1F1B runs layer by layer against the previous micro batch: no second micro batch, one layer and what the exchange holds."""
    model = catalog.model("qwen3-30b-a3b")
    layout = Layout(dp=8, ep=8, mbs=2, gbs=64)
    estimator = Estimator(model, cluster("h100-sxm", 8), seq_len=4096)
    layer = saved_by_layer(model, model.layers[0], shape_of(layout, 4096, 132))
    assert layer.exchanged == 2 * 2048 * (2 * 4096 * 8)

    def activations(layout: Layout) -> float:
        return estimator.memory(layout).stages[0]["activations"]

    extra = layer.total + 2 * layer.exchanged
    assert activations(layout.replace(overlap_moe=True)) - activations(layout) == pytest.approx(extra)
    assert activations(layout.replace(overlap_moe=True, gbs=16)) == activations(layout.replace(gbs=16))  # one micro batch: nothing to pair
    piped = layout.replace(dp=8, pp=2, vpp=2)  # its additional warm-up is the forward pass 1F1B runs before its first backward
    assert activations(piped.replace(overlap_moe=True)) - activations(piped) == pytest.approx(extra)

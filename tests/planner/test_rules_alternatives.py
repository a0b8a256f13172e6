"""What a finding says to write instead is legal: applying it removes the finding."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import Finding
from shardwise.planner.rules import check_layout
from shardwise.planner.rules.alternatives import closest, legal_tp, natural_cp_comm, nearest
from shardwise.planner.rules.rule import FRAMEWORKS
from shardwise.spec import catalog, grammar
from shardwise.spec.layout import Layout

MODELS = [
    "llama-3.1-70b",
    "llama-3.2-3b",
    "qwen3-30b-a3b",
    "deepseek-v3",
    "gpt-oss-20b",
    "qwen3-next-80b-a3b",
    "nemotron-h-8b",
    "gemma-3-1b",
]


def errors(layout: Layout, model: str, gpus: int, seq_len: int, framework: str = "bridge") -> dict[str, Finding]:
    findings = check_layout(catalog.model(model), layout, catalog.cluster("h100", gpus), seq_len=seq_len, framework=framework)
    return {finding.rule: finding for finding in findings}


def proposals(finding: Finding, field: str) -> list[int]:
    """Values a finding proposes for a field: `tp=2, 4 or 8`."""
    match = re.search(rf"\b{field}=(\d+(?:(?:, | or )\d+)*)", finding.try_)
    return [int(value) for value in re.findall(r"\d+", match[1])] if match else []


@given(model=st.sampled_from(MODELS), tp=st.integers(2, 64), framework=st.sampled_from(FRAMEWORKS))
@settings(max_examples=80)
def test_proposed_tensor_parallel_sizes_are_legal(model: str, tp: int, framework: str) -> None:
    before = errors(Layout(tp=tp, sp=True), model, tp, 8192, framework)
    for rule in {"T1", "T2", "T4", "T17"} & set(before):
        for value in proposals(before[rule], "tp"):
            assert not {"T1", "T2", "T4", "T17"} & set(errors(Layout(tp=value, sp=True), model, value, 8192, framework))


@given(gpus=st.integers(1, 200), tp=st.sampled_from([1, 2, 4, 8]), cp=st.sampled_from([1, 2, 3]), ep=st.sampled_from([1, 2, 8]))
def test_proposed_worlds_tile(gpus: int, tp: int, cp: int, ep: int) -> None:
    layout = Layout(tp=tp, cp=cp, ep=ep, sp=True).with_world(gpus)
    before = errors(layout, "qwen3-30b-a3b", gpus, 12288)
    for rule in {"W1", "W2"} & set(before):
        for world in [int(value) for value in re.findall(r"\d+", before[rule].try_.split(" GPUs")[0])]:
            after = errors(layout.with_world(world), "qwen3-30b-a3b", world, 12288)
            assert not {"W1", "W2"} & set(after)


@given(gbs=st.integers(1, 500), mbs=st.integers(1, 8), dp=st.integers(1, 16))
def test_proposed_batches_divide(gbs: int, mbs: int, dp: int) -> None:
    layout = Layout(gbs=gbs, mbs=mbs, dp=dp)
    before = errors(layout, "llama-3.1-70b", dp, 4096)
    if "B1" in before:
        for name in ("gbs", "mbs"):
            for value in proposals(before["B1"], name):
                assert "B1" not in errors(layout.replace(**{name: value}), "llama-3.1-70b", dp, 4096)


@given(seq=st.integers(1, 20000), tp=st.sampled_from([1, 2, 8]), cp=st.integers(1, 9))
def test_proposed_sequences_split(seq: int, tp: int, cp: int) -> None:
    layout = Layout(tp=tp, cp=cp, sp=tp > 1)
    before = errors(layout, "llama-3.1-70b", tp * cp, seq)
    for rule in {"C1", "T9"} & set(before):
        for value in proposals(before[rule], "seq_len"):
            assert not {"C1", "T9"} & set(errors(layout, "llama-3.1-70b", tp * cp, value))
        for value in proposals(before[rule], "cp"):
            assert "C1" not in errors(layout.replace(cp=value), "llama-3.1-70b", tp * value, seq)


@given(pp=st.integers(2, 24), vpp=st.integers(1, 5), model=st.sampled_from(["llama-3.1-70b", "deepseek-v3", "qwen3-235b-a22b"]))
def test_proposed_stages_split_the_layers(pp: int, vpp: int, model: str) -> None:
    layout = Layout(pp=pp, vpp=vpp, gbs=pp * 4)
    before = errors(layout, model, pp, 4096, "megatron-core")
    if "P2" not in before:
        return
    for name in ("pp", "vpp"):
        for value in proposals(before["P2"], name):
            changed = layout.replace(**{name: value})
            assert "P2" not in errors(changed, model, changed.pp, 4096, "megatron-core")
    text = re.search(r"pipeline_layout='([^']*)'", before["P2"].try_)
    if text:
        explicit = grammar.parse([f"pipeline_layout={text[1]}"], base=layout)
        assert not {"P2", "P13"} & set(errors(explicit, model, pp, 4096, "megatron-core"))


@given(pp=st.integers(2, 9), micro=st.integers(1, 60), group=st.none() | st.integers(1, 20))
def test_proposed_interleaving_fills_the_pipeline(pp: int, micro: int, group: int | None) -> None:
    layout = Layout(pp=pp, vpp=2, gbs=micro, vpp_group=group if micro >= pp else None)
    before = errors(layout, "llama-3.1-70b", pp, 4096)
    if "P7" in before:
        for name in ("gbs", "vpp_group"):
            for value in proposals(before["P7"], name):
                assert "P7" not in errors(layout.replace(**{name: value}), "llama-3.1-70b", pp, 4096)


@given(ep=st.integers(2, 300))
def test_proposed_expert_ranks_divide_the_experts(ep: int) -> None:
    before = errors(Layout(ep=ep).with_world(ep), "qwen3-30b-a3b", ep, 4096)
    if "E2" in before:
        assert all(128 % value == 0 for value in proposals(before["E2"], "ep"))


def test_hundred_and_twenty_eight_experts_on_forty_eight_ranks() -> None:
    finding = errors(Layout(ep=48).with_world(48), "qwen3-30b-a3b", 48, 4096)["E2"]
    assert proposals(finding, "ep") == [8, 16, 32, 64]


@given(model=st.sampled_from([*MODELS, "glm-5.2"]), tp=st.sampled_from([1, 2, 4, 8]), cp=st.sampled_from([2, 4, 8, 16, 32, 128]))
def test_proposed_context_parallel_communication_is_legal(model: str, tp: int, cp: int) -> None:
    layout = Layout(tp=tp, cp=cp, cp_comm="a2a").with_world(tp * cp)
    before = errors(layout, model, tp * cp, 65536)
    for word, sizes in re.findall(r"cp_comm=(\S+?)(?: cp_sizes=(\d+x\d+))?(?:,|$)", before["C5"].try_ if "C5" in before else ""):
        after = errors(layout.replace(cp_comm=word, cp_sizes=tuple(map(int, sizes.split("x"))) if sizes else None), model, tp * cp, 65536)
        assert not {"C5", "C6", "C10", "C11", "C12"} & set(after)


@pytest.mark.parametrize(("model", "tried"), [("gemma-3-27b", "all_gather"), ("glm-5.2", "all_gather"), ("gpt-oss-20b", None)])
def test_no_communication_is_proposed_that_the_attention_forbids(model: str, tried: str | None) -> None:
    found = errors(Layout(cp=128, cp_comm="a2a").with_world(128), model, 128, 65536)["C5"]
    assert re.findall(r"cp_comm=(\S+)", found.try_) == ([tried] if tried else [])


def test_a_large_exchange_may_become_two() -> None:
    found = errors(Layout(tp=4, cp=4, cp_comm="a2a").with_world(16), "llama-3.1-70b", 16, 8192)["C5"]
    assert "cp_comm=a2a+p2p cp_sizes=2x2" in found.try_ and "cp_comm=p2p" in found.try_


def test_nearest() -> None:
    assert nearest([1, 2, 4, 8, 16], 3, 2) == [2, 4]


def test_legal_tensor_parallel_sizes() -> None:
    assert legal_tp(catalog.model("llama-3.1-70b")) == [1, 2, 4, 8, 16, 32, 64]
    assert legal_tp(catalog.model("llama-3.1-70b"), replicate_kv=False) == [1, 2, 4, 8]
    assert legal_tp(catalog.model("qwen2.5-0.5b")) == [1, 2]  # 14 heads, 2 key heads, 4864 = 2^8 * 19
    assert legal_tp(catalog.model("nemotron-h-8b")) == [1, 2, 4, 8]  # 8 groups


@pytest.mark.parametrize("name", catalog.model_names())
def test_natural_context_parallel_communication(name: str) -> None:
    layout = Layout(cp=2, cp_comm=natural_cp_comm(catalog.model(name)))
    assert not {"C5", "C10", "C11", "C12"} & set(errors(layout, name, 2, 2048))


degrees = st.integers(-1, 70)
layouts = st.builds(
    Layout,
    tp=degrees, cp=degrees, dp=degrees, pp=degrees, ep=degrees, etp=degrees, vpp=st.integers(0, 5), sp=st.booleans(),
    mbs=degrees, gbs=st.integers(-1, 5000), cp_comm=st.sampled_from(["p2p", "all_gather", "a2a", "a2a+p2p"]),
    cp_sizes=st.lists(st.integers(1, 8), max_size=2).map(tuple), schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1", "zbv", "dualpipe"]),
    vpp_group=st.none() | degrees, first_stage_layers=st.none() | degrees, last_stage_layers=st.none() | degrees,
    account_for_embedding=st.booleans(), account_for_loss=st.booleans(),
    pipeline_layout=st.none() | st.lists(st.text("EtmL", max_size=4), min_size=1, max_size=8).map(tuple),
    sharding=st.sampled_from(["none", "distributed_optimizer", "zero2", "fsdp2", "megatron_fsdp"]), shard_group=st.none() | degrees,
    precision=st.sampled_from(["fp32", "bf16", "fp8-current", "mxfp8", "nvfp4"]), capacity_factor=st.none() | st.just(1.0),
    pad_to_capacity=st.booleans(), dispatcher=st.sampled_from(["allgather", "alltoall", "deepep", "hybridep"]),
    overlap_moe=st.booleans(), overlap_tp=st.booleans(), cuda_graphs=st.booleans(),
)  # fmt: skip
setting_names = (
    "use_tp_pp_dp_mapping", "seed", "train_iters", "eval_global_batch_size", "rampup_batch_size", "CUDA_DEVICE_MAX_CONNECTIONS",
    "transformer_impl", "batch_invariant_mode", "eval_context_parallel_size", "moe_router_dtype", "megatron_fsdp_version", "NCCL_ALGO",
    "deterministic_mode", "tensor_parallel_num_weight_shards", "order", "packed_sequence_size", "lr_warmup_iters", "dataset.seq_length",
    "pad_seq_to_mult", "cp_comm_type", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
)  # fmt: skip
setting_values = st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.text(max_size=4), st.lists(st.integers(0, 9), max_size=3))


@given(
    layout=layouts,
    model=st.none() | st.sampled_from(MODELS),
    gpus=st.none() | st.integers(1, 4000),
    gpu=st.sampled_from(["h100", "a100", "gb200", "mi300x"]),
    seq_len=st.none() | st.integers(1, 200_000),
    framework=st.sampled_from(FRAMEWORKS),
    options=st.dictionaries(st.sampled_from(setting_names), setting_values, max_size=5),
)
@settings(max_examples=300)
def test_any_layout_is_judged(layout, model, gpus, gpu, seq_len, framework, options) -> None:
    cluster = catalog.cluster(gpu, gpus) if gpus else None
    known = catalog.model(model) if model else None
    findings = check_layout(known, layout, cluster, seq_len=seq_len, framework=framework, settings=options)
    for finding in findings:
        assert finding.given and finding.why and finding.severity in ("error", "warning", "info")


@given(low=st.integers(1, 40), more=st.integers(0, 200), to=st.integers(0, 300), count=st.integers(1, 3), step=st.integers(1, 9))
def test_closest_is_nearest_of_the_legal(low: int, more: int, to: int, count: int, step: int) -> None:
    high = low + more
    legal = [value for value in range(low, high + 1) if value % step in (0, 2)]
    assert closest(lambda value: value % step in (0, 2), low, high, to, count) == nearest(legal, to, count)

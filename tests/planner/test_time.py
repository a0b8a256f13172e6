"""Step-time prediction: closed forms against simulation, tile quantisation, placement of groups, and that pieces do not leak."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.planner import comm, step_time
from shardwise.planner.estimator import Estimator, estimate_step_time
from shardwise.planner.kernels import grouped_flops, matmul_flops, matmul_utilisation
from shardwise.planner.layer_work import mean_keys
from shardwise.planner.rates import CEILING, LINE_RATE, efficiency, profile, profile_names, rates
from shardwise.spec.blocks import Attention, Layer, Mlp, Moe
from shardwise.spec.catalog import cluster
from shardwise.spec.layout import Layout, Recompute
from shardwise.spec.model import ModelSpec
from shardwise.spec.schedules import StageTimes, makespan

DENSE = Layer(mixer=Attention(heads=32, kv_heads=8, head_dim=128), mlp=Mlp(ffn=14336))
SPARSE = Layer(mixer=Attention(heads=32, kv_heads=4, head_dim=128), mlp=Moe(experts=64, top_k=8, ffn=1024))
LLAMA_8B = ModelSpec(name="llama", hidden=4096, vocab=128256, layers=(DENSE,) * 32)
MOE = ModelSpec(name="moe", hidden=4096, vocab=128256, layers=(DENSE, *((SPARSE,) * 31)))
LINKS = comm.Links(near=400e9, far=40e9, near_latency=0.0, far_latency=0.0)


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.tuples(st.floats(0.5, 3), st.floats(1, 5)), min_size=1, max_size=6),
    extra=st.integers(0, 20),
)
def test_plain_pipeline_follows_its_action_list(costs: list[tuple[float, float]], extra: int) -> None:
    """1F1B with unequal stages and m >= p: one pass and m - 1 times the slowest stage is within a fifth of what the list takes."""
    pp = len(costs)
    micro = pp + extra
    layout = Layout(pp=pp, gbs=micro)
    busy, bubble, sends = step_time.pipeline_seconds(layout, costs, 0.0)
    times = [StageTimes(forward=forward, input_grad=backward, weight_grad=0.0) for forward, backward in costs]
    simulated = makespan(layout, times)
    assert sends == 0
    assert 0.8 * simulated <= busy + bubble <= 1.25 * simulated


@pytest.mark.parametrize(("pp", "vpp", "micro"), [(2, 1, 8), (4, 1, 16), (4, 2, 8), (4, 3, 16), (8, 4, 32)])
def test_equal_stages_equal_their_action_list(pp: int, vpp: int, micro: int) -> None:
    layout = Layout(pp=pp, vpp=vpp, gbs=micro)
    busy, bubble, _ = step_time.pipeline_seconds(layout, [(vpp * 1.0, vpp * 2.0)] * pp, 0.0)
    times = [StageTimes(forward=1.0, input_grad=2.0, weight_grad=0.0)] * (pp * vpp)
    assert busy + bubble == pytest.approx(makespan(layout, times))
    assert bubble / busy == pytest.approx((pp - 1) / (vpp * micro))


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zbv", "dualpipev"])
def test_zero_bubble_schedules_are_faster_than_1f1b(schedule: str) -> None:
    vpp = 2 if schedule in ("zbv", "dualpipev") else 1
    layout = Layout(tp=8, pp=8, dp=1, gbs=16, sp=True, vpp=vpp, schedule=schedule)  # type: ignore[arg-type]
    estimator = Estimator(LLAMA_8B, cluster("h100-sxm", 64), seq_len=8192)
    plain = estimator.step_time(layout.replace(vpp=1, schedule="1f1b"))
    assert estimator.step_time(layout).terms["bubble"] < plain.terms["bubble"]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=8, gbs=64),
        Layout(tp=2, pp=2, dp=2, sp=True, vpp=4, gbs=16),
        Layout(cp=4, dp=2, gbs=8),
        Layout(dp=8, gbs=8, sharding="fsdp2", recompute=Recompute(granularity="full", method="uniform", num_layers=1)),
        Layout(pp=4, dp=2, gbs=32, schedule="zb-h1"),
        Layout(pp=4, dp=2, gbs=32, schedule="dualpipe"),
        Layout(dp=8, ep=8, gbs=16, precision="mxfp8"),
    ],
)
def test_terms_add_up(layout: Layout) -> None:
    model = MOE if layout.ep > 1 else LLAMA_8B
    found = estimate_step_time(model, layout, cluster("b200", 8), seq_len=4096)
    assert sum(found.terms.values()) == pytest.approx(found.seconds)
    assert all(value >= 0 for value in found.terms.values())
    assert found.tokens_per_s_per_gpu == pytest.approx(layout.gbs * 4096 / 8 / found.seconds)
    assert 0 < found.mfu < 1


def test_waves_of_tiles() -> None:
    """132 tiles of 128 x 256 fill an H100 once; one more row of tiles starts a second wave that is nearly empty."""
    full = matmul_utilisation(128 * 132, 256, 8192, 132)
    over = matmul_utilisation(128 * 132 + 1, 256, 8192, 132)
    assert full == pytest.approx(8192 / (8192 + 192))
    assert over < 0.65 * full
    assert matmul_utilisation(8192, 8192, 8192, 132) > matmul_utilisation(8192, 8192, 256, 132)
    assert matmul_flops(4096, 4096, 4096, 132) >= 2 * 4096**3


def test_few_tokens_per_expert_waste_their_tiles() -> None:
    wide = grouped_flops(16 * 1024, 2048, 2048, 16, 132)[0]
    narrow = grouped_flops(16 * 1024, 2048, 2048, 512, 132)[0]
    assert narrow > 1.5 * wide


@pytest.mark.parametrize(("seq", "window", "keys"), [(8, None, 4), (8, 16, 4), (8192, 128, 127)])
def test_mean_keys(seq: int, window: int | None, keys: float) -> None:
    assert mean_keys(seq, window) == pytest.approx(keys, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "stride", "found"),
    [(8, 1, (8, 1)), (16, 1, (8, 2)), (4, 8, (1, 4)), (4, 2, (4, 1)), (8, 4, (2, 4)), (3, 4, (1, 3)), (6, 2, (3, 2))],
)
def test_where_a_group_lands(size: int, stride: int, found: tuple[int, int]) -> None:
    """On nodes of 8: ranks of the group inside one node, and nodes."""
    assert comm.placement(size, stride, 8) == found


def test_groups_that_run_at_once_share_the_network_cards() -> None:
    """Data parallel groups of 16 over two nodes: with tensor parallel 8 every rank uses its own card, alone a group uses all eight."""
    alone = comm.gather_seconds(8e9, 16, 1, 8, LINKS)
    shared = comm.gather_seconds(8e9, 2, 8, 8, LINKS)
    assert alone == pytest.approx(8e9 / 2 / (40e9 * 8), rel=0.6)
    assert shared == pytest.approx(8e9 / 2 / 40e9)
    assert comm.reduce_seconds(8e9, 2, 8, 8, LINKS) == 2 * shared


def test_sending_once_per_node_saves_network_traffic() -> None:
    plain = comm.exchange_seconds(1e9, 64, 1, 8, LINKS)
    once = comm.exchange_seconds(1e9, 64, 1, 8, LINKS, reached=8 * (1 - (7 / 8) ** 8) / 8)
    assert once / plain == pytest.approx(0.656, abs=0.01)


def test_crossing_the_node_slows_tensor_parallel() -> None:
    inside = estimate_step_time(LLAMA_8B, Layout(tp=8, dp=2, sp=True, gbs=16), cluster("h100-sxm", 16), seq_len=8192)
    across = estimate_step_time(LLAMA_8B, Layout(tp=8, dp=2, sp=True, gbs=16), cluster("h100-sxm", 16, gpus_per_node=1), seq_len=8192)
    assert across.terms["tp"] > 3 * inside.terms["tp"]


def test_small_kernels_are_bound_by_the_host() -> None:
    """Tiny layers take the time to launch their kernels, whatever the GPU could do; CUDA graphs shorten it."""
    block = Layer(mixer=Attention(heads=8, kv_heads=8, head_dim=64), mlp=Mlp(ffn=2048))
    tiny = ModelSpec(name="tiny", hidden=512, vocab=1024, layers=(block,) * 12)
    eager = estimate_step_time(tiny, Layout(gbs=1), cluster("h100-sxm", 1), seq_len=512)
    graphed = estimate_step_time(tiny, Layout(gbs=1, cuda_graphs=True), cluster("h100-sxm", 1), seq_len=512)
    assert eager.terms["host"] > eager.terms["matmul"]
    assert graphed.seconds < eager.seconds


def test_fsdp_gathers_every_micro_batch() -> None:
    fsdp = Layout(dp=64, sharding="fsdp2", gbs=64)
    estimator = Estimator(LLAMA_8B, cluster("a100-80gb", 64), seq_len=512)
    once, twice = estimator.step_time(fsdp), estimator.step_time(fsdp.replace(gbs=128))
    assert twice.terms["fsdp"] == pytest.approx(2 * once.terms["fsdp"])
    kept = estimator.step_time(fsdp.replace(reshard_after_forward=False))
    assert kept.terms["fsdp"] < once.terms["fsdp"]


def test_recompute_costs_time() -> None:
    estimator = Estimator(LLAMA_8B, cluster("h100-sxm", 8), seq_len=8192)
    full = Recompute(granularity="full", method="uniform", num_layers=1)
    ratio = estimator.step_time(Layout(dp=8, gbs=64, recompute=full)).seconds / estimator.step_time(Layout(dp=8, gbs=64)).seconds
    assert 1.2 < ratio < 1.4  # one more forward on top of forward and backward


def test_an_estimator_gives_what_a_fresh_one_gives() -> None:
    """Shared pieces never leak from one layout into another."""
    full = Recompute(granularity="full", method="uniform", num_layers=1)
    layouts = [
        Layout(
            tp=tp,
            sp=tp > 1,
            pp=pp,
            dp=32 // tp // pp,
            vpp=vpp,
            ep=ep,
            mbs=mbs,
            gbs=64,
            recompute=recompute,
            sharding=sharding,  # type: ignore[arg-type]
        )
        for tp in (1, 2)
        for pp, vpp in ((1, 1), (4, 1), (4, 2))
        for ep in (1, 4)
        for mbs in (1, 2)
        for recompute in (Recompute(), full, Recompute(granularity="selective", modules=("moe_act",)))
        for sharding in ("distributed_optimizer", "fsdp2")
    ]
    shared = Estimator(MOE, cluster("h100-sxm", 32), seq_len=4096)
    for layout in layouts:
        fresh = Estimator(MOE, cluster("h100-sxm", 32), seq_len=4096)
        assert shared.step_time(layout) == fresh.step_time(layout)
        assert shared.memory(layout) == fresh.memory(layout)


def test_an_unknown_release_takes_its_framework_and_an_unknown_gpu_its_architecture() -> None:
    known = profile("megatron-bridge")
    assert profile("megatron-bridge/99.99").speed == known.speed
    assert profile("nobody-knows").speed == efficiency()["profile"]["default"]["speed"]
    ada = rates(cluster("l40s", 8), "bf16", known)
    assert ada.memory == pytest.approx(cluster("l40s", 8).gpu.bandwidth * efficiency()["gpu"]["default"]["memory"] * known.speed)
    share = min(CEILING, efficiency()["gpu"]["default"]["matmul_bf16"] * known.speed)
    assert ada.matmul == pytest.approx(cluster("l40s", 8).gpu.peak("bf16") * share)


def test_hybrid_sharding_adds_a_sum_over_the_copies() -> None:
    """HSDP on four nodes of 8 gathers as FSDP on one node does, and then sums shards of gradients over the nodes."""
    hybrid = Layout(dp=32, sharding="fsdp2", shard_group=8, gbs=32)
    many = Estimator(LLAMA_8B, cluster("a100-80gb", 32, interconnect="infiniband-100"), seq_len=512)
    one = Estimator(LLAMA_8B, cluster("a100-80gb", 8), seq_len=512)
    alone = Layout(dp=8, sharding="fsdp2", gbs=8)
    assert many.step_time(hybrid).terms["fsdp"] > one.step_time(alone).terms["fsdp"]
    assert many.memory(hybrid).allocated_gib == one.memory(alone).allocated_gib
    assert many.memory(hybrid).allocated_gib > many.memory(hybrid.replace(shard_group=None)).allocated_gib


def test_no_stack_multiplies_faster_than_power_limits_allow() -> None:
    """Dense and expert products alike, whatever was fitted: what is above is work that a count misses."""
    for name in profile_names():
        for gpu in ("a100-80gb", "h100-sxm", "gb200", "b300"):
            for precision in ("bf16", "fp8-current", "nvfp4"):
                node = cluster(gpu, 8)
                rate = rates(node, precision, profile(name))
                assert 0 < rate.grouped <= rate.matmul <= CEILING * node.gpu.peak(precision), (name, gpu, precision)


def test_no_stack_sends_faster_than_its_network() -> None:
    for name in profile_names():
        for gpu in ("a100-80gb", "h100-sxm", "gb200", "b300"):
            pair = cluster(gpu, 1024)
            rate = rates(pair, "bf16", profile(name))
            assert 0 < rate.exchange.far < rate.links.far <= LINE_RATE * pair.network_bandwidth, (name, gpu)
            assert rate.exchange.near == rate.links.near

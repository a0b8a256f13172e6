"""The search: its bounds bound, it finds what trying everything finds, its plans are legal, fit, and use every GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.planner.bounds import Bounds
from shardwise.planner.certificate import certify, worlds
from shardwise.planner.estimator import Estimator
from shardwise.planner.memory import GIB
from shardwise.planner.rules import check_layout
from shardwise.planner.search import FRONT_STEP, balanced, degrees, lightest_plan, search, variants
from shardwise.planner.space import Group, Space, groups, space_of, virtual_stages
from shardwise.spec.blocks import Attention, Layer, Mlp, Moe
from shardwise.spec.catalog import cluster, model
from shardwise.spec.layout import Layout, Recompute
from shardwise.spec.model import ModelSpec

ATTENTION = Attention(heads=16, kv_heads=4, head_dim=128)
DENSE = Layer(mixer=ATTENTION, mlp=Mlp(ffn=8192))
EXPERTS = Layer(mixer=ATTENTION, mlp=Moe(experts=16, top_k=2, ffn=2048))
FULL = Recompute(granularity="full", method="uniform", num_layers=1)
NONE = Recompute()
MODULES = {"dense": (DENSE,) * 22, "moe": (DENSE, *(EXPERTS,) * 13)}


def small(kind: str, mtp: bool = False) -> ModelSpec:
    return ModelSpec(name=kind, hidden=2048, vocab=32000, layers=MODULES[kind], mtp=(MODULES[kind][-1],) if mtp else ())


def small_space(**changes: object) -> Space:
    values: dict[str, object] = {
        "tp": (1, 2, 4),
        "cp": (1, 2),
        "pp": (1, 2, 4, 8),
        "vpp": None,
        "ep": (1, 4),
        "etp": (1,),
        "mbs": (1, 2),
        "recompute": (NONE, Recompute(granularity="selective", modules=("layernorm",)), FULL),
        "sharding": ("distributed_optimizer", "fsdp2"),
    }
    return Space(**{**values, **changes})  # type: ignore[arg-type]


def estimator_of(spec: ModelSpec, gpus: int = 16, gpu: str = "rtx4090", seq_len: int = 4096) -> Estimator:
    return Estimator(spec, cluster(gpu, gpus), seq_len=seq_len)


def judge_of(estimator: Estimator) -> Callable[[Layout], tuple]:  # type: ignore[type-arg]
    return lambda layout: check_layout(estimator.model, layout, estimator.cluster, seq_len=estimator.seq_len, framework="shardwise")


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("mtp", [False, True])
def test_nothing_is_below_the_bounds(kind: str, mtp: bool) -> None:
    estimator = estimator_of(small(kind, mtp))
    bounds = Bounds(estimator)
    for group in groups(small_space(), estimator.model, 16, Layout(gbs=64), seq_len=4096):
        for part in group.parts():
            assert isinstance(part, Group)
            assert bounds.seconds(group) <= bounds.seconds(part) * (1 + 1e-9) and bounds.bytes(group) <= bounds.bytes(part) * (1 + 1e-9)
            for member in part.parts():
                assert isinstance(member, Layout)
                seconds, least = bounds.seconds(member), bounds.bytes(member)
                assert bounds.seconds(part) <= seconds * (1 + 1e-9) and bounds.bytes(part) <= least * (1 + 1e-9)
                for layout, memory in variants(bounds, member, uneven=True):
                    assert seconds <= estimator.step_time(layout).seconds * (1 + 1e-9), layout
                    assert least <= memory.allocated_gib * GIB * (1 + 1e-9), layout


def brute_force(estimator: Estimator, space: Space, base: Layout) -> dict[tuple[object, ...], tuple[float, float]]:
    """Fastest step time of every set of degrees, and the least memory of all that fits."""
    bounds, judge = Bounds(estimator), judge_of(estimator)
    best: dict[tuple[object, ...], tuple[float, float]] = {}
    for group in groups(space, estimator.model, estimator.cluster.gpus, base, seq_len=estimator.seq_len):
        for member in group.members():
            for layout, memory in variants(bounds, member, uneven=True):
                if memory.fits and not any(finding.severity == "error" for finding in judge(layout)):
                    seconds, least = best.get(degrees(layout), (float("inf"), float("inf")))
                    best[degrees(layout)] = (min(seconds, estimator.step_time(layout).seconds), min(least, memory.allocated_gib))
    return best


@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(["dense", "moe"]),
    gpus=st.sampled_from([8, 12, 16]),
    gpu=st.sampled_from(["rtx4090", "a100-40gb", "h100-sxm"]),
    seq_len=st.sampled_from([2048, 8192, 16384]),
    gbs=st.sampled_from([24, 48, 96]),
)
def test_pruned_search_finds_what_trying_everything_finds(kind: str, gpus: int, gpu: str, seq_len: int, gbs: int) -> None:
    estimator, space, base = estimator_of(small(kind), gpus, gpu, seq_len), small_space(pp=(1, 2, 4), mbs=(1, 2)), Layout(gbs=gbs)
    expected = brute_force(estimator, space, base)
    result = search(estimator, base, space, judge=judge_of(estimator), top=4)
    assert [plan.time.seconds for plan in result.plans] == pytest.approx(sorted(seconds for seconds, _ in expected.values())[:4])
    assert sum(result.rejected.values()) >= 0 and result.considered > 0
    if not expected:
        assert result.nearest is not None and not result.nearest.memory.fits


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_plans_are_legal_fit_and_use_every_gpu(kind: str) -> None:
    estimator = estimator_of(small(kind), 16)
    space = space_of(estimator.model, estimator.cluster, Layout(gbs=64), seq_len=4096, framework="shardwise")
    result = search(estimator, Layout(gbs=64), space, judge=judge_of(estimator), top=6)
    assert len(result.plans) == 6 and len({degrees(plan.layout) for plan in result.plans}) == 6
    times = [plan.time.seconds for plan in result.plans]
    assert times == sorted(times)
    for plan in result.plans:
        assert plan.layout.world == 16 and plan.layout.gbs == 64 and plan.memory.fits
        assert plan.memory.needed_gib <= plan.memory.capacity_gib and plan.memory.reserved_gib <= plan.memory.capacity_gib
        assert not any(finding.severity == "error" for finding in judge_of(estimator)(plan.layout))
    memories = [plan.memory.allocated_gib for plan in result.front]
    assert result.front[0].time.seconds == times[0]
    assert all(later <= FRONT_STEP * earlier for earlier, later in pairwise(memories))


def test_lightest_plan_is_the_lightest_of_all() -> None:
    estimator, space, base = estimator_of(small("moe"), 8, "rtx4090"), small_space(pp=(1, 2, 4)), Layout(gbs=16)
    judge, bounds = judge_of(estimator), Bounds(estimator)
    least = min(
        memory.allocated_gib
        for group in groups(space, estimator.model, 8, base, seq_len=4096)
        for member in group.members()
        for layout, memory in variants(bounds, member, uneven=True)
        if not any(finding.severity == "error" for finding in judge(layout))
    )
    found = lightest_plan(estimator, base, space, judge=judge)
    assert found is not None and found.memory.allocated_gib == pytest.approx(least)


def test_uneven_stages_are_faster_than_even_ones_when_the_head_is_heavy() -> None:
    spec = ModelSpec(name="wide", hidden=1024, vocab=256000, layers=(DENSE,) * 24)
    estimator = estimator_of(spec, 8, "h100-sxm")
    even = Layout(pp=8, dp=1, gbs=32)
    cut = balanced(estimator, even)
    assert cut is not None and cut.pipeline_layout is not None
    counts = [word.count("t") for word in cut.pipeline_layout]
    assert sum(counts) == 24 and counts[-1] < 3
    assert estimator.step_time(cut).seconds < estimator.step_time(even).seconds


def test_virtual_stages_hold_all_layers() -> None:
    deep = small("dense")
    for pp in (2, 4, 8):
        assert all(vpp == 1 or pp * vpp <= deep.num_layers + 2 for vpp in virtual_stages(deep, pp))
    assert virtual_stages(deep, 1) == (1,)


def test_certificate_names_what_binds_in_every_smaller_world() -> None:
    spec = model("llama-3.1-8b")
    certificate = certify(
        spec,
        lambda size: cluster("rtx4090", size),
        Layout(),
        seq_len=8192,
        framework="shardwise",
        stack="torchtitan",
        judge_of=lambda on: lambda layout: check_layout(spec, layout, on, seq_len=8192, framework="shardwise"),
        limit=64,
    )
    assert certificate.min_gpus is not None and certificate.plan is not None and certificate.plan.memory.fits
    smaller = certificate.worlds[:-1]
    assert [world.gpus for world in smaller] == [size for size in worlds(8, 64) if size < certificate.min_gpus]
    assert all(not world.fits and world.constraint and world.least_gib > certificate.capacity_gib for world in smaller)
    state = spec.total_params * 16 / certificate.min_gpus / GIB  # 4 weights, 4 gradients, 8 moments, all sharded
    assert certificate.worlds[-1].least_gib > state


def test_the_full_space_of_a_large_model_keeps_to_the_fast_domain() -> None:
    spec, on = model("llama-3.1-405b"), cluster("h100-sxm", 1024)
    space = space_of(spec, on, Layout(gbs=2048), seq_len=8192, framework="bridge")
    assert space.tp == (1, 2, 4, 8) and space.cp == (1, 2, 4, 8) and max(space.pp) <= 126

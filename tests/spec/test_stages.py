from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.spec import pipeline_layout, stages
from shardwise.spec.blocks import Attention, Layer, Mlp
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec

LAYER = Layer(mixer=Attention(heads=32, kv_heads=8, head_dim=128), mlp=Mlp(ffn=14336))
LLAMA3_8B = ModelSpec(name="llama-3-8b", hidden=4096, vocab=128256, layers=(LAYER,) * 32)


def counts(layout: Layout, layers: int) -> list[int]:
    return [len(stage.layers) for stage in stages.split(layout, layers)]


def test_thirty_layers_on_four_stages() -> None:  # Megatron-LM#1304 trained 28 of them
    even = counts(Layout(pp=4), 30)
    assert sum(even) == 30 and max(even) - min(even) <= 1
    assert counts(Layout(pp=4, account_for_embedding=True, account_for_loss=True), 30) == [7, 8, 8, 7]


def test_ten_layers_on_three_stages() -> None:
    assert sorted(counts(Layout(pp=3), 10)) == [3, 3, 4]


def test_pinned_last_stage() -> None:
    assert counts(Layout(pp=4, last_stage_layers=13), 61) == [16, 16, 16, 13]


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(pp=4, first_stage_layers=40, last_stage_layers=30), r"40 \+ 30 = 70 leave -9 of 61"),
        (Layout(pp=2, first_stage_layers=30, last_stage_layers=30), r"30 \+ 30 = 60 leave 1 of 61 layers for 0 other stages"),
        (Layout(pp=3, first_stage_layers=30, last_stage_layers=31), r"leave 0 of 61 layers for 1 other stages"),
        (Layout(pp=4, last_stage_layers=0), "at least one layer"),
        (Layout(pp=64), "64 stages are more than the layers"),
        (Layout(pp=10**6, vpp=10**6), "1000000000000 stages are more than the layers"),
        (Layout(pp=2, vpp=10**12, first_stage_layers=1), "2000000000000 stages are more than the layers"),
    ],
)
def test_impossible_splits_are_refused(layout: Layout, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        stages.split(layout, 61)


def test_ends_may_have_no_layer() -> None:
    assert counts(Layout(pp=16, vpp=8), 126) == [0, *[1] * 126, 0]  # Llama-3.1-405B in Megatron Bridge, 128 stages
    assert counts(Layout(pp=4), 3) == [1, 1, 1, 0]


def test_interleaved_stages_follow_megatron() -> None:
    # stage r, virtual v starts at v * (L / VP) + r * (L / (PP * VP))
    found = stages.split(Layout(pp=4, vpp=2), 16)
    for stage in found:
        virtual = stage.index // 4
        assert stage.rank == stage.index % 4
        assert stage.layers.start == virtual * 8 + stage.rank * 2


def test_v_schedules_fold_back() -> None:
    assert [stage.rank for stage in stages.split(Layout(pp=4, vpp=2, schedule="zbv"), 16)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_explicit_layout() -> None:
    words = pipeline_layout.parse("Et*4|(t*7|)*5t*8|tmL")
    layout = Layout(pp=8, pipeline_layout=words)
    found = stages.split(layout, 48)
    assert [len(stage.layers) for stage in found] == [4, 7, 7, 7, 7, 7, 8, 1]
    assert [stage.embedding for stage in found] == [True] + [False] * 7
    assert (found[-1].head, found[-1].mtp) == (True, 1)
    with pytest.raises(LayoutError, match="place every layer once"):
        stages.split(layout, 47)


@pytest.mark.parametrize("text", ["Et(t", "Et)t", "Et*|L", "Ex|L", "t*0", "t*9999999", "(" * 51, "((t*99999)*9999)*9", "t*٣"])
def test_bad_pipeline_text(text: str) -> None:
    with pytest.raises(LayoutError, match="P14"):
        pipeline_layout.parse(text)


@given(st.lists(st.text("EtmL", max_size=5), min_size=1, max_size=8))
def test_pipeline_text_round_trip(words: list[str]) -> None:
    assert pipeline_layout.parse(pipeline_layout.unparse(words)) == tuple(words)


@given(st.text("EtmL|()*0123456789,x ", max_size=30))
def test_pipeline_text_never_breaks(text: str) -> None:
    with contextlib.suppress(LayoutError):
        pipeline_layout.parse(text)


@given(
    layers=st.integers(1, 130),
    pp=st.integers(1, 16),
    vpp=st.integers(1, 4),
    first=st.none() | st.integers(0, 40),
    last=st.none() | st.integers(0, 40),
    embedding=st.booleans(),
    loss=st.booleans(),
    schedule=st.sampled_from(["1f1b", "zbv"]),
)
def test_every_layer_once(layers, pp, vpp, first, last, embedding, loss, schedule) -> None:
    if schedule == "zbv":
        vpp = 2
    layout = Layout(
        pp=pp,
        vpp=vpp,
        first_stage_layers=first,
        last_stage_layers=last,
        account_for_embedding=embedding,
        account_for_loss=loss,
        schedule=schedule,
    )
    try:
        found = stages.split(layout, layers)
    except LayoutError:
        return
    assert [layer for stage in found for layer in stage.layers] == list(range(layers))
    assert len(found) == pp * vpp
    assert sum(stage.embedding for stage in found) == sum(stage.head for stage in found) == 1


def heaviest(*split: int) -> float:
    layout = Layout(pp=4, pipeline_layout=pipeline_layout.from_counts(split))
    return max(params.total for params in stages.rank_params(LLAMA3_8B, layout)) / 1e6


def test_heaviest_stage_is_not_the_average() -> None:  # Megatron-Bridge PR#5077
    assert LLAMA3_8B.layer_params(LAYER).total == 218_112_000
    assert LLAMA3_8B.embedding_params == 525_336_576
    even, uneven = heaviest(8, 8, 8, 8), heaviest(7, 9, 9, 7)
    assert even == pytest.approx(2270.2, abs=0.05)
    assert uneven == pytest.approx(2052.1, abs=0.05)
    average = LLAMA3_8B.total_params / 4 / 1e6
    assert average == pytest.approx(2007.6, abs=0.05)
    assert even / average == pytest.approx(1.13, abs=0.005)
    middle = stages.rank_params(LLAMA3_8B, Layout(pp=4))[1].total / 1e6
    assert even / middle == pytest.approx(1.30, abs=0.005)


def test_parts_add_up() -> None:
    for layout in (Layout(pp=1), Layout(pp=4), Layout(pp=4, vpp=2)):
        assert sum(params.total for params in stages.rank_params(LLAMA3_8B, layout)) == LLAMA3_8B.total_params
    tied = ModelSpec(name="tied", hidden=4096, vocab=128256, layers=(LAYER,) * 4, tied=True)
    assert stages.rank_params(tied, Layout())[0].total == tied.total_params
    assert sum(params.total for params in stages.rank_params(tied, Layout(pp=2))) == tied.total_params + tied.embedding_params


def test_tensor_parallel_replicates_few_kv_heads() -> None:
    whole = LLAMA3_8B.layer_params(LAYER).dense
    split_layer = 2 * 4096
    kv = 2 * 8 * 128 * 4096
    assert LLAMA3_8B.layer_params(LAYER, tp=8).dense == (whole - split_layer) // 8 + split_layer
    assert LLAMA3_8B.layer_params(LAYER, tp=16).dense == (whole - split_layer - kv) // 16 + split_layer + kv // 8


def test_bidirectional_schedule_holds_two_stages() -> None:
    held = stages.rank_params(LLAMA3_8B, Layout(pp=4, schedule="dualpipe"))
    assert held[0] == held[3]
    assert sum(params.total for params in held) == 2 * LLAMA3_8B.total_params

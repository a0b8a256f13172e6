"""Parts of attention and of layers that only some families have: what they save, and which work they add."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.planner.activations import saved_by_layer
from shardwise.planner.layer_work import BF16, Shape, layer_work, shape_of
from shardwise.spec.blocks import Attention, Indexer, Layer, Mlp
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec

SEQ = 8192
FULL = Attention(heads=32, kv_heads=8, head_dim=128, qk_norm="head")


def layer(mixer: Attention, **options: int) -> Layer:
    return Layer(mixer=mixer, mlp=Mlp(ffn=8192), **options)


def model(each: Layer) -> ModelSpec:
    return ModelSpec(name="m", hidden=2048, vocab=32000, layers=(each,) * 2, input_vocab=32000)


def shape(seq: int = SEQ, **degrees: int) -> Shape:
    return shape_of(Layout(sp=False, **degrees), seq, 132)


def saved(each: Layer, **degrees: int) -> float:
    return saved_by_layer(model(each), each, shape(**degrees)).total


def parts(mixer: Attention, seq: int = SEQ) -> dict[str, float]:
    each = layer(mixer)
    return {part.name: part.forward.attention for part in layer_work(model(each), each, shape(seq)).parts}


@pytest.mark.parametrize("tp", [1, 2])
def test_keys_of_an_earlier_layer_are_not_saved_again(tp: int) -> None:
    borrowed = replace(FULL, own_kv=False)
    keys = BF16 * SEQ * FULL.kv_heads * FULL.head_dim / tp
    assert saved(layer(FULL), tp=tp) - saved(layer(borrowed), tp=tp) == 3 * keys  # keys before and after their norm, and values
    assert parts(borrowed)["core_attn"] == parts(FULL)["core_attn"]


def test_a_gate_per_head_keeps_the_output_before_it() -> None:
    gated = replace(FULL, head_gate=True)
    assert saved(layer(gated)) - saved(layer(FULL)) == BF16 * SEQ * FULL.heads * (FULL.head_dim + 1)
    assert FULL.params(2048).total + 2048 * FULL.heads == gated.params(2048).total


def test_sparse_attention_reads_the_selected_keys() -> None:
    sparse = replace(FULL, indexer=Indexer(heads=4, head_dim=128, top_k=1024, params=0))
    assert parts(sparse)["core_attn"] == parts(replace(FULL, window=1024))["core_attn"] < parts(FULL)["core_attn"]
    assert 0 < parts(sparse)["indexer"] < parts(FULL)["core_attn"]
    assert parts(sparse, seq=1024) == parts(FULL, seq=1024)  # everything is selected


def test_an_embedding_of_the_layer_is_saved_and_takes_time() -> None:
    plain, mixed = layer(FULL), layer(FULL, input_width=256)
    inputs = BF16 * SEQ * (2048 + 256)  # of its two matrices
    assert inputs < saved(mixed) - saved(plain) < 3 * inputs
    work = {each.input_width: layer_work(model(each), each, shape()).forward().matmul for each in (plain, mixed)}
    assert work[256] - work[0] >= 3 * 2 * SEQ * 2048 * 256

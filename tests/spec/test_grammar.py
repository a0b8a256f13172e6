from __future__ import annotations

import contextlib
from dataclasses import fields
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.spec import grammar
from shardwise.spec import layout as spec
from shardwise.spec.layout import Layout, Offload, Recompute


def test_short_words() -> None:
    layout = grammar.parse(
        ["tp=4", "pp=2", "vpp=1", "cp=1", "ep=8", "etp=1", "sp=true", "mbs=1", "gbs=512", "recompute=selective"], world=32
    )
    assert layout == Layout(tp=4, pp=2, ep=8, sp=True, gbs=512, dp=4, recompute=Recompute(granularity="selective", modules=("core_attn",)))


@pytest.mark.parametrize(
    "word",
    ["tp=2", "tensor_model_parallel_size=2", "--tensor-model-parallel-size=2", "model.tensor_model_parallel_size=2",
     "++model.transformer.tensor_model_parallel_size=2", "TP=2", "tp='2'"],
)  # fmt: skip
def test_every_spelling(word: str) -> None:
    assert grammar.parse([word]).tp == 2


def test_defaults_follow() -> None:
    assert grammar.parse(["tp=2", "ep=8"]).world == 8  # the smallest world
    assert grammar.parse(["tp=2", "mbs=2"], world=16).gbs == 16
    assert grammar.parse(["pp=2", "pipeline_layout=Et*2|t*2|t*2|t*2L"]).vpp == 2
    assert grammar.parse(["virtual_pipeline_model_parallel_size=null", "expert_tensor_parallel_size=None"]) == grammar.parse([])
    base = Layout(tp=2, dp=4, gbs=64)
    assert grammar.parse(["mbs=2"], base=base) == base.replace(mbs=2)


def test_all_problems_at_once_with_the_nearest_name() -> None:
    with pytest.raises(LayoutError) as caught:
        grammar.parse(
            ["tpp=4", "pp=0", "sp=maybe", "cp", "cp_comm=a2a+p2", "ep=-2", "recompute=selective:mpl", "mbs=1", "mbs=2", "etp=2.5"]
        )
    findings = caught.value.findings
    assert [finding.rule for finding in findings] == ["G2", "W4", "G4", "G1", "G4", "W4", "G4", "G3", "W4"]
    assert "tp" in findings[0].try_ and "a2a+p2p" in findings[4].try_ and "mlp for mpl" in findings[6].try_


def test_hybrid_sharding_says_its_groups() -> None:
    with pytest.raises(LayoutError, match="shard_group=8"):
        grammar.parse(["sharding=hsdp"])
    layout = grammar.parse(["sharding=hsdp", "shard_group=4"], world=16)
    assert (layout.sharding, layout.shard_size) == ("fsdp2", 4)


choices = {
    "cp_comm": spec.CpComm, "schedule": spec.Schedule, "sharding": spec.Sharding, "precision": spec.Precision,
    "param_dtype": spec.Dtype, "grad_dtype": spec.Dtype, "moment_dtype": spec.Dtype, "dispatcher": spec.Dispatcher,
    "cross_entropy": spec.CrossEntropy, "attention": spec.AttentionKernel, "optimizer": spec.Optimizer,
}  # fmt: skip
count = st.integers(1, 10**6)
recomputes = st.one_of(
    st.just(Recompute()),
    st.lists(st.sampled_from(grammar.RECOMPUTE_MODULES), min_size=1, max_size=3).map(
        lambda modules: Recompute(granularity="selective", modules=tuple(modules))
    ),
    st.builds(Recompute, granularity=st.just("full"), method=st.sampled_from(["uniform", "block"]), num_layers=st.integers(1, 99)),
)
offloads = st.builds(
    Offload,
    optimizer=st.sampled_from([0.0, 0.25, 1.0]),
    activation_layers=st.integers(0, 99),
    activation_modules=st.lists(st.sampled_from(["core_attn", "moe_act"]), max_size=2).map(tuple),
)
special = {
    "cp_sizes": st.lists(count, max_size=2).map(tuple),
    "recompute": recomputes,
    "offload": offloads,
    "pipeline_layout": st.none() | st.lists(st.text("EtmL", max_size=4), min_size=1, max_size=4).map(tuple),
    "capacity_factor": st.none() | st.sampled_from([1.0, 1.25, 2.0]),
    "master_dtype": st.none() | st.sampled_from(get_args(spec.Dtype)),
    "peft": st.none() | st.sampled_from(get_args(spec.Peft)),
}


def strategy(name: str, default: object) -> st.SearchStrategy:
    if name in special:
        return special[name]
    if name in choices:
        return st.sampled_from(get_args(choices[name]))
    if isinstance(default, bool):
        return st.booleans()
    return count if default is not None else st.none() | count


layouts = st.builds(Layout, **{field.name: strategy(field.name, field.default) for field in fields(Layout)})


@given(layouts)
def test_words_read_back(layout: Layout) -> None:
    assert grammar.parse(grammar.words(layout)) == layout


keys = st.sampled_from([field.name for field in fields(Layout)]) | st.text(max_size=8)


@given(st.lists(st.one_of(st.text(max_size=20), st.tuples(keys, st.text(max_size=12)).map("=".join)), max_size=20))
def test_any_text_is_read_or_refused(words: list[str]) -> None:
    with contextlib.suppress(LayoutError):
        grammar.parse(words)

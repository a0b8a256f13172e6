"""Any layout of any known model is estimated or refused: never a crash, a negative term, or terms that do not add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ShardwiseError
from shardwise.planner.estimator import Estimator
from shardwise.spec.catalog import cluster
from shardwise.spec.catalog.models import model, model_names
from shardwise.spec.layout import Layout, Offload, Recompute

DEGREE = st.sampled_from([1, 2, 3, 4, 8, 16])
RECOMPUTE = st.sampled_from(
    [
        Recompute(),
        Recompute(granularity="full", method="uniform", num_layers=2),
        Recompute(granularity="full", method="block", num_layers=3),
        Recompute(granularity="selective", modules=("mlp", "layernorm", "unknown")),
        Recompute(granularity="selective", modules=("op",)),
    ]
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp = draw(DEGREE)
    return Layout(
        tp=draw(DEGREE),
        cp=draw(DEGREE),
        dp=draw(DEGREE),
        pp=pp,
        ep=draw(DEGREE),
        etp=draw(DEGREE),
        vpp=draw(DEGREE) if pp > 1 else 1,
        sp=draw(st.booleans()),
        mbs=draw(DEGREE),
        gbs=draw(st.sampled_from([1, 64, 1000])),
        precision=draw(
            st.sampled_from(["fp32", "fp16", "bf16", "fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4"])
        ),
        sharding=draw(st.sampled_from(["none", "distributed_optimizer", "zero2", "fsdp2", "megatron_fsdp"])),
        shard_group=draw(st.sampled_from([None, 2])),
        reshard_after_forward=draw(st.booleans()),
        cp_comm=draw(st.sampled_from(["p2p", "all_gather", "a2a", "a2a+p2p"])),
        attention=draw(st.sampled_from(["flash", "unfused"])),
        cross_entropy=draw(st.sampled_from(["fused", "unfused", "te", "chunked"])),
        dispatcher=draw(st.sampled_from(["allgather", "alltoall", "deepep", "hybridep"])),
        capacity_factor=draw(st.sampled_from([None, 1.0])),
        recompute=draw(RECOMPUTE),
        peft=draw(st.sampled_from([None, "lora"])),
        optimizer=draw(st.sampled_from(["adam", "sgd", "muon"])),
        overlap_moe=draw(st.booleans()),
        overlap_tp=draw(st.booleans()),
        cuda_graphs=draw(st.booleans()),
        offload=draw(
            st.sampled_from([Offload(), Offload(optimizer=0.5, activation_layers=4), Offload(activation_modules=("expert_fc1",))])
        ),
    )


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(model_names()),
    layout=layouts(),
    gpu=st.sampled_from(["a100-40gb", "h100-sxm", "b200", "gb300", "l40s", "mi300x", "vr200"]),
    seq_len=st.sampled_from([1, 7, 512, 8192, 131072]),
)
def test_every_layout_is_estimated_or_refused(name: str, layout: Layout, gpu: str, seq_len: int) -> None:
    estimator = Estimator(model(name), cluster(gpu, 64), seq_len=seq_len)
    try:
        memory, step = estimator.memory(layout), estimator.step_time(layout)
    except ShardwiseError:
        return
    for terms, total in ((memory.terms, memory.allocated_gib * 2**30), (step.terms, step.seconds)):
        assert all(value >= -1e-9 for value in terms.values())
        assert sum(terms.values()) == pytest.approx(total)
    assert memory.allocated_gib > 0 and step.seconds > 0

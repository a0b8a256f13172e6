"""Exporters write a layout and read back the same one; what a target cannot express is refused with every reason."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.errors import InputError, LayoutError, ShardwiseError
from shardwise.planner.exporters import READERS, WRITERS, format_of, megatron_lm, slurm
from shardwise.spec.layout import Layout, Offload, Recompute

POWERS = st.sampled_from([1, 2, 4, 8])
RECOMPUTES = st.one_of(
    st.just(Recompute()),
    st.sampled_from([("core_attn",), ("moe_act", "layernorm"), ("mlp",)]).map(lambda m: Recompute(granularity="selective", modules=m)),
    st.tuples(st.sampled_from(["uniform", "block"]), st.integers(1, 4)).map(
        lambda v: Recompute(granularity="full", method=v[0], num_layers=v[1])
    ),
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, pp, cp, dp, ep, mbs = (draw(POWERS) for _ in range(6))
    names = ["bf16", "fp16", "fp32", "fp8-delayed", "fp8-current", "fp8-blockwise", "fp8-rowwise", "mxfp8", "nvfp4"]
    precision = draw(st.sampled_from(names))
    dtype = precision if precision in ("fp16", "fp32") else draw(st.sampled_from(["bf16", "fp32", "fp8"]))
    sharding = draw(st.sampled_from(["none", "distributed_optimizer", "zero2", "fsdp2", "megatron_fsdp"]))
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=ep,
        etp=draw(st.sampled_from([1, 2])),
        vpp=draw(st.sampled_from([1, 2, 3])) if pp > 1 else 1,
        sp=draw(st.booleans()),
        mbs=mbs,
        gbs=mbs * dp * draw(st.integers(1, 8)),
        cp_comm=draw(st.sampled_from(["p2p", "all_gather", "a2a"])),
        sharding=sharding,
        shard_group=None if sharding == "none" or dp == 1 else draw(st.sampled_from([None, dp * cp // 2])),
        reshard_after_forward=sharding != "fsdp2" or draw(st.booleans()),
        precision=precision,
        param_dtype=dtype,
        moment_dtype=draw(st.sampled_from(["fp32", "bf16"])),
        master_dtype=None if dtype == "fp32" else draw(st.sampled_from(["fp32", "fp16", None])),
        grad_dtype=draw(st.sampled_from(["fp32", "bf16"])),
        recompute=draw(RECOMPUTES),
        offload=Offload(optimizer=draw(st.sampled_from([0.0, 0.5]))),
        attention=draw(st.sampled_from(["flash", "unfused"])),
        cross_entropy=draw(st.sampled_from(["fused", "unfused", "te", "chunked"])),
        cuda_graphs=draw(st.booleans()),
        overlap_grad_reduce=draw(st.booleans()),
        overlap_tp=draw(st.booleans()),
        overlap_moe=draw(st.booleans()),
        dispatcher=draw(st.sampled_from(["allgather", "alltoall", "deepep", "hybridep"])),
        capacity_factor=draw(st.sampled_from([None, 1.0, 1.25])),
    )


@pytest.mark.parametrize("target", sorted(WRITERS))
@settings(max_examples=150, deadline=None)
@given(layout=layouts())
def test_reads_back_the_same_layout(target: str, layout: Layout) -> None:
    try:
        text = WRITERS[target](layout)
    except LayoutError as error:
        assert all(finding.try_ and finding.why for finding in error.findings)
        return
    except InputError:
        assume(False)
    assert format_of(text) == target
    back = READERS[target](text, None)
    if target == "torchtitan":  # torchtitan has no such switches: their defaults are read
        layout = layout.replace(overlap_grad_reduce=True)
    assert back == layout


def test_every_target_expresses_a_plain_layout() -> None:
    plain = Layout(tp=2, pp=2, dp=4, sp=True, mbs=1, gbs=64)
    for target in ("megatron-lm", "megatron-bridge", "slurm"):
        assert READERS[target](WRITERS[target](plain), None) == plain
    titan = plain.replace(sharding="fsdp2", param_dtype="fp32", master_dtype=None)
    assert READERS["torchtitan"](WRITERS["torchtitan"](titan), None) == titan


def test_explicit_pipeline_layout_carries_the_virtual_stages() -> None:
    layout = Layout(pp=2, vpp=2, dp=1, gbs=4, pipeline_layout=("Ett", "tt", "tt", "tL"))
    text = megatron_lm.write(layout)
    assert "num-virtual-stages" not in text  # Megatron-LM takes one of the two
    assert megatron_lm.read(text) == layout


def test_megatron_etp_follows_tp_when_unset_and_bridge_takes_one() -> None:
    words = "--tensor-model-parallel-size 4 --expert-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8"
    assert megatron_lm.read(words, 16).etp == 4
    assert READERS["megatron-bridge"]("model.tensor_model_parallel_size=4\nmodel.expert_model_parallel_size=4", 16).etp == 1


def test_slurm_script_starts_as_many_processes_as_the_layout_has_ranks() -> None:
    text = slurm.write(Layout(tp=8, dp=3, gbs=3), gpus_per_node=8)
    assert "--nodes=3" in text and "WORLD=24" in text
    assert 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1' in text
    with pytest.raises(InputError, match="whole nodes"):
        slurm.write(Layout(tp=4, dp=3, gbs=3), gpus_per_node=8)


BRIDGE_KEYS = [
    "tensor_model_parallel_size",
    "sequence_parallel",
    "fp8_recipe",
    "fp8",
    "recompute_modules",
    "cp_comm_type",
    "micro_batch_size",
]


@settings(max_examples=200, deadline=None)
@given(
    names=st.lists(
        st.tuples(
            st.sampled_from(BRIDGE_KEYS),
            st.sampled_from(["0", "-1", "two", "true", "null", "[1,2]", "1.5", "", "selective", "'"]),
        ),
        max_size=4,
    ),
    target=st.sampled_from(["megatron-bridge", "megatron-lm", "slurm", "torchtitan"]),
)
def test_bad_values_are_refused_with_a_message(names: list[tuple[str, str]], target: str) -> None:
    text = "\n".join(f"model.{name}={value}" for name, value in names)
    if target == "megatron-lm":
        text = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in names)
    try:
        READERS[target](text, 8)
    except ShardwiseError as error:
        assert str(error)

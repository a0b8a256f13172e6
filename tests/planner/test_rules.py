"""Every rule fires on the case it is for, with the severity of its framework; sound layouts pass."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.errors import Finding, ShardwiseError
from shardwise.planner.rules import RULES, check_degrees, check_layout, is_legal
from shardwise.planner.rules.rule import FRAMEWORKS
from shardwise.spec import catalog, grammar
from shardwise.spec.layout import Layout, Offload, Recompute

LLAMA, GPT, NEXT = "llama-3.1-70b", "gpt-3-175b", "qwen3-next-80b-a3b"
QWEN, DEEPSEEK, OSS = "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b"


def check(
    words: str, *, model: str | None = LLAMA, gpus: int | None = None, gpu: str = "h100", seq: int | None = 4096, framework: str = "bridge",
    settings: dict[str, Any] | None = None, **fields: Any,
) -> tuple[Finding, ...]:  # fmt: skip
    layout = grammar.parse(words.split(), world=gpus).replace(**fields)
    known = catalog.model(model) if model else None
    cluster = catalog.cluster(gpu, gpus) if gpus else None
    return check_layout(known, layout, cluster, seq_len=seq, framework=framework, settings=settings)


def found(rule: str, findings: tuple[Finding, ...]) -> Finding:
    assert rule in [finding.rule for finding in findings], [str(finding) for finding in findings]
    return next(finding for finding in findings if finding.rule == rule)


FULL, MLP = Recompute(granularity="full"), Recompute(granularity="selective", modules=("mla_up_proj",))
CASES: list[tuple[str, str, dict[str, Any]]] = [
    # worlds and batches
    ("W1", "tp=4 cp=3 pp=2 ep=8", {"gpus": 32, "model": QWEN}),
    ("W1", "tp=2 dp=3", {"gpus": 8}),
    ("W2", "tp=2 pp=8 ep=64 gbs=4096 sp=true", {"gpus": 64, "model": DEEPSEEK}),
    ("W7", "tp=2 pp=2 ep=4 sp=true", {"gpus": 16, "model": QWEN, "settings": {"use_tp_pp_dp_mapping": True}}),
    ("W9", "tp=2 shard_group=3", {"gpus": 16}),
    ("W9", "ep=8 shard_group=4", {"gpus": 8, "model": QWEN}),
    ("W10", "shard_group=4 sharding=none", {"gpus": 8}),
    ("W12", "tp=8 sharding=megatron_fsdp", {"settings": {"use_tp_pp_dp_mapping": True}}),
    ("W13", "tp=8", {"settings": {"seed": 0}}),
    ("W14", "tp=8", {"settings": {"tensor_parallel_num_weight_shards": 16}}),
    ("B1", "mbs=2 gbs=36", {"gpus": 16}),
    ("B4", "tp=8", {"settings": {"train_iters": 10, "train_samples": 20}}),
    ("B5", "tp=8 gbs=8", {"gpus": 64, "settings": {"eval_global_batch_size": 12}}),
    ("B6", "tp=8 gbs=64", {"gpus": 64, "settings": {"rampup_batch_size": [16, 10, 1000]}}),
    ("B6", "tp=8 gbs=64", {"gpus": 64, "settings": {"rampup_batch_size": [4, 4, 1000]}}),
    ("W5", "tp=2 pp=2 gbs=8", {"settings": {"order": "tp-dp"}}),
    ("B7", "mbs=2", {"settings": {"packed_sequence_size": 4096}}),
    ("B7", "mbs=1", {"settings": {"pack_sequences_in_batch": True}}),
    ("B8", "tp=8", {"settings": {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 10}}),
    ("B8", "tp=8", {"settings": {"max_steps": 5, "train_iters": 10}}),
    ("B9", "tp=8", {"settings": {"lr_warmup_iters": 10, "train_iters": 3}}),
    ("B10", "tp=8", {"settings": {"dataset.seq_length": 2048}}),
    # tensor parallel
    ("T1", "tp=3", {}),
    ("T2", "tp=12", {"model": "mistral-large-123b"}),
    ("T2", "tp=16", {"framework": "torchtitan"}),
    ("T4", "tp=24", {"model": "llama-3.2-3b"}),
    ("T4", "tp=1 ep=2 etp=5", {"model": QWEN}),
    ("T7", "tp=96", {"model": "opt-175b", "seq": 2048}),
    ("T8", "sp=true", {}),
    ("T9", "tp=8 sp=true", {"seq": 4100}),
    ("T10", "tp=8 sp=true", {"settings": {"distribute_saved_activations": True}}),
    ("T10", "tp=8", {"settings": {"distribute_saved_activations": True}}),
    ("T11", "tp=8 overlap_tp=true", {}),
    ("T12", "tp=8", {"gpus": 8, "settings": {"CUDA_DEVICE_MAX_CONNECTIONS": 32}}),
    ("T13", "tp=2 sp=true", {"settings": {"transformer_impl": "local"}}),
    ("T13", "cp=2", {"settings": {"transformer_impl": "local"}}),
    ("T14", "tp=8 cp=4 sp=true cp_comm=a2a", {"model": NEXT}),
    ("T15", "tp=5 sp=true", {"model": "glm-4.7-flash", "settings": {"mla_down_proj_fusion": True}}),
    ("T16", "tp=2 sp=true", {"model": "olmoe-1b-7b"}),
    ("T17", "tp=16", {"model": "nemotron-h-8b"}),
    ("T18", "tp=16", {"gpus": 64}),
    # pipeline
    ("P1", "pp=2 gbs=8", {"framework": "megatron-core", "settings": {"pipeline_dtype": None}}),
    ("P2", "pp=16 gbs=64", {"model": DEEPSEEK, "framework": "megatron-core"}),
    ("P2", "pp=4 vpp=3 gbs=64", {}),
    ("P2u", "pp=16 gbs=64", {"model": DEEPSEEK, "framework": "shardwise"}),
    ("P3", "vpp=2", {}),
    ("P4", "pp=2 vpp=2 gbs=8 overlap_p2p=false", {"framework": "megatron-core"}),
    ("P6", "pp=4 vpp=2 gbs=8", {"settings": {"overlap_p2p_comm": True, "batch_p2p_comm": True}}),
    ("P6", "pp=4 vpp=2 gbs=8 overlap_p2p=false", {"settings": {"overlap_p2p_comm_warmup_flush": True}}),
    ("P7", "pp=4 vpp=2 gbs=2", {}),
    ("P7", "pp=4 vpp=2 gbs=6", {}),
    ("P9", "pp=4 gbs=8 first_stage_layers=80", {}),
    ("P9", "pp=4 gbs=8 first_stage_layers=19 last_stage_layers=20", {}),
    ("P9", "pp=4 vpp=2 gbs=8 first_stage_layers=17 last_stage_layers=17", {}),
    ("P10", "pp=4 gbs=8 first_stage_layers=20 account_for_loss=true", {}),
    ("P10", "pp=2 gbs=8 pipeline_layout=Et*40|t*40L account_for_loss=true", {}),
    ("P13", "pp=2 gbs=8 pipeline_layout=Et*40|t*39L", {}),
    ("P13", "pp=2 gbs=8 pipeline_layout=t*40|Et*40L", {}),
    ("P13", "pp=2 gbs=8 pipeline_layout=Et*40|Lt*40", {}),
    ("P13", "pp=2 gbs=8 pipeline_layout=Et*30|mt*31L", {"model": DEEPSEEK}),
    ("P13", "pp=3 vpp=1 gbs=8 pipeline_layout=Et*40|t*40L", {}),
    ("P16", "pp=2 gbs=8", {"framework": "megatron-core", "settings": {
        "num_layers_per_virtual_pipeline_stage": 2, "num_virtual_stages_per_pipeline_rank": 2}}),
    ("P18", "pp=1", {"settings": {"defer_embedding_wgrad_compute": True}}),
    ("P20", "pp=2 gbs=8", {"settings": {"pipeline_model_parallel_comm_backend": "gloo"}}),
    ("P20", "pp=2 gbs=8", {"settings": {"pipeline_model_parallel_comm_backend": "ucc", "CUDA_DEVICE_MAX_CONNECTIONS": 1}}),
    ("P22", "pp=8 ep=8 gbs=64", {"model": "olmoe-1b-7b"}),
    ("P23", "pp=2 gbs=8 sharding=fsdp2", {"model": "llama-3.2-1b", "framework": "torchtitan"}),
    ("P24", "pp=2 gbs=8 schedule=dualpipe", {}),
    ("P24", "pp=2 gbs=8 schedule=zbv", {"framework": "shardwise"}),
    ("P25", "pp=8 gbs=4", {}),
    ("P26", "pp=16 vpp=8 gbs=64", {"framework": "shardwise"}),
    # context parallel
    ("C1", "cp=8", {"seq": 4104}),
    ("C2", "tp=8 sp=true cp=2 sharding=fsdp2", {"seq": 4112, "framework": "torchtitan"}),
    ("C5", "tp=4 cp=4 cp_comm=a2a", {}),
    ("C6", "cp=4 cp_comm=a2a+p2p", {}),
    ("C6", "cp=4 cp_comm=a2a+p2p cp_sizes=4x2", {}),
    ("C6", "cp=4 cp_sizes=4x2", {}),
    ("C9", "cp=4 cp_comm=a2a+p2p cp_sizes=2x2", {"settings": {"use_decentralized_pg": True}}),
    ("C10", "cp=2", {"model": "gemma-3-27b"}),
    ("C11", "cp=2 cp_comm=all_gather", {"model": OSS}),
    ("C12", "cp=2", {"model": "glm-5.2"}),
    ("C13", "cp=2", {"settings": {"finetuning": True}}),
    ("C13", "cp=2", {"settings": {"calculate_per_token_loss": True, "average_in_collective": True}}),
    ("C15", "pp=2 gbs=8", {"framework": "megatron-core", "settings": {"hybrid_context_parallel": True}}),
    ("C16", "tp=8", {"model": "llama-3-8b", "seq": 16384}),
    ("C16", "tp=8", {"model": GPT, "seq": 4096}),
    ("C18", "cp=2", {"settings": {"batch_invariant_mode": True}}),
    ("C19", "tp=8", {"gpus": 16, "settings": {"eval_context_parallel_size": 4, "use_decentralized_pg": True}}),
    ("C19", "tp=8", {"settings": {"eval_context_parallel_size": 1}}),
    ("C3", "tp=2 cp=2 sp=true", {"settings": {"pad_seq_to_mult": 6}}),
    ("C4", "cp=2", {"settings": {"cp_comm_type": ["p2p", "a2a"]}}),
    # experts
    ("E1", "ep=2", {}),
    ("E2", "ep=48", {"model": QWEN}),
    ("E4", "tp=2 ep=8", {"model": QWEN}),
    ("E5", "ep=8 etp=2", {"model": OSS}),
    ("E11", "ep=8 pad_to_capacity=true", {"model": QWEN}),
    ("E11", "ep=8 capacity_factor=1", {"model": QWEN, "settings": {"moe_router_load_balancing_type": "sinkhorn"}}),
    ("E12", "dispatcher=deepep", {"model": QWEN}),
    ("E12", "ep=8 dispatcher=deepep pad_to_capacity=true capacity_factor=1", {"model": QWEN}),
    ("E12", "ep=8 dispatcher=deepep", {"model": QWEN, "gpus": 8, "gpu": "gb200"}),
    ("E12", "ep=8 dispatcher=hybridep", {"model": QWEN, "gpus": 8, "gpu": "rtx5090"}),
    ("E14", "ep=8 dispatcher=allgather", {"model": QWEN, "settings": {"variable_seq_lengths": True}}),
    ("E16", "ep=8", {"model": QWEN, "settings": {"moe_shared_expert_overlap": True}}),
    ("E17", "ep=8", {"model": QWEN, "settings": {"moe_router_padding_for_quantization": True}}),
    ("E19", "ep=8 overlap_moe=true pp=2 gbs=8", {"model": QWEN}),
    ("E19", "ep=8 overlap_moe=true recompute=full", {"model": QWEN}),
    ("E20", "ep=8", {"model": QWEN, "settings": {"delay_wgrad_compute": True}}),
    ("E21", "ep=8", {"model": QWEN, "settings": {"moe_router_dtype": None}}),
    ("E23", "ep=8", {"model": QWEN, "settings": {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.01}}),
    ("E24", "ep=8", {"model": QWEN, "settings": {"moe_router_force_load_balancing": True}}),
    ("E25", "ep=16", {"model": QWEN, "gpus": 16}),
    ("E26", "tp=2 ep=8 sp=true", {"model": QWEN, "settings": {"expert_tensor_parallel_size": None}}),
    ("TT2", "ep=8 etp=2 sharding=fsdp2", {"model": QWEN, "framework": "torchtitan"}),
    ("TT2", "ep=16 sharding=fsdp2", {"model": QWEN, "framework": "torchtitan", "gpus": 8}),
    ("E13", "ep=8", {"model": QWEN, "settings": {"moe_flex_dispatcher_backend": "deepep", "moe_token_dispatcher_type": "alltoall"}}),
    ("E13", "ep=8", {"model": QWEN, "settings": {"moe_flex_dispatcher_backend": None, "moe_token_dispatcher_type": "flex"}}),
    ("E18", "ep=8", {"model": QWEN, "settings": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": 0.1}}),
    ("R7", "offload=modules:core_attn", {"settings": {"NVTE_CPU_OFFLOAD_V1": 0}}),
    # sharding
    ("D0", "sharding=megatron_fsdp", {"framework": "shardwise"}),
    ("D1", "tp=8", {"settings": {"ddp.use_distributed_optimizer": True, "optimizer.use_distributed_optimizer": False}}),
    ("D2", "overlap_grad_reduce=false", {}),
    ("D3", "tp=8", {"settings": {"overlap_param_gather_with_optimizer_step": True}}),
    ("D5", "tp=8", {"settings": {"bucket_size": 1, "num_buckets": 1}}),
    ("D7", "tp=8", {"settings": {"use_decentralized_pg": True, "use_gloo_process_groups": True}}),
    ("D7", "tp=8", {"settings": {"use_gloo_process_groups": False, "ckpt_format": "torch"}}),
    ("D8", "tp=8", {"settings": {"use_megatron_fsdp": True, "use_torch_fsdp2": True}}),
    ("D9", "sharding=megatron_fsdp", {"settings": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}),
    ("D9", "sharding=megatron_fsdp", {"settings": {"ckpt_format": "torch_dist"}}),
    ("D9", "sharding=megatron_fsdp", {"settings": {"fsdp_manual_registration": True}}),
    ("D9", "sharding=megatron_fsdp optimizer=muon", {}),
    ("D10", "sharding=megatron_fsdp tp=2", {"settings": {"megatron_fsdp_version": 2}}),
    ("D11", "sharding=fsdp2 pp=2 gbs=8", {}),
    ("D11", "sharding=fsdp2", {"settings": {"CUDA_DEVICE_MAX_CONNECTIONS": 1}}),
    ("D15", "tp=8", {"settings": {"nccl_ub": True, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}),
    # precision, recompute, offload, graphs
    ("R1", "param_dtype=fp8", {}),
    ("R1", "tp=8", {"settings": {"bf16": True, "fp16": True}}),
    ("R2", "precision=mxfp8 tp=4 sp=true", {"model": "deepseek-v2-lite"}),
    ("R2", "precision=fp8-current", {"seq": 4100}),
    ("R3", "precision=mxfp8 param_dtype=fp8", {"settings": {"reuse_grad_buf_for_mxfp8_param_ag": False}}),
    ("R4", "tp=8", {"recompute": FULL}),
    ("R4", "tp=8", {"recompute": Recompute(granularity="selective", modules=("mlp",), method="block")}),
    ("R4", "tp=8", {"recompute": Recompute(granularity="selective", modules=("softmax",))}),
    ("R4", "tp=8", {"recompute": MLP}),
    ("R4", "ep=8 recompute=selective:moe_act", {"model": QWEN, "settings": {"moe_grouped_gemm": False}}),
    ("R4", "ep=8 recompute=selective:shared_experts", {"model": DEEPSEEK, "settings": {"moe_shared_expert_overlap": True}}),
    ("R4a", "recompute=selective", {}),
    ("R5", "pp=2 gbs=8", {"offload": Offload(activation_layers=4)}),
    ("R5", "tp=8", {"offload": Offload(activation_layers=80)}),
    ("R6", "tp=8 offload=optimizer:0.5", {"settings": {"use_precision_aware_optimizer": False}}),
    ("R8", "cuda_graphs=true", {"settings": {"use_te_rng_tracker": False}}),
    ("R8", "cuda_graphs=true", {"settings": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": 1}}),
    ("R8", "cuda_graphs=true pp=2 gbs=8 sharding=fsdp2", {"framework": "torchtitan"}),
    ("R9", "tp=8", {"settings": {"deterministic_mode": True, "cross_entropy_loss_fusion": True}}),
    ("R9", "tp=8", {"settings": {"deterministic_mode": True, "NCCL_ALGO": "NVLS"}}),
    ("R10", "tp=8", {"settings": {"cross_entropy_fusion_impl": "te"}}),
    ("R11", "precision=fp8-current", {"gpus": 8, "gpu": "a100"}),
    ("R11", "precision=mxfp8", {"gpus": 8}),
    ("R11", "precision=mxfp8", {"gpus": 8, "gpu": "mi300x"}),
    ("R12", "tp=2 sp=true overlap_tp=true sharding=fsdp2", {"framework": "torchtitan", "settings": {"compile": False}}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "words", "options"), CASES, ids=[f"{rule}-{i}" for i, (rule, _, _) in enumerate(CASES)])
def test_rule_fires(rule: str, words: str, options: dict[str, Any]) -> None:
    finding = found(rule, check(words, **options))
    framework = options.get("framework", "bridge")
    known = next(each for each in RULES if each.id == rule)
    assert framework in known.severity
    assert finding.given and finding.why and finding.try_ and finding.source == known.source


# what no catalog model gets wrong
MODEL_RULES = ("W4", "T3", "E8", "E9", "E10", "E22")


def test_every_rule_has_a_case() -> None:
    assert {rule for rule, _, _ in CASES} | set(MODEL_RULES) == {each.id for each in RULES}
    assert len({each.id for each in RULES}) == len(RULES)


def test_model_rules() -> None:
    moe = catalog.model(QWEN)
    attention, experts = moe.layers[0].mixer, moe.moe

    def findings(mixer: dict[str, Any] = {}, **mlp: Any) -> tuple[Finding, ...]:  # noqa: B006
        from dataclasses import replace

        layer = replace(moe.layers[0], mixer=replace(attention, **mixer), mlp=replace(experts, **mlp))
        return check_layout(moe.replace(layers=(layer,) * 48), Layout(), None, seq_len=4096, framework="bridge")

    assert is_legal(findings())
    found("T3", findings({"kv_heads": 5}))
    found("E8", findings(top_k=1))
    found("E9", findings(expert_bias=True))
    found("E10", findings(groups=7, group_topk=2))
    found("E10", findings(groups=4, group_topk=8))


def test_grouped_products_on_an_old_gpu() -> None:
    from dataclasses import replace

    cluster = catalog.cluster("a100", 8)
    old = replace(cluster, gpu=replace(cluster.gpu, capability=(7, 0)))
    layout = Layout(ep=8, dp=8, gbs=8)
    findings = check_layout(catalog.model(QWEN), layout, old, seq_len=4096, framework="bridge", settings={"moe_grouped_gemm": True})
    found("E22", findings)


@pytest.mark.parametrize("degree", ["tp", "pp", "cp", "ep", "etp", "dp", "vpp", "mbs", "gbs"])
@pytest.mark.parametrize("value", [0, -2, True, 1.5])
def test_degrees_below_one_stop_there(degree: str, value: Any) -> None:
    findings = check_layout(catalog.model(QWEN), Layout(**{degree: value}), catalog.cluster("h100", 8), seq_len=4096, framework="bridge")
    assert [finding.rule for finding in findings] == ["W4"]


SOUND = [
    ("tp=8 pp=4 sp=true gbs=128 mbs=1 vpp=5", LLAMA, 64, "h100", 8192),
    ("tp=2 pp=16 ep=64 sp=true gbs=4096 pipeline_layout=Et*3|(t*4|)*14t*2mL", DEEPSEEK, 1024, "h100", 4096),
    ("tp=8 pp=8 cp=4 sp=true vpp=2 gbs=512 account_for_embedding=true account_for_loss=true", "llama-3.1-405b", 256, "h100", 131072),
    ("tp=4 pp=2 ep=4 sp=true gbs=512", QWEN, 16, "h100", 4096),
    ("ep=8 gbs=2048", "olmoe-1b-7b", 8, "h100", 4096),
    ("tp=4 pp=8 vpp=6 sp=true mbs=2 gbs=2048", GPT, 64, "h100", 2048),
]


@pytest.mark.parametrize(("words", "model", "gpus", "gpu", "seq"), SOUND)
@pytest.mark.parametrize("framework", ["megatron-core", "bridge", "shardwise"])
def test_published_layouts_are_legal(words: str, model: str, gpus: int, gpu: str, seq: int, framework: str) -> None:
    findings = check(words, model=model, gpus=gpus, gpu=gpu, seq=seq, framework=framework)
    assert is_legal(findings), [str(finding) for finding in findings]


def test_torchtitan_layout_is_legal() -> None:
    findings = check("tp=8 pp=8 sp=true gbs=128 sharding=fsdp2", model="llama-3.1-405b", gpus=512, seq=8192, framework="torchtitan")
    assert is_legal(findings), [str(finding) for finding in findings]


def test_severity_depends_on_the_framework() -> None:
    severities = {framework: found("T8", check("sp=true", framework=framework)).severity for framework in FRAMEWORKS}
    assert severities == {"megatron-core": "error", "bridge": "warning", "torchtitan": "info", "shardwise": "warning"}


def test_world_names_the_wrong_product_and_the_loose_max() -> None:
    finding = found("W2", check("tp=4 cp=3 pp=2 ep=8", model=QWEN, gpus=24))
    assert "smallest world is 48" in finding.why
    assert "192 is not it" in finding.why
    assert "24 is too small" in finding.why


def test_all_problems_at_once_errors_first() -> None:
    findings = check("tp=3 pp=7 vpp=2 cp=5 ep=9 sp=true mbs=4 gbs=10 cp_comm=a2a+p2p", model=QWEN, gpus=100, seq=4097)
    errors = [finding.rule for finding in findings if finding.severity == "error"]
    assert {"W1", "W2", "B1", "T1", "C1", "C6", "E2", "P7"} <= set(errors)
    assert [finding.severity for finding in findings] == sorted((f.severity for f in findings), key=["error", "warning", "info"].index)


def test_batch_is_rounded_when_asked() -> None:
    finding = found("B1", check("mbs=2 gbs=100", gpus=16, settings={"decrease_batch_size_if_needed": True}))
    assert finding.severity == "warning" and "96" in finding.why


def test_degrees_alone() -> None:
    assert check_degrees(Layout(pp=2, tp=2, ep=8).with_world(16), framework="bridge") == ()
    findings = check_degrees(Layout(tp=2, ep=48, sp=True).with_world(48), model=catalog.model(QWEN), framework="bridge")
    assert [finding.rule for finding in findings] == ["E2"]
    assert "32" in findings[0].try_ or "64" in findings[0].try_


def test_unknown_framework() -> None:
    with pytest.raises(ShardwiseError, match="torchtitan"):
        check_layout(None, Layout(), None, seq_len=None, framework="deepspeed")


def test_dict_form() -> None:
    finding = found("T1", check("tp=3"))
    assert set(finding.to_dict()) == {"rule", "severity", "given", "why", "try", "source"}


def test_shardwise_splits_sequences_unevenly() -> None:
    layout = Layout(tp=4, cp=2, sp=True)
    for framework, refused in (("shardwise", set()), ("bridge", {"C1", "T9"})):
        findings = check_layout(catalog.model("llama-3.1-8b"), layout, catalog.cluster("h100", 8), seq_len=1022, framework=framework)
        assert {finding.rule for finding in findings} & {"C1", "T9"} == refused

"""Sharding of the training state over data parallel ranks (D rules)."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planner.rules.rule import BRIDGE, MEGATRON, MEGATRONS, SHARDWISE, TITAN, Case, Problem, rule

_MLM = "Megatron-LM validate_args"
_DDP = "Megatron Core DistributedDataParallelConfig"
_MODES: dict[str, tuple[str, ...]] = {
    MEGATRON: ("none", "distributed_optimizer", "zero2", "megatron_fsdp", "fsdp2"),
    BRIDGE: ("none", "distributed_optimizer", "zero2", "megatron_fsdp", "fsdp2"),
    TITAN: ("none", "fsdp2"),
    SHARDWISE: ("none", "distributed_optimizer", "zero2", "fsdp2"),
}


@rule("D0", "sharding modes of each framework")
def sharding_is_available(case: Case) -> Iterator[Problem]:
    modes = _MODES[case.framework]
    if case.layout.sharding not in modes:
        yield Problem(f"sharding={case.layout.sharding}", f"{case.framework} has no such mode", f"sharding={' or '.join(modes)}")


@rule("D1", "Megatron Bridge _validate_and_sync_distributed_optimizer_settings", severity="warning", only=(BRIDGE,))
def distributed_optimizer_is_said_once(case: Case) -> Iterator[Problem]:
    names = ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer")
    values = [case.settings.get(name) for name in names]
    if None not in values and values[0] != values[1]:
        yield Problem(", ".join(f"{name}={value}" for name, value in zip(names, values)), "either turns it on", "the same value in both")


@rule("D2", _MLM, only=(*MEGATRONS, SHARDWISE))
def overlapped_gather_needs_overlapped_reduce(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if layout.sharding != "none" and layout.overlap_param_gather and not layout.overlap_grad_reduce:
        why = "the gather of weights follows the buckets of the gradient reduction"
        yield Problem("overlap_param_gather=true overlap_grad_reduce=false", why, "overlap_grad_reduce=true, or both false")


@rule("D3", _MLM, only=MEGATRONS)
def gather_with_the_step_needs_virtual_stages(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if not case.settings.get("overlap_param_gather_with_optimizer_step"):
        return
    if layout.vpp == 1 or not layout.overlap_param_gather or layout.sharding == "none":
        given = f"overlap_param_gather_with_optimizer_step=true vpp={layout.vpp} sharding={layout.sharding}"
        yield Problem(given, "it needs overlap_param_gather and virtual stages", "overlap_param_gather_with_optimizer_step=false")


@rule("D5", _DDP, only=MEGATRONS)
def buckets_by_size_or_number(case: Case) -> Iterator[Problem]:
    if case.settings.get("bucket_size") is not None and case.settings.get("num_buckets") is not None:
        yield Problem("bucket_size and num_buckets", "one follows from the other", "only bucket_size")


@rule("D7", "Megatron Bridge ConfigContainer.validate", only=(BRIDGE,))
def checkpoints_without_gloo(case: Case) -> Iterator[Problem]:
    settings = case.settings
    if settings.get("use_decentralized_pg") and settings.get("use_gloo_process_groups"):
        yield Problem("use_decentralized_pg=true use_gloo_process_groups=true", "they exclude each other", "use_gloo_process_groups=false")
    no_gloo, kind = settings.get("use_gloo_process_groups") is False, settings.get("ckpt_format")
    if no_gloo and case.layout.sharding == "distributed_optimizer" and kind not in (None, "torch_dist", "fsdp_dtensor"):
        yield Problem(f"ckpt_format={kind} without gloo groups", "the sharded optimizer gathers through gloo", "ckpt_format=torch_dist")


@rule("D8", "Megatron Bridge ConfigContainer.validate", only=MEGATRONS)
def one_fsdp(case: Case) -> Iterator[Problem]:
    if case.settings.get("use_megatron_fsdp") and case.settings.get("use_torch_fsdp2"):
        yield Problem("use_megatron_fsdp=true use_torch_fsdp2=true", "both shard the weights", "one of them")


@rule("D9", "Megatron Bridge, Megatron-LM validate_args", only=MEGATRONS)
def megatron_fsdp_v1(case: Case) -> Iterator[Problem]:
    layout, settings = case.layout, case.settings
    if layout.sharding != "megatron_fsdp":
        return
    if str(settings.get("CUDA_DEVICE_MAX_CONNECTIONS")) == "1":
        yield Problem(
            "sharding=megatron_fsdp CUDA_DEVICE_MAX_CONNECTIONS=1", "gathers run beside compute", "CUDA_DEVICE_MAX_CONNECTIONS unset"
        )
    if settings.get("ckpt_format") not in (None, "fsdp_dtensor"):
        yield Problem(
            f"sharding=megatron_fsdp ckpt_format={settings['ckpt_format']}", "shards are saved as DTensors", "ckpt_format=fsdp_dtensor"
        )
    if settings.get("fsdp_manual_registration") and not settings.get("nccl_ub"):
        yield Problem("fsdp_manual_registration=true nccl_ub=false", "only user buffers are registered", "nccl_ub=true")
    if layout.optimizer == "muon":
        yield Problem(
            "sharding=megatron_fsdp optimizer=muon", "Muon needs whole matrices", "optimizer=adam, or sharding=distributed_optimizer"
        )


@rule("D10", "Megatron Bridge ConfigContainer.validate", only=(BRIDGE,))
def megatron_fsdp_v2(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if layout.sharding != "megatron_fsdp" or case.settings.get("megatron_fsdp_version") != 2:
        return
    split = [f"{name}={getattr(layout, name)}" for name in ("tp", "pp", "cp", "ep", "vpp") if getattr(layout, name) > 1]
    if case.model and case.model.moe:
        split.append("experts")
    if layout.precision != "bf16":
        split.append(f"precision={layout.precision}")
    if layout.offload.activation_layers or layout.offload.optimizer:
        split.append(f"offload={layout.offload}")
    if layout.cuda_graphs:
        split.append("cuda_graphs=true")
    if split:
        yield Problem(
            f"megatron_fsdp_version=2 with {' '.join(split)}", "version 2 shards plain bf16 data parallel models", "megatron_fsdp_version=1"
        )


@rule("D11", _MLM, only=MEGATRONS)
def torch_fsdp2_stands_alone(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if layout.sharding != "fsdp2":
        return
    against = [f"{name}={getattr(layout, name)}" for name in ("pp", "ep") if getattr(layout, name) > 1]
    if case.model and case.model.tied:
        against.append("tied embeddings")
    if layout.precision == "fp16":
        against.append("precision=fp16")
    if against:
        yield Problem(f"sharding=fsdp2 with {' '.join(against)}", "Megatron's FSDP2 path does not take them", "sharding=megatron_fsdp")
    if str(case.settings.get("CUDA_DEVICE_MAX_CONNECTIONS")) == "1":
        yield Problem("sharding=fsdp2 CUDA_DEVICE_MAX_CONNECTIONS=1", "gathers run beside compute", "CUDA_DEVICE_MAX_CONNECTIONS unset")


@rule("D15", _DDP, only=MEGATRONS)
def user_buffers_are_not_expandable(case: Case) -> Iterator[Problem]:
    allocator = str(case.settings.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if case.settings.get("nccl_ub") and "expandable_segments:True" in allocator:
        yield Problem("nccl_ub=true with expandable_segments:True", "registered buffers must not move", "expandable_segments:False")

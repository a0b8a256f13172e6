"""Experts: their ranks, routing and dispatch (E rules)."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planner.rules.alternatives import divisors, listed, nearest
from shardwise.planner.rules.rule import BRIDGE, MEGATRONS, SHARDWISE, TITAN, Case, Problem, rule

_CONFIG = "Megatron Core TransformerConfig.__post_init__"


@rule("E1", _CONFIG)
def expert_ranks_need_experts(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if case.model and case.model.moe is None and layout.ep * layout.etp > 1:
        yield Problem(f"ep={layout.ep} etp={layout.etp}, {case.model.name} has no experts", "there is nothing to split", "ep=1 etp=1")


@rule("E2", "Megatron-LM validate_args; Megatron Core BaseMoELayer; torchtitan moe.py")
def experts_split(case: Case) -> Iterator[Problem]:
    moe = case.model.moe if case.model else None
    if moe and moe.experts % case.layout.ep:
        instead = listed("ep", nearest(divisors(moe.experts), case.layout.ep))
        yield Problem(f"{moe.experts} experts, ep={case.layout.ep}", "each rank holds the same number of experts", instead)


@rule("E4", "Megatron Core MoELayer.forward", titan=None, shardwise="warning")
def experts_with_tensor_parallel_need_sequence_parallel(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if case.model and case.model.moe and layout.tp > 1 and not layout.sp:
        why = "every tp rank would route the same tokens; the first training step fails in Megatron"
        yield Problem(f"experts, tp={layout.tp} sp=false", why, "sp=true, or tp=1")


@rule("E5", _CONFIG, only=(*MEGATRONS, SHARDWISE))
def expert_bias_is_not_split(case: Case) -> Iterator[Problem]:
    if case.model and case.model.moe and case.model.moe.bias and case.layout.etp > 1:
        yield Problem(f"experts with bias, etp={case.layout.etp}", "the bias of a split expert would be added once per rank", "etp=1")


@rule("E8", _CONFIG, only=MEGATRONS)
def one_expert_needs_a_gradient(case: Case) -> Iterator[Problem]:
    moe = case.model.moe if case.model else None
    if moe and moe.top_k == 1 and moe.score == "softmax" and not moe.pre_softmax:
        why = "softmax over the one chosen score is always 1 and has no gradient"
        yield Problem("top-1 routing, softmax after the choice", why, "moe_router_pre_softmax=true")


@rule("E9", _CONFIG, only=MEGATRONS)
def balance_bias_needs_sigmoid(case: Case) -> Iterator[Problem]:
    moe = case.model.moe if case.model else None
    if moe and moe.expert_bias and moe.score == "softmax":
        yield Problem("balance bias with softmax scores", "the bias is defined for sigmoid scores", "moe_router_score_function=sigmoid")


@rule("E10", _CONFIG)
def expert_groups_are_even(case: Case) -> Iterator[Problem]:
    moe = case.model.moe if case.model else None
    if moe is None or moe.groups is None:
        return
    kept = moe.group_topk or moe.groups
    given = f"{moe.experts} experts in {moe.groups} groups, {kept} kept"
    if moe.experts % moe.groups or kept > moe.groups:
        yield Problem(
            given, "groups are equal, and no more are kept than there are", listed("groups", nearest(divisors(moe.experts), moe.groups))
        )
    elif case.framework == TITAN and moe.experts // moe.groups < 2:
        yield Problem(given, "torchtitan needs two experts in a group", "fewer groups")


@rule("E11", _CONFIG)
def padding_needs_a_capacity(case: Case) -> Iterator[Problem]:
    layout, balance = case.layout, case.settings.get("moe_router_load_balancing_type")
    if layout.pad_to_capacity and layout.capacity_factor is None:
        yield Problem("pad_to_capacity=true", "experts are padded to a capacity, and none is given", "capacity_factor=1.0")
    known = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
    if layout.capacity_factor is not None and balance is not None and balance not in known:
        yield Problem(f"capacity_factor with {balance}", "dropping works with the auxiliary losses only", " or ".join(known))


@rule("E12", "Megatron Core MoELayer, MoEFlexTokenDispatcher; Megatron Bridge flex_dispatcher_backend", only=(*MEGATRONS, SHARDWISE))
def fused_dispatch_needs_its_hardware(case: Case) -> Iterator[Problem]:
    """And E13, E15: DeepEP wants several expert ranks and no padding; each fused dispatcher runs on some GPUs."""
    layout = case.layout
    if case.model is None or case.model.moe is None or layout.dispatcher not in ("deepep", "hybridep"):
        return
    if layout.dispatcher == "deepep" and layout.ep * layout.etp == 1:
        yield Problem("dispatcher=deepep ep=1 etp=1", "there is no rank to dispatch to", "dispatcher=alltoall, or ep=2 or more")
    if layout.dispatcher == "deepep" and layout.pad_to_capacity:
        yield Problem("dispatcher=deepep pad_to_capacity=true", "DeepEP does not pad", "dispatcher=alltoall")
    gpu = case.cluster.gpu if case.cluster else None
    if gpu is None:
        return
    if layout.dispatcher == "deepep" and gpu.arch not in ("ampere", "hopper") and gpu.name not in ("b200", "b300"):
        yield Problem(f"dispatcher=deepep on {gpu.name}", "DeepEP runs on Ampere, Hopper, B200 and B300", "dispatcher=hybridep or alltoall")
    if layout.dispatcher == "hybridep" and (gpu.capability is None or not (8, 0) <= gpu.capability < (11, 0)):
        yield Problem(f"dispatcher=hybridep on {gpu.name}", "HybridEP needs compute capability 8 to 10", "dispatcher=alltoall")


@rule("E13", "Megatron Bridge flex_dispatcher_backend", severity="warning", only=MEGATRONS)
def dispatcher_backend_needs_its_type(case: Case) -> Iterator[Problem]:
    kind, backend = case.settings.get("moe_token_dispatcher_type"), case.settings.get("moe_flex_dispatcher_backend")
    if backend and kind == "alltoall":
        given = f"moe_flex_dispatcher_backend={backend} moe_token_dispatcher_type=alltoall"
        yield Problem(given, "the backend changes nothing while the type is alltoall", "moe_token_dispatcher_type=flex")
    elif kind == "flex" and "moe_flex_dispatcher_backend" in case.settings and not backend:
        yield Problem("moe_token_dispatcher_type=flex without a backend", "it falls back to alltoall", "moe_flex_dispatcher_backend=deepep")


@rule("E14", _CONFIG, only=MEGATRONS)
def gathered_tokens_have_one_length(case: Case) -> Iterator[Problem]:
    if case.layout.dispatcher == "allgather" and case.settings.get("variable_seq_lengths"):
        yield Problem("dispatcher=allgather variable_seq_lengths=true", "gathering needs equal lengths", "dispatcher=alltoall")


@rule("E16", _CONFIG, only=MEGATRONS)
def shared_experts_overlap_all_to_all(case: Case) -> Iterator[Problem]:
    if not case.settings.get("moe_shared_expert_overlap"):
        return
    if case.layout.dispatcher == "allgather" or (case.model and case.model.moe and not case.model.moe.shared_ffn):
        given = f"moe_shared_expert_overlap=true dispatcher={case.layout.dispatcher}"
        yield Problem(given, "shared experts run beside the all-to-all", "dispatcher=alltoall, or moe_shared_expert_overlap=false")


@rule("E17", _CONFIG, only=MEGATRONS)
def router_padding_needs_quantisation(case: Case) -> Iterator[Problem]:
    wide = case.layout.precision in ("bf16", "fp16", "fp32")
    if case.settings.get("moe_router_padding_for_quantization") and (wide or case.layout.dispatcher == "allgather"):
        given = f"moe_router_padding_for_quantization=true precision={case.layout.precision} dispatcher={case.layout.dispatcher}"
        yield Problem(given, "tokens are padded for FP8 or FP4 products, not for gathering", "moe_router_padding_for_quantization=false")


@rule("E18", _CONFIG, only=MEGATRONS)
def every_auxiliary_loss_has_a_coefficient(case: Case) -> Iterator[Problem]:
    kinds, weights = case.settings.get("moe_router_load_balancing_type"), case.settings.get("moe_aux_loss_coeff")
    if isinstance(kinds, (list, tuple)) and (not isinstance(weights, (list, tuple)) or len(weights) != len(kinds)):
        yield Problem(f"{len(kinds)} auxiliary losses, moe_aux_loss_coeff={weights}", "each has its own", f"a list of {len(kinds)} numbers")


@rule("E19", f"{_CONFIG}; Megatron Bridge comm_overlap", titan=None)
def overlapped_dispatch_is_possible(case: Case) -> Iterator[Problem]:
    layout, model = case.layout, case.model
    if not layout.overlap_moe or model is None:
        return
    problems = []
    if model.moe is None or layout.ep == 1:
        problems.append(("no experts on several ranks", "ep=2 or more"))
    if layout.dispatcher == "allgather":
        problems.append(("dispatcher=allgather", "dispatcher=alltoall"))
    if layout.precision == "fp32":
        problems.append(("precision=fp32", "precision=bf16"))
    if layout.pp > 1 and layout.vpp == 1:
        problems.append((f"pp={layout.pp} without virtual stages", "vpp=2 or more"))
    if layout.recompute.granularity == "full" or "moe" in layout.recompute.modules:
        problems.append((f"recompute={layout.recompute}", "recompute=selective:moe_act"))
    if case.settings.get("moe_shared_expert_overlap"):
        problems.append(("moe_shared_expert_overlap=true", "one of the two overlaps"))
    if len(model.mtp) > 1:
        problems.append((f"{len(model.mtp)} MTP layers", "at most one"))
    for given, instead in problems:
        yield Problem(
            f"overlap_moe=true with {given}",
            "micro batches are interleaved to hide the expert all-to-all",
            f"{instead}, or overlap_moe=false",
        )
    if case.settings.get("delay_wgrad_compute") and problems:  # E20
        yield Problem("delay_wgrad_compute=true", "it needs the overlap of the expert all-to-all", "delay_wgrad_compute=false")


@rule("E20", _CONFIG, only=MEGATRONS)
def delayed_gradients_need_the_overlap(case: Case) -> Iterator[Problem]:
    if case.settings.get("delay_wgrad_compute") and not case.layout.overlap_moe:
        yield Problem("delay_wgrad_compute=true overlap_moe=false", "it delays gradients behind that overlap", "overlap_moe=true")


@rule("E21", _CONFIG, severity="warning", only=MEGATRONS)
def many_experts_need_a_wide_router(case: Case) -> Iterator[Problem]:
    moe = case.model.moe if case.model else None
    if moe and moe.experts >= 32 and "moe_router_dtype" in case.settings and case.settings["moe_router_dtype"] is None:
        yield Problem(f"{moe.experts} experts, moe_router_dtype unset", "scores of many experts tie in 16 bits", "moe_router_dtype=fp32")


@rule("E22", "Megatron-LM validate_args", only=MEGATRONS)
def grouped_products_need_ampere(case: Case) -> Iterator[Problem]:
    gpu = case.cluster.gpu if case.cluster else None
    if gpu and gpu.capability and gpu.capability < (8, 0) and case.settings.get("moe_grouped_gemm"):
        yield Problem(f"moe_grouped_gemm=true on {gpu.name}", "it needs compute capability 8", "moe_grouped_gemm=false")


@rule("E23", "Megatron Core TopKRouter", only=MEGATRONS)
def sinkhorn_has_no_auxiliary_loss(case: Case) -> Iterator[Problem]:
    if case.settings.get("moe_router_load_balancing_type") == "sinkhorn" and case.settings.get("moe_aux_loss_coeff"):
        yield Problem("sinkhorn routing with moe_aux_loss_coeff", "sinkhorn balances by itself", "moe_aux_loss_coeff=0")


@rule("E24", "Megatron Core moe_router_force_load_balancing", severity="warning", only=MEGATRONS)
def forced_balance_is_for_benchmarks(case: Case) -> Iterator[Problem]:
    if case.settings.get("moe_router_force_load_balancing"):
        yield Problem("moe_router_force_load_balancing=true", "tokens no longer go where the router sends them", "false for a real run")


@rule("E25", "Megatron Bridge, guide to parallelism strategies, MoE parallelism", severity="info")
def expert_dispatch_leaves_the_domain(case: Case) -> Iterator[Problem]:
    layout, cluster = case.layout, case.cluster
    if cluster and case.model and case.model.moe and layout.ep * layout.etp > cluster.domain:
        given = f"ep={layout.ep} etp={layout.etp}, {cluster.intra.name} domain of {cluster.domain} GPUs"
        inside = [ep for ep in divisors(layout.ep) if ep * layout.etp <= cluster.domain]
        yield Problem(
            given, "tokens of every MoE layer cross the network", f"{listed('ep', nearest(inside, layout.ep, 1))} with more pp, if it fits"
        )


@rule(
    "E26",
    "Megatron Core ModelParallelConfig.__post_init__; Megatron Bridge _set_moe_expert_tensor_parallel_default",
    severity="info",
    only=(BRIDGE,),
)
def expert_tensor_default_differs(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if "expert_tensor_parallel_size" in case.settings and case.settings["expert_tensor_parallel_size"] is None and layout.tp > 1:
        why = "Megatron Bridge takes 1 when EP > 1, Megatron Core takes TP"
        yield Problem(f"expert_tensor_parallel_size unset, tp={layout.tp} ep={layout.ep}", why, "expert_tensor_parallel_size=1")

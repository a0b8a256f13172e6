"""Worlds, meshes, data parallel sizes and the batch (W rules, B1)."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planner.rules.alternatives import divisors, listed, multiples, nearest
from shardwise.planner.rules.rule import BRIDGE, MEGATRONS, TITAN, Case, Problem, rule
from shardwise.spec.ranks import max_world, min_world, product_world

DEGREES = ("tp", "cp", "dp", "pp", "ep", "etp", "vpp", "mbs", "gbs")
_INIT = "Megatron Core parallel_state.initialize_model_parallel"


def _worlds(case: Case) -> tuple[str, str]:
    """Why a world of this size is wrong, and which worlds are right."""
    layout = case.layout
    least = min_world(layout)
    dense, expert = layout.tp * layout.cp, layout.ep * layout.etp
    why = f"the smallest world is {least} = PP*lcm(TP*CP, EP*ETP) = {layout.pp}*lcm({dense}, {expert}), and every multiple of it works"
    if product_world(layout) != least:
        why += f"; PP*TP*CP*EP*ETP = {product_world(layout)} is not it"
    if max_world(layout) != least:
        why += f"; PP*max(TP*CP, EP*ETP) = {max_world(layout)} is too small"
    return why, f"{' or '.join(str(world) for world in multiples(least, case.world))} GPUs"


@rule("W4", "Megatron Bridge benchmark_parallelism._validate_positive_sizes")
def degrees_are_positive(case: Case) -> Iterator[Problem]:
    for name in DEGREES:
        value = getattr(case.layout, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield Problem(f"{name}={value}", "a degree or batch size counts ranks or samples", f"{name}=1 or more")
    if case.seq_len is not None and case.seq_len < 1:
        yield Problem(f"seq_len={case.seq_len}", "a sequence has tokens", "seq_len=1 or more")


@rule("W1", f"{_INIT}; Megatron Bridge ConfigContainer.get_data_parallel_size; torchtitan ParallelDims._validate")
def dense_mesh_tiles_the_world(case: Case) -> Iterator[Problem]:
    layout = case.layout
    mesh = layout.tp * layout.cp * layout.pp
    given = f"{case.world} GPUs, tp={layout.tp} cp={layout.cp} pp={layout.pp}"
    if case.world % mesh:
        why, instead = _worlds(case)
        if case.world > 1:
            products = ", ".join(str(each) for each in nearest(divisors(case.world), mesh))
            instead += f", or degrees with TP*CP*PP of {products}"
        yield Problem(given, f"{case.world} is no multiple of TP*CP*PP = {mesh}; {why}", instead)
    elif layout.world != case.world:
        right = case.world // mesh
        yield Problem(
            f"{given} dp={layout.dp}", f"TP*CP*PP*DP = {layout.world}, the world has {case.world}", f"dp={right}, or leave dp out"
        )


@rule("W2", f"{_INIT}; Megatron Bridge _create_pg_collection", titan=None)
def expert_mesh_tiles_the_world(case: Case) -> Iterator[Problem]:
    layout = case.layout
    mesh = layout.pp * layout.ep * layout.etp
    if layout.ep * layout.etp > 1 and case.world % mesh:
        given = f"{case.world} GPUs, pp={layout.pp} ep={layout.ep} etp={layout.etp}"
        why, instead = _worlds(case)
        per_stage = case.world // layout.pp
        smaller = [ep for ep in divisors(layout.ep) if per_stage and per_stage % (ep * layout.etp) == 0 and case.world % layout.pp == 0]
        if smaller:
            instead += f", or {listed('ep', nearest(smaller, layout.ep, 2))}"
        yield Problem(given, f"{case.world} is no multiple of PP*EP*ETP = {mesh}; {why}", instead)


@rule("TT2", "torchtitan ParallelDims._validate", only=(TITAN,))
def experts_divide_the_shard_mesh(case: Case) -> Iterator[Problem]:
    """EP never crosses replicas or stages: it divides dp_shard * cp * tp. There is no expert tensor parallel axis."""
    layout = case.layout
    if layout.etp > 1:
        yield Problem(f"etp={layout.etp}", "torchtitan has no expert tensor parallel axis", "etp=1")
    shard = max(1, layout.shard_group or layout.dp * layout.cp)
    mesh = shard * layout.tp
    if layout.ep > 1 and mesh % layout.ep:
        instead = listed("ep", nearest(divisors(mesh), layout.ep))
        yield Problem(f"ep={layout.ep}, dp_shard*cp*tp={mesh}", "EP must divide dp_shard*cp*tp", instead)


@rule("W5", "Megatron Core RankGenerator", only=MEGATRONS)
def rank_order_names_every_axis(case: Case) -> Iterator[Problem]:
    order, layout = case.settings.get("order"), case.layout
    if not isinstance(order, str):
        return
    named = order.split("-")
    missing = [name for name in ("tp", "cp", "ep", "dp", "pp") if getattr(layout, name) > 1 and name not in named]
    if missing:
        yield Problem(f"order={order}", f"{', '.join(missing)} above 1 have no place in it", "order=tp-cp-ep-dp-pp")


@rule("W7", _INIT, only=MEGATRONS)
def stages_are_the_same_ranks_in_both_meshes(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if case.settings.get("use_tp_pp_dp_mapping") and layout.pp > 1 and layout.dp != layout.edp:
        given = f"use_tp_pp_dp_mapping=true, pp={layout.pp}, DP {layout.dp}, expert DP {layout.edp}"
        why = "with pp before dp in the rank order the pipeline groups of the two meshes differ unless DP equals expert DP"
        yield Problem(given, why, "use_tp_pp_dp_mapping=false")


@rule("W9", _INIT)
def shard_groups_divide_the_data_ranks(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if layout.shard_group is None or layout.sharding == "none":
        return
    ranks = layout.dp * layout.cp
    if layout.shard_group < 1 or ranks % layout.shard_group:
        instead = listed("shard_group", nearest(divisors(ranks), layout.shard_group))
        yield Problem(f"shard_group={layout.shard_group}, DP*CP={ranks}", "a shard group must divide the data ranks", instead)
    elif case.model and case.model.moe and layout.edp % (ranks // layout.shard_group):
        copies = ranks // layout.shard_group
        legal = [ranks // each for each in divisors(ranks) if layout.edp % each == 0]
        why = f"{copies} copies of the state also have to divide the expert data ranks"
        yield Problem(
            f"shard_group={layout.shard_group}, expert DP={layout.edp}", why, listed("shard_group", nearest(legal, layout.shard_group))
        )


@rule("W10", "Megatron Core DistributedDataParallel")
def shard_groups_need_sharding(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if layout.shard_group is not None and layout.sharding == "none":
        yield Problem(f"shard_group={layout.shard_group} sharding=none", "nothing is sharded", "sharding=distributed_optimizer")


@rule("W12", "Megatron Bridge _validate_and_apply_megatron_fsdp_v1_configs", only=(BRIDGE,))
def megatron_fsdp_needs_the_default_order(case: Case) -> Iterator[Problem]:
    if case.settings.get("use_tp_pp_dp_mapping") and case.layout.sharding in ("megatron_fsdp", "zero2"):
        yield Problem("use_tp_pp_dp_mapping=true with Megatron FSDP", "they exclude each other", "use_tp_pp_dp_mapping=false")


@rule("W13", "Megatron Bridge initialize._set_random_seed", only=MEGATRONS)
def seed_is_positive(case: Case) -> Iterator[Problem]:
    seed = case.settings.get("seed")
    if isinstance(seed, int) and seed <= 0:
        yield Problem(f"seed={seed}", "a seed must be above 0", "seed=1234")


@rule("W14", "Megatron-LM main, tensor_parallel_num_weight_shards", only=MEGATRONS)
def weight_shards_equal_tensor_parallel(case: Case) -> Iterator[Problem]:
    shards = case.count("tensor_parallel_num_weight_shards")
    if shards is not None and shards != case.layout.tp:
        why = "weight shards other than the tensor parallel size are a further axis that layouts do not describe"
        yield Problem(
            f"tensor_parallel_num_weight_shards={shards}, tp={case.layout.tp}", why, f"tensor_parallel_num_weight_shards={case.layout.tp}"
        )


@rule("B1", "Megatron Core ConstantNumMicroBatchesCalculator; torchtitan trainer")
def batch_divides(case: Case) -> Iterator[Problem]:
    """Rounded down instead with `decrease_batch_size_if_needed` (B2)."""
    layout = case.layout
    step = layout.mbs * layout.dp
    if layout.gbs % step == 0:
        return
    given = f"gbs={layout.gbs} mbs={layout.mbs} dp={layout.dp}"
    legal_mbs = [mbs for mbs in divisors(layout.gbs) if layout.gbs % (mbs * layout.dp) == 0]
    instead = listed("gbs", multiples(step, layout.gbs))
    if legal_mbs:
        instead += ", or " + listed("mbs", nearest(legal_mbs, layout.mbs, 2))
    if case.settings.get("decrease_batch_size_if_needed") and layout.gbs > step:
        yield Problem(given, f"the global batch is rounded down to {layout.gbs // step * step}", instead, "warning")
    else:
        yield Problem(given, f"the global batch is no multiple of MBS*DP = {step}", instead)

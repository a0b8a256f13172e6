"""Pipeline and virtual pipeline (P rules)."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.errors import LayoutError
from shardwise.planner.rules.alternatives import closest, legal_pp, listed, multiples, nearest
from shardwise.planner.rules.rule import BRIDGE, MEGATRON, MEGATRONS, SHARDWISE, TITAN, Case, Problem, rule
from shardwise.spec import pipeline_layout, stages
from shardwise.spec.layout import Layout

_BUILD = "Megatron Core get_num_layers_to_build"
_CONFIG = "Megatron Core TransformerConfig.__post_init__"
_SCHEDULE = "Megatron Core forward_backward_pipelining_with_interleaving"
_SCHEDULES: dict[str, tuple[str, ...]] = {
    MEGATRON: ("1f1b",),
    BRIDGE: ("1f1b",),
    TITAN: ("gpipe", "1f1b", "zb-h1", "zbv", "dualpipev"),
    SHARDWISE: ("gpipe", "1f1b", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev"),
}
# stages per rank a schedule works with; None = any
_STAGES_PER_RANK = {"gpipe": None, "1f1b": None, "zb-h1": 1, "zb-h2": 1, "zbv": 2, "dualpipe": 1, "dualpipev": 2}


def _pins(layout: Layout) -> bool:
    return layout.first_stage_layers is not None or layout.last_stage_layers is not None


def _counted(layout: Layout) -> int:
    return layout.account_for_embedding + layout.account_for_loss


def _units(layers: int, counted: int) -> str:
    return f"{layers} layers" + (f" and {counted} counted as a layer" if counted else "")


@rule("P1", "Megatron Core ModelParallelConfig.__post_init__", only=(MEGATRON,))
def pipeline_needs_its_dtype(case: Case) -> Iterator[Problem]:
    if case.layout.pp > 1 and "pipeline_dtype" in case.settings and case.settings["pipeline_dtype"] is None:
        yield Problem(f"pp={case.layout.pp} pipeline_dtype=null", "activations sent between stages need a dtype", "pipeline_dtype=bf16")


@rule("P2", f"{_BUILD}; Megatron-LM validate_args", only=MEGATRONS, bridge="warning")
def layers_split_evenly(case: Case) -> Iterator[Problem]:
    """Also P11: with the embedding or the loss counted as a layer, layers plus these split evenly."""
    layout = case.layout
    if case.model is None or layout.pipeline_layout or _pins(layout) or layout.pp == 1:
        return
    layers, counted = case.model.num_layers, _counted(layout)
    if (layers + counted) % layout.stages == 0:
        return
    given = f"{_units(layers, counted)}, pp={layout.pp} vpp={layout.vpp}"
    fixes = []
    same_vpp = [pp for pp in legal_pp(layers, layout.vpp, counted, 4 * layout.pp) if pp > 1 and pp != layout.pp]
    if same_vpp:
        fixes.append(listed("pp", nearest(same_vpp, layout.pp, 2)))
    same_pp = [vpp for vpp in range(1, layers // layout.pp + 1) if (layers + counted) % (layout.pp * vpp) == 0]
    if same_pp:
        fixes.append(listed("vpp", nearest(same_pp, layout.vpp, 2)))
    for more in (1, 2):
        if counted == 0 and (layers + more) % layout.stages == 0:
            names = "account_for_loss=true" if more == 1 else "account_for_embedding=true account_for_loss=true"
            fixes.append(names)
    try:
        words = pipeline_layout.unparse(pipeline_layout.from_counts(stages.layer_counts(layout, layers), len(case.model.mtp)))
        fixes.append(f"pipeline_layout='{words}'")
    except LayoutError:
        fixes.append("fewer stages")
    why = f"{layers + counted} do not split over {layout.stages} stages; Megatron refuses the plain split and takes an explicit one"
    yield Problem(given, why, ", or ".join(fixes))


@rule("P2u", "shardwise.spec.stages", severity="info", only=(SHARDWISE,))
def layers_split_unevenly(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if case.model is None or layout.pipeline_layout or _pins(layout) or layout.pp == 1:
        return
    try:
        counts = stages.layer_counts(layout, case.model.num_layers)
    except LayoutError:
        return
    if (case.model.num_layers + _counted(layout)) % layout.stages:
        shown = " ".join(str(count) for count in counts)
        yield Problem(
            f"{case.model.num_layers} layers, {layout.stages} stages", f"stages get {shown} layers", "pipeline_layout=... for another split"
        )


@rule("P3", "Megatron Core parallel_state.initialize_model_parallel")
def virtual_stages_need_a_pipeline(case: Case) -> Iterator[Problem]:
    if case.layout.vpp > 1 and case.layout.pp == 1:
        yield Problem(f"vpp={case.layout.vpp} pp=1", "virtual stages interleave pipeline ranks", "vpp=1, or pp=2 or more")


@rule("P4", "Megatron-LM validate_args", only=(MEGATRON,))
def interleaving_without_overlap_needs_three_ranks(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if layout.vpp > 1 and layout.pp == 2 and not layout.overlap_p2p:
        yield Problem("vpp>1 pp=2 overlap_p2p=false", "both neighbours are the same rank", "overlap_p2p=true, or pp=4")


@rule("P6", "Megatron Core ModelParallelConfig.__post_init__", only=MEGATRONS)
def pipeline_messages_overlap_or_batch(case: Case) -> Iterator[Problem]:
    settings = case.settings
    if settings.get("overlap_p2p_comm") and settings.get("batch_p2p_comm"):
        yield Problem("overlap_p2p_comm=true batch_p2p_comm=true", "messages are overlapped or batched, not both", "batch_p2p_comm=false")
    if settings.get("overlap_p2p_comm_warmup_flush") and (not case.layout.overlap_p2p or settings.get("batch_p2p_comm")):
        yield Problem("overlap_p2p_comm_warmup_flush=true", "it needs overlap_p2p_comm without batch_p2p_comm", "overlap_p2p_comm=true")


@rule("P7", _SCHEDULE)
def interleaved_group_fits(case: Case) -> Iterator[Problem]:
    """And P8: the rest of the micro batches is none or enough to fill the pipeline."""
    layout = case.layout
    if layout.vpp == 1 or layout.pp == 1 or layout.schedule != "1f1b":
        return
    group, micro = layout.vpp_group or layout.pp, layout.microbatches
    step = layout.mbs * layout.dp
    given = f"{micro} micro batches (gbs={layout.gbs} mbs={layout.mbs} dp={layout.dp}), pp={layout.pp} vpp={layout.vpp}, groups of {group}"

    def fills(size: int) -> bool:
        return micro % size == 0 or micro % size >= layout.pp

    if micro < layout.pp:
        yield Problem(given, f"interleaving needs as many micro batches as ranks, {layout.pp}", f"gbs={layout.pp * step} or more, or vpp=1")
    elif not layout.pp <= group <= micro:
        why = f"interleaving runs groups of {layout.pp} to M={micro} micro batches"
        yield Problem(given, why, f"{listed('vpp_group', closest(fills, layout.pp, micro, group, 2))}, or vpp=1")
    elif not fills(group):
        legal = [size * step for size in multiples(group, micro)]
        why = f"the last {micro % group} micro batches are too few to fill {layout.pp} ranks"
        yield Problem(given, why, f"{listed('vpp_group', closest(fills, layout.pp, micro, group, 1))}, or {listed('gbs', legal)}, or vpp=1")


@rule("P9", _CONFIG)
def pinned_stages_leave_an_even_rest(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if case.model is None or layout.pipeline_layout or not _pins(layout):
        return
    layers = case.model.num_layers
    try:
        stages.layer_counts(layout, layers)
    except LayoutError as error:
        yield from (Problem(finding.given, finding.why, finding.try_) for finding in error.findings)
        return
    if case.framework not in MEGATRONS:
        return
    pins = [pin for pin in (layout.first_stage_layers, layout.last_stage_layers) if pin is not None]
    rest, middle = layers - sum(pins), layout.pp - len(pins)
    given = f"{layers} layers, pp={layout.pp} vpp={layout.vpp}, pinned {pins}"
    if middle and rest % middle:
        yield Problem(given, f"the other {rest} layers do not split over {middle} stages", f"pins that leave a multiple of {middle}")
    elif any(count % layout.vpp for count in (*pins, rest // middle if middle else 0)):
        yield Problem(given, "the layers of a rank do not split over its virtual stages", "vpp=1, or counts that vpp divides")


@rule("P10", _CONFIG)
def pins_and_counted_ends_exclude_each_other(case: Case) -> Iterator[Problem]:
    layout = case.layout
    named = [name for name in ("first_stage_layers", "last_stage_layers") if getattr(layout, name) is not None]
    counted = [name for name in ("account_for_embedding", "account_for_loss") if getattr(layout, name)]
    if named and counted:
        yield Problem(" ".join((*named, *counted)), "pinned stages are not cut again", f"only {' '.join(named)}")
    if layout.pipeline_layout and (named or counted):  # P12
        yield Problem(" ".join(("pipeline_layout", *named, *counted)), "a pipeline layout says everything", "only pipeline_layout")


@rule("P13", "Megatron Core PipelineParallelLayerLayout")
def pipeline_layout_is_complete(case: Case) -> Iterator[Problem]:
    layout, words = case.layout, case.layout.pipeline_layout
    if words is None:
        return
    given = f"pipeline layout of {len(words)} stages, pp={layout.pp} vpp={layout.vpp}"
    if len(words) != layout.stages:
        fits = len(words) % layout.pp == 0
        instead = f"vpp={len(words) // layout.pp}" if fits else f"a number of stages that pp={layout.pp} divides"
        yield Problem(given, f"the stages are not pp*vpp = {layout.stages}", instead)
        return
    everything = "".join(words)
    if everything.count("E") != 1 or not words[0].startswith("E"):
        yield Problem(given, "one E must come first", "E as the first letter")
    if everything.count("L") != 1 or not words[-1].endswith("L"):
        yield Problem(given, "one L must come last", "L as the last letter")
    holders = [s for s, word in enumerate(words) if "m" in word]
    if holders and (len(holders) > 1 or "t" in everything[everything.index("m") :] or holders[0] // layout.pp != layout.vpp - 1):
        yield Problem(given, "MTP layers sit together after all decoder layers, in the last virtual stage of their rank", "m just before L")
    if case.model is None:
        return
    if everything.count("t") != case.model.num_layers:
        yield Problem(
            given, f"it places {everything.count('t')} decoder layers of {case.model.num_layers}", f"{case.model.num_layers} t in all"
        )
    depth = len(case.model.mtp)
    if everything.count("m") not in (0, depth) and depth:
        yield Problem(given, f"it places {everything.count('m')} MTP layers of {depth}", f"{depth} m")


@rule("P16", "Megatron-LM validate_args", only=(MEGATRON,))
def one_way_to_say_virtual_stages(case: Case) -> Iterator[Problem]:
    names = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout")
    given = [name for name in names if case.settings.get(name) is not None]
    if len(given) > 1:
        yield Problem(", ".join(given), "they say the same thing", f"only {given[-1]}")


@rule("P18", "Megatron Core ModelParallelConfig.__post_init__", only=MEGATRONS)
def deferred_embedding_gradient_needs_a_pipeline(case: Case) -> Iterator[Problem]:
    settings = case.settings
    if settings.get("defer_embedding_wgrad_compute") and (case.layout.pp == 1 or settings.get("gradient_accumulation_fusion") is False):
        given = f"defer_embedding_wgrad_compute=true pp={case.layout.pp}"
        yield Problem(given, "it fills pipeline bubbles and needs gradient_accumulation_fusion", "defer_embedding_wgrad_compute=false")


@rule("P20", "Megatron Core parallel_state.initialize_model_parallel", only=MEGATRONS)
def pipeline_backend_is_known(case: Case) -> Iterator[Problem]:
    backend = case.settings.get("pipeline_model_parallel_comm_backend")
    if backend not in (None, "nccl", "ucc"):
        yield Problem(f"pipeline_model_parallel_comm_backend={backend}", "the backend is not known", "nccl or ucc")
    elif backend == "ucc" and str(case.settings.get("CUDA_DEVICE_MAX_CONNECTIONS")) == "1":
        yield Problem("ucc with CUDA_DEVICE_MAX_CONNECTIONS=1", "ucc needs more than one connection", "CUDA_DEVICE_MAX_CONNECTIONS=32")


# (pp, vpp) that the recipe of a model has a pipeline layout for
_OWN_LAYOUTS = {
    "olmoe-1b-7b": ((1, 1), (2, 1), (4, 1), (2, 2)),
    "moonlight-16b-a3b": ((1, 1), (2, 1), (4, 1), (2, 2), (8, 1), (4, 2)),
}


@rule("P22", "Megatron Bridge sync_model_pipeline_layout and the recipes", severity="warning", only=(BRIDGE,))
def recipes_with_own_layouts(case: Case) -> Iterator[Problem]:
    known = _OWN_LAYOUTS.get(case.model.name) if case.model else None
    if known and case.layout.pipeline_layout is None and (case.layout.pp, case.layout.vpp) not in known:
        pairs = ", ".join(f"pp={pp} vpp={vpp}" for pp, vpp in known)
        yield Problem(
            f"pp={case.layout.pp} vpp={case.layout.vpp}",
            "the recipe has no pipeline layout for this pair",
            f"one of {pairs}, or pipeline_layout=...",
        )


@rule("P23", "torchtitan models/common/decoder.py", only=(TITAN,))
def tied_embeddings_stay_on_one_stage(case: Case) -> Iterator[Problem]:
    if case.model and case.model.tied and case.layout.pp > 1:
        yield Problem(
            f"tied embeddings, pp={case.layout.pp}", "torchtitan does not share weights between stages", "pp=1, or an untied head"
        )


@rule("P24", "schedules of each framework; torchtitan pipeline_parallel.py")
def schedule_is_available(case: Case) -> Iterator[Problem]:
    layout = case.layout
    known = _SCHEDULES[case.framework]
    if layout.schedule not in known:
        yield Problem(f"schedule={layout.schedule}", f"{case.framework} has no such schedule", f"schedule={' or '.join(known)}")
    needed = _STAGES_PER_RANK[layout.schedule]
    if needed and layout.pp > 1 and layout.vpp != needed:
        why = f"{layout.schedule} puts {needed} stage{'s' if needed > 1 else ''} on a rank"
        yield Problem(f"schedule={layout.schedule} vpp={layout.vpp}", why, f"vpp={needed}")


@rule("P25", "torchtitan pipeline_parallel.py", severity="warning")
def enough_micro_batches(case: Case) -> Iterator[Problem]:
    """1F1B with M micro batches idles (P - 1) / M of the ideal time, divided by the virtual stages."""
    layout = case.layout
    if layout.pp > 1 and layout.microbatches < layout.pp:
        idle = (layout.pp - 1) / (max(1, layout.microbatches) * layout.vpp)
        given = f"{layout.microbatches} micro batches, pp={layout.pp} vpp={layout.vpp}"
        instead = f"gbs={layout.pp * layout.mbs * layout.dp} or more, or fewer stages"
        yield Problem(given, f"fewer micro batches than ranks: the pipeline idles {idle:.0%} of its busy time", instead)


@rule("P26", "torchtitan pipeline_parallel.py", only=(TITAN, SHARDWISE))
def stages_do_not_outnumber_layers(case: Case) -> Iterator[Problem]:
    layout = case.layout
    if case.model is None or layout.pipeline_layout or _pins(layout):
        return
    most = case.model.num_layers + 2  # the embedding and the loss may have a stage of their own
    if layout.stages > most:
        yield Problem(f"{case.model.num_layers} layers, {layout.stages} stages", "more stages than layers", f"pp*vpp of {most} at most")

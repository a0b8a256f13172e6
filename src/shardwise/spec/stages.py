"""Which layers are on which pipeline stage, and what each stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import Finding, LayoutError
from shardwise.spec.blocks import Params
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec

V_SCHEDULES = ("zbv", "dualpipev")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One virtual pipeline stage. Stages are numbered in the order a token passes them."""

    index: int
    rank: int  # pipeline rank that runs it
    layers: range  # indices of its layers
    embedding: bool = False
    head: bool = False
    mtp: int = 0  # MTP layers


def rank_of_stage(layout: Layout, stage: int) -> int:
    """Pipeline rank of a virtual stage: round robin, or down and up again for V schedules."""
    chunk, place = divmod(stage, layout.pp)
    return layout.pp - 1 - place if layout.schedule in V_SCHEDULES and chunk % 2 else place


def even_counts(units: int, stages: int) -> list[int]:
    """`units` over `stages`, sizes differ by at most one; what is over goes to middle stages first, since the ends hold more."""
    counts = [units // stages] * stages
    order = [*range(stages - 2, 0, -1), 0, stages - 1]
    for stage in order[: units % stages]:
        counts[stage] += 1
    return counts


def _refuse(rule: str, given: str, why: str, try_: str) -> LayoutError:
    source = "Megatron Core get_num_layers_to_build"
    return LayoutError([Finding(rule=rule, severity="error", given=given, why=why, try_=try_, source=source)])


def _pinned_counts(layout: Layout, num_layers: int) -> list[int]:
    """Layers per pipeline rank with the first and the last one pinned."""
    first, last = layout.first_stage_layers, layout.last_stage_layers
    pins = [pin for pin in (first, last) if pin is not None]
    free, left = layout.pp - len(pins), num_layers - sum(pins)
    given = f"{num_layers} layers, pp={layout.pp}, first stage {first or 'free'}, last stage {last or 'free'}"
    if min(pins) < 1:
        raise _refuse("P9", given, "a pinned stage needs at least one layer", "a pin of 1 or more")
    if free < 0 or left < 0 or (free == 0) != (left == 0) or left < free:
        total = " + ".join(str(pin) for pin in pins)
        why = f"pinned layers {total} = {sum(pins)} leave {left} of {num_layers} layers for {max(free, 0)} other stages"
        raise _refuse("P9", given, why, f"pins that leave at least one layer for each of the other stages, {num_layers} in all")
    middle = even_counts(left, free) if free else []
    return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def _refuse_more_stages(layout: Layout, num_layers: int) -> None:
    """One or two stages may be without layers, those of the embedding and the loss."""
    if layout.stages > num_layers + 2:
        given = f"{num_layers} layers, pp={layout.pp}, vpp={layout.vpp}"
        raise _refuse("P2", given, f"{layout.stages} stages are more than the layers", f"pp * vpp of at most {num_layers + 2}")


def layer_counts(layout: Layout, num_layers: int) -> list[int]:
    """Layers of each virtual stage. Raises `LayoutError` when the layers cannot be laid out that way."""
    if layout.pipeline_layout is not None:
        return [word.count("t") for word in layout.pipeline_layout]
    if layout.first_stage_layers is not None or layout.last_stage_layers is not None:
        pinned = _pinned_counts(layout, num_layers)
        _refuse_more_stages(layout, num_layers)
        per_rank = [even_counts(count, layout.vpp) for count in pinned]
        return [per_rank[rank_of_stage(layout, s)][s // layout.pp] for s in range(layout.stages)]
    _refuse_more_stages(layout, num_layers)
    # a stage of the embedding or the loss alone: when stages are cut so, or when there are one or two stages too many
    extra_last = layout.account_for_loss or layout.stages > num_layers
    extra_first = layout.account_for_embedding or layout.stages > num_layers + 1
    counts = even_counts(num_layers + extra_first + extra_last, layout.stages)
    counts[0] -= extra_first
    counts[-1] -= extra_last
    return counts


def split(layout: Layout, num_layers: int, mtp: int = 0) -> tuple[Stage, ...]:
    """The pp * vpp stages of a model in token order; every layer is on exactly one of them.

    Explicit pipeline layouts, pinned ends and counted embedding or loss are followed; otherwise sizes differ by at most one.
    """
    counts = layer_counts(layout, num_layers)
    words = layout.pipeline_layout
    if sum(counts) != num_layers or len(counts) != layout.stages:
        given = f"{num_layers} layers, pp={layout.pp}, vpp={layout.vpp}, layout of {len(counts)} stages with {sum(counts)} layers"
        raise _refuse("P13", given, "the pipeline layout must place every layer once", f"{layout.stages} stages with {num_layers} t")
    result, start = [], 0
    for s, count in enumerate(counts):
        ends = (s == 0, s == layout.stages - 1, mtp if s == layout.stages - 1 else 0)
        if words is not None:
            ends = ("E" in words[s], "L" in words[s], words[s].count("m"))
        layers = range(start, start + count)
        result.append(Stage(index=s, rank=rank_of_stage(layout, s), layers=layers, embedding=ends[0], head=ends[1], mtp=ends[2]))
        start += count
    return tuple(result)


def stage_params(model: ModelSpec, layout: Layout, stage: Stage) -> Params:
    """Parameters of one stage on one rank. A tied embedding exists on the first and on the last stage; MTP needs its own copy too."""
    degrees = (layout.tp, layout.ep, layout.etp)
    count = model.layers_params(stage.layers, *degrees)
    dense = 0
    if stage.embedding or stage.mtp:
        dense += model.embedding_params_on_rank(layout.tp)
    if stage.head:
        dense += model.final_norm * model.norm_params + model.other_params
        if not (model.tied and stage.embedding):
            dense += model.head_params_on_rank(layout.tp)
    if stage.mtp:
        count = count.plus(model.mtp_params(*degrees))
    return count.plus(Params(dense))


def rank_params(model: ModelSpec, layout: Layout) -> tuple[Params, ...]:
    """Parameters one rank of each pipeline rank holds, all its virtual stages together."""
    cut = split(layout, model.num_layers, len(model.mtp))
    held = [Params(0)] * layout.pp
    for stage in cut:
        ranks = {stage.rank}
        if layout.schedule == "dualpipe":  # both directions: every stage also lives on the mirrored rank
            ranks.add(layout.pp - 1 - stage.rank)
        for rank in ranks:
            held[rank] = held[rank].plus(stage_params(model, layout, stage))
    return tuple(held)

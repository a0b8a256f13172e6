"""Parameters of each pipeline stage, and a better cut where the heaviest one stands out."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import Finding
from shardwise.planner.stage_search import StageCosts, cheapest
from shardwise.spec import pipeline_layout
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec
from shardwise.spec.stages import split, stage_params

WORTH = 0.98  # a cut is advised when its heaviest stage is at most this share of the present one


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """Layers and parameters of every pipeline rank, not divided by tensor or expert parallelism."""

    layers: tuple[int, ...]
    parameters: tuple[int, ...]

    @property
    def heaviest(self) -> int:
        return max(self.parameters)

    @property
    def average(self) -> float:
        return sum(self.parameters) / len(self.parameters)


def stage_load(model: ModelSpec, layout: Layout) -> StageLoad:
    """Raises `LayoutError` when the layers cannot be laid out."""
    whole = layout.replace(tp=1, ep=1, etp=1)
    layers, parameters = [0] * layout.pp, [0] * layout.pp
    for stage in split(whole, model.num_layers, len(model.mtp)):
        layers[stage.rank] += len(stage.layers)
        parameters[stage.rank] += stage_params(model, whole, stage).total
    return StageLoad(layers=tuple(layers), parameters=tuple(parameters))


def stage_advice(model: ModelSpec, layout: Layout) -> tuple[Finding, ...]:
    """One finding where another cut makes the heaviest stage clearly lighter, with the weight of the ends in layers as the reason."""
    if layout.pp == 1 or layout.vpp > 1 or layout.schedule not in ("1f1b", "gpipe"):
        return ()
    load = stage_load(model, layout)
    per_layer = [model.layer_params(layer).total for layer in model.layers]
    ends = split(layout.replace(tp=1, ep=1, etp=1), model.num_layers, len(model.mtp))
    extra = [0.0] * layout.pp
    for stage, total in zip(ends, load.parameters):
        extra[stage.rank] = total - sum(per_layer[index] for index in stage.layers)
    best = cheapest(StageCosts(per_layer, extra), lows=[1] * layout.pp)
    if best is None or best.heaviest > WORTH * load.heaviest:
        return ()
    common = max(set(per_layer), key=per_layer.count)
    words = [f"{'E' * (rank == 0)}{'t' * count}" for rank, count in enumerate(best.layers)]
    words[-1] += "m" * len(model.mtp) + "L"
    middle = load.parameters[1:-1]
    above = f", ends {max(load.parameters[0], load.parameters[-1]) / max(middle) - 1:.0%} above the middle" if middle else ""
    return (
        Finding(
            rule="A1",
            severity="info",
            given=f"stages of {list(load.layers)} layers: the heaviest has {load.heaviest / 1e6:,.1f} M parameters",
            why=f"that is {load.heaviest / load.average - 1:.0%} above the average of {load.average / 1e6:,.1f} M{above}; "
            f"the embedding weighs {model.embedding_params / common:.2f} layers, the head {(extra[-1]) / common:.2f}",
            try_=f"pipeline_layout='{pipeline_layout.unparse(tuple(words))}': {list(best.layers)} layers, "
            f"the heaviest {best.heaviest / 1e6:,.1f} M",
            source="exact split of layers over stages by parameters",
        ),
    )

"""`shardwise min-gpus`: the smallest world of a layout, or of a model."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Any

from shardwise.cli import FINDING, OK
from shardwise.cli import options as opt
from shardwise.cli.inputs import (
    counts_in_range,
    follow_model,
    framework_name,
    framework_word,
    in_range,
    read_all,
    read_cluster,
    read_layout,
    read_model,
    read_source,
)
from shardwise.cli.render import print_findings, print_json, print_lines, print_table
from shardwise.errors import Finding, InputError
from shardwise.spec import grammar
from shardwise.spec.ranks import max_world, min_world, product_world

if TYPE_CHECKING:
    from shardwise.spec.layout import Layout
    from shardwise.spec.model import ModelSpec


def min_gpus(
    layout: opt.Words = None,
    model: opt.Model = None,
    gpus: opt.Gpus = None,
    gpu: opt.GpuType = "h100-sxm",
    gpus_per_node: opt.PerNode = None,
    interconnect: opt.Interconnect = None,
    seq_len: opt.SeqLen = 4096,
    global_batch: opt.GlobalBatch = None,
    precision: opt.Precision = None,
    framework: opt.Framework = "bridge",
    as_json: opt.Json = False,
) -> int:
    """Smallest world of LAYOUT (PP * lcm(TP*CP, EP*ETP)) with its data-parallel sizes.

    With --model and no LAYOUT: the fewest GPUs the model trains on, and why fewer do not do. With --gpus: what the layout
    gives on that many.
    """
    if not layout and model is None:
        raise InputError(given="no LAYOUT and no --model", why="there is nothing to size", try_="shardwise min-gpus pp=2 tp=2 ep=8")
    source = read_source(layout or (), world=in_range("gpus", gpus))
    kind, network = source.settings.get("gpu", gpu), source.settings.get("interconnect") if interconnect is None else interconnect
    per_node, samples = in_range("gpus_per_node", gpus_per_node), in_range("global_batch", global_batch)
    name = source.settings.get("framework", framework)
    _, rules, chosen, spec, cluster = read_all(
        lambda: counts_in_range(gpus=gpus, gpus_per_node=gpus_per_node, seq_len=seq_len, global_batch=global_batch),
        lambda: framework_name(name),
        lambda: read_layout(source, world=None, gbs=samples, precision=precision, framework=framework_word(name)),
        lambda: read_model(model, source.settings),
        lambda: read_cluster(kind, 1, gpus_per_node=per_node, interconnect=network),
    )
    chosen = follow_model(chosen, source, spec)
    if not layout:
        from shardwise.cli.min_gpus_model import report

        return report(spec, cluster, seq_len, chosen.replace(gbs=global_batch or 1), rules, limit=gpus, as_json=as_json)
    given = {grammar.field_of(word.partition("=")[0]) for word in source.words}
    return _print(chosen, {str(name) for name in given} if source.layout is None else set(), rules, spec, gpus, as_json)


def _print(layout: Layout, given: set[str], rules: str, model: ModelSpec | None, gpus: int | None, as_json: bool) -> int:
    least = min_world(layout)
    here = layout.with_world(least)
    findings = _findings(layout, model, rules)
    dense, expert = layout.pp * layout.tp * layout.cp, layout.pp * layout.ep * layout.etp
    answer: dict[str, Any] = {
        "min_gpus": least,
        "dp": here.dp,
        "edp": here.edp,
        "dense_mesh": {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ranks": dense},
        "expert_mesh": {"ep": layout.ep, "etp": layout.etp, "pp": layout.pp, "ranks": expert},
        "product": product_world(layout),
        "max_formula": max_world(layout),
        "defaults": [name for name in ("tp", "cp", "pp", "ep", "etp") if name not in given] if given else [],
        "framework": rules,
        "findings": [finding.to_dict() for finding in findings],
    }
    tiles = True
    if gpus is not None:
        tiles = gpus % least == 0
        on = layout.with_world(gpus)
        answer["gpus"] = {"gpus": gpus, "legal": tiles, "dp": on.dp if tiles else None, "edp": on.edp if tiles else None}
        if not tiles:
            answer["gpus"]["nearest"] = [size for size in (gpus // least * least, (gpus // least + 1) * least) if size]
    bad = not tiles or any(finding.severity == "error" for finding in findings)
    if as_json:
        print_json(answer)
        return FINDING if bad else OK
    print_lines(_explain(layout, here, answer))
    rows = [(f"{least * times}", layout.with_world(least * times).dp, layout.with_world(least * times).edp) for times in (1, 2, 4)]
    if gpus is not None and tiles and gpus not in (least, 2 * least, 4 * least):
        rows.append((f"{gpus}", layout.with_world(gpus).dp, layout.with_world(gpus).edp))
    print_table("", ("GPUs", "DP", "expert DP"), rows, text=())
    if gpus is not None and not tiles:
        sizes = " or ".join(str(size) for size in answer["gpus"]["nearest"])
        print_lines([f"{gpus} GPUs: not a multiple of {least}; write {sizes}"])
    print_findings(findings)
    return FINDING if bad else OK


def _explain(layout: Layout, here: Layout, answer: dict[str, Any]) -> list[str]:
    dense, expert = layout.tp * layout.cp, layout.ep * layout.etp
    lines = [
        f"min GPUs {answer['min_gpus']}   (DP {here.dp}, expert DP {here.edp})",
        f"PP * lcm(TP*CP, EP*ETP) = {layout.pp} * lcm({layout.tp}*{layout.cp}, {layout.ep}*{layout.etp}) = "
        f"{layout.pp} * {lcm(dense, expert)} = {answer['min_gpus']}",
        f"TP*CP*PP = {dense * layout.pp} tiles the world for the dense layers, EP*ETP*PP = {expert * layout.pp} for experts: the same GPUs",
        "DP = world / (TP*PP*CP), expert DP = world / (PP*EP*ETP)",
    ]
    if answer["product"] != answer["min_gpus"]:
        lines.append(f"not {answer['product']}: PP*TP*CP*EP*ETP multiplies two views of the same GPUs")
    if answer["max_formula"] != answer["min_gpus"]:
        lines.append(f"not {answer['max_formula']}: PP*max(TP*CP, EP*ETP) is not a multiple of both meshes")
    if answer["defaults"]:
        said = ", ".join(f"{name.upper()}={getattr(layout, name)}" for name in answer["defaults"])
        lines.append(f"not given, taken as: {said}")
    return [*lines, f"rules: {_RULES[answer['framework']]}"]


_RULES = {
    "megatron-core": "Megatron Core (initialize_model_parallel); ETP not given follows TP",
    "bridge": "Megatron Bridge, on Megatron Core's meshes; ETP not given is 1",
    "torchtitan": "torchtitan: EP divides dp_shard*cp*tp; there is no ETP",
    "shardwise": "shardwise, on Megatron Core's meshes; ETP not given is 1",
}


def _findings(layout: Layout, model: ModelSpec | None, rules: str) -> list[Finding]:
    """What the degrees alone already say, and what the model adds."""
    from shardwise.planner.rules import check_degrees

    return list(check_degrees(layout, model=model, framework=rules))

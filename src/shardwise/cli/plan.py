"""`shardwise plan`: ranked layouts of a model on given GPUs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shardwise.cli import FINDING, OK
from shardwise.cli import options as opt

Top = Annotated[int, typer.Option("--top", help="plans to show")]
WhyNot = Annotated[
    str | None, typer.Option("--why-not", help='a layout in quotes, "tp=8 pp=4": why it is not the plan', show_default=False)
]
Fewer = Annotated[bool, typer.Option("--fewer-gpus", help="also the best plan on a half, a quarter, ... of the GPUs")]
Rehearse = Annotated[int, typer.Option("--rehearse", help="run the step of so many best plans on a fake cluster (needs torch)")]
Parameters = Annotated[float | None, typer.Option("--parameters", help="of a traced module, instead of --model", show_default=False)]
Activations = Annotated[
    float | None, typer.Option("--activation-gib", help="of a traced module: GiB saved for backward per sample", show_default=False)
]
Grid = Annotated[str | None, typer.Option("--grid", help="of a traced module: extents, like 2048x2048", show_default=False)]
Flops = Annotated[
    float | None, typer.Option("--flops", help="of a traced module: forward and backward FLOPs per sample", show_default=False)
]
Spatial = Annotated[bool, typer.Option("--spatial-params", help="of a traced module: shard parameters as large as the grid")]


def plan(
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
    top: Top = 5,
    why_not: WhyNot = None,
    fewer_gpus: Fewer = False,
    rehearse: Rehearse = 0,
    html: opt.Html = None,
    trace: opt.Trace = None,
    parameters: Parameters = None,
    activation_gib: Activations = None,
    grid: Grid = None,
    flops: Flops = None,
    spatial_params: Spatial = False,
    as_json: opt.Json = False,
) -> int:
    """Rank the layouts of a model on given GPUs, fastest first, with memory and time term by term.

    LAYOUT words fix a choice (tp=8 keeps the search to TP 8). With --parameters, --activation-gib and --grid instead of
    --model: the ddp x domain split of any traced module.
    """
    from shardwise.cli.inputs import (
        can_write,
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
        refuse_all,
    )
    from shardwise.errors import InputError

    counts: dict[str, int | None] = {
        "gpus": gpus,
        "gpus_per_node": gpus_per_node,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "top": top,
    }
    counts |= {"rehearse": rehearse or None}
    module = {"--parameters": parameters, "--activation-gib": activation_gib, "--grid": grid, "--flops": flops}
    if spatial_params or any(value is not None for value in module.values()):
        from shardwise.cli.plan_domain import plan_module

        read_all(lambda: counts_in_range(**counts), lambda: framework_name(framework))
        others: dict[str, Any] = {
            "--model": model,
            "LAYOUT": layout or None,
            "--precision": precision,
            "--why-not": why_not,
            "--html": html,
            "--trace": trace,
        }
        others |= {"--fewer-gpus": fewer_gpus or None, "--rehearse": rehearse or None}
        if both := [name for name, value in others.items() if value is not None]:
            own = [name for name, value in (module | {"--spatial-params": spatial_params or None}).items() if value is not None]
            raise InputError(
                given=" ".join((*own, *both)),
                why=f"{', '.join(own)} of a traced module and {', '.join(both)} of a model exclude each other",
                try_="one of the two groups",
            )
        return plan_module(
            gpu, gpus, gpus_per_node, interconnect, global_batch, parameters, activation_gib, grid, flops, spatial_params, as_json=as_json
        )
    world, samples, per_node = in_range("gpus", gpus), in_range("global_batch", global_batch), in_range("gpus_per_node", gpus_per_node)
    source = read_source(layout or (), world=world, options=True)
    missing = [name for name, value in (("--model", model), ("--gpus", gpus), ("--global-batch", global_batch)) if value is None]
    if missing or model is None or gpus is None or global_batch is None:
        needed = InputError(
            given="plan without " + ", ".join(missing),
            why="the search needs the model, the number of GPUs and the samples of a step",
            try_="shardwise plan --model llama-3.1-70b --gpus 64 --gpu h100-sxm --seq-len 8192 --global-batch 512",
        )
        refuse_all((*source.problems, needed))
    from shardwise.cli import plan_print
    from shardwise.cli.judging import judge_of, refuse_hopeless, stack_of
    from shardwise.cli.render import note, print_json
    from shardwise.planner.estimator import Estimator
    from shardwise.planner.search import search
    from shardwise.planner.space import space_of

    against_words = None if why_not is None else read_source(why_not.split() or [why_not], world=world)
    reading: dict[str, Any] = {"world": world, "gbs": samples, "precision": precision, "framework": framework_word(framework)}
    _, _, rules, spec, cluster, base, named = read_all(
        lambda: counts_in_range(**counts),
        lambda: can_write(html=html, trace=trace),
        lambda: framework_name(framework),
        lambda: read_model(model, {}),
        lambda: read_cluster(gpu, world or 1, gpus_per_node=per_node, interconnect=interconnect),
        lambda: read_layout(source, **reading),
        lambda: None if against_words is None else read_layout(against_words, **reading),
    )
    base = follow_model(base, source, spec)
    if named is not None:
        named = follow_model(named, against_words, spec)
    space = plan_print.fixed(space_of(spec, cluster, base, seq_len=seq_len, framework=rules), source.words)
    estimator = Estimator(spec, cluster, seq_len=seq_len, stack=stack_of(rules))
    judge = judge_of(spec, cluster, seq_len=seq_len, framework=rules, options=source.options)
    refuse_hopeless(judge(base))
    result = search(estimator, base, space, judge=judge, top=top, uneven=rules != "torchtitan")
    reason = None
    if named is not None:
        from shardwise.planner.why_not import why_not as against

        reason = against(estimator, named, result.plans[0] if result.plans else None, judge=judge)
    certificate = plan_print.certificate_of(spec, cluster, base, seq_len, rules, gpu, gpus_per_node, interconnect, quiet=as_json)
    fewer = []
    if fewer_gpus and certificate.min_gpus:
        from shardwise.planner.scaling import on_fewer_gpus

        fewer = on_fewer_gpus(
            estimator,
            base,
            framework=rules,
            cluster_of=lambda size: read_cluster(gpu, size, gpus_per_node=gpus_per_node, interconnect=interconnect),
            judge_of=lambda on: judge_of(spec, on, seq_len=seq_len, framework=rules, options=source.options),
            least=certificate.min_gpus,
            uneven=rules != "torchtitan",
        )
    if html:
        from shardwise.planner.report.plan_page import plan_page

        html.write_text(plan_page(spec, cluster, seq_len, result, certificate))
    best = result.plans[0] if result.plans else None
    if trace and best:
        from shardwise.planner.report.trace import chrome_trace

        trace.write_text(chrome_trace(best.layout, best.time))
    rehearsed = []
    if rehearse:
        from shardwise.cli import plan_rehearse

        rehearsed = plan_rehearse.rehearse_plans(model, list(result.plans[:rehearse]), cluster, seq_len)
    if as_json:
        answer = plan_print.as_json(spec, cluster, seq_len, rules, result, certificate, reason, fewer)
        for entry, each in zip(answer["plans"], rehearsed):
            entry["rehearsal"] = plan_rehearse.as_json(each)
        print_json(answer)
    else:
        plan_print.print_plan(spec, cluster, seq_len, rules, base, result, certificate, reason, fewer)
        if rehearsed:
            plan_rehearse.print_rehearsed(rehearsed)
        for path, what in ((html, "report"), (trace, "trace")):
            if path:
                note(f"{what} written to {path}")
    return OK if result.plans else FINDING

"""Symptom, cause, remedy: reads a log beside a layout and ranks what explains it.

One row per symptom: allocated against reserved, which stage, state or activations, first step or later. Scores order causes;
they are not probabilities. Remedies are tried with the estimator: what each frees on the heaviest rank,
what it costs in step time, and whether the run would then fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.errors import LayoutError
from shardwise.planner.estimator import Estimator
from shardwise.planner.logs import OutOfMemory, TrainingLog
from shardwise.planner.memory import CONTEXT, GIB, MemoryEstimate, needed
from shardwise.planner.remedies import REMEDIES
from shardwise.planner.search import Judge
from shardwise.spec.blocks import Mla
from shardwise.spec.layout import Layout
from shardwise.spec.ranks import dense_grid

STATE = ("weights", "low_precision_weights", "gradients", "optimizer", "gathered")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known: the layout that ran, the one before it, the log, and the predictions where model and cluster are given."""

    layout: Layout
    before: Layout | None = None
    log: TrainingLog | None = None
    estimator: Estimator | None = None
    memory: MemoryEstimate | None = None

    @property
    def fault(self) -> OutOfMemory | None:
        return self.log.out_of_memory[0] if self.log and self.log.out_of_memory else None

    @property
    def stages(self) -> set[int]:
        """Pipeline ranks that ran out of memory, where the log names ranks."""
        ranks = [fault.rank for fault in (self.log.out_of_memory if self.log else ()) if fault.rank is not None]
        grid = dense_grid(self.layout)
        return {grid.coordinates(rank)["pp"] for rank in ranks if rank < self.layout.world}

    @property
    def is_moe(self) -> bool:
        return bool(self.estimator and self.estimator.model.moe) or self.layout.ep > 1

    def share(self, *names: str) -> float:
        """Share of the predicted memory of the heaviest rank."""
        if self.memory is None:
            return 0.0
        return sum(value for name, value in self.memory.terms.items() if name in names) / sum(self.memory.terms.values())

    def raised(self, name: str) -> bool:
        return self.before is not None and getattr(self.layout, name) > getattr(self.before, name)


Found = tuple[float, str] | None


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """``test`` gives a score and the evidence in words, or None."""

    symptom: str
    cause: str
    test: Callable[[Evidence], Found]
    remedies: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Cure:
    """A remedy tried. ``saves_gib`` of the heaviest rank, ``costs`` relative step time; None where it cannot be predicted."""

    text: str
    layout: Layout | None = None
    saves_gib: float | None = None
    costs: float | None = None
    fits: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Cause:
    symptom: str
    cause: str
    score: float
    evidence: str
    cures: tuple[Cure, ...]


def _fragmentation(e: Evidence) -> Found:
    fault = e.fault
    if not fault or fault.unallocated_gib is None or not fault.allocated_gib:
        return None
    idle = fault.unallocated_gib
    if idle < 0.05 * (fault.capacity_gib or 80.0):
        return None
    enough = fault.tried_gib is not None and idle >= fault.tried_gib
    text = f"{idle:.1f} GiB reserved but not allocated ({fault.allocated_gib:.1f} allocated)"
    if enough:
        text += f"; the {fault.tried_gib:.2f} GiB asked for would have fit in it"
    return (0.95 if enough else 0.6), text


def _outside(e: Evidence) -> Found:
    if e.fault and e.fault.library:
        return 0.9, f"{e.fault.library} asked the device itself: PyTorch's allocator had taken what it needed"
    return None


def _first_stage(e: Evidence) -> Found:
    if e.layout.pp > 1 and e.stages == {0}:
        return 0.75, f"only ranks of pipeline rank 0 of {e.layout.pp} ran out: it holds the embedding and most micro batches in flight"
    return None


def _last_stage(e: Evidence) -> Found:
    fault = e.fault
    last = e.layout.pp > 1 and e.stages == {e.layout.pp - 1}
    loss = bool(fault and fault.phase == "loss")
    if not (last or loss):
        return None
    text = f"only ranks of the last of {e.layout.pp} pipeline ranks ran out" if last else "it failed in the loss"
    if e.estimator and fault and fault.tried_gib:
        tokens = e.layout.mbs * e.estimator.seq_len // e.layout.cp
        logits = 2.0 * tokens * e.estimator.model.padded_vocab(e.layout.tp) / e.layout.tp / GIB
        for width, name in ((1, "bf16"), (2, "fp32")):
            if abs(fault.tried_gib / (logits * width) - 1) < 0.05:
                return 0.93, f"{text}; {fault.tried_gib:.2f} GiB is one {name} copy of the logits"
    return (0.8 if last and loss else 0.7), f"{text}: logits and loss"


def _optimizer_step(e: Evidence) -> Found:
    fault = e.fault
    if fault and fault.phase == "optimizer" and fault.after_iteration == 0:
        return 0.92, "forward and backward passed, the first optimizer step did not: its state appears then"
    return None


def _state(e: Evidence) -> Found:
    fault = e.fault
    if not fault or fault.after_iteration:
        return None
    if fault.phase == "build":
        return 0.9, "it failed while the model was built"
    if e.memory and sum(e.memory.terms.get(name, 0.0) for name in STATE) / GIB + CONTEXT / GIB > e.memory.capacity_gib:
        state = sum(e.memory.terms.get(name, 0.0) for name in STATE) / GIB
        return 0.88, f"weights, gradients and optimizer alone are {state:.1f} GiB of {e.memory.capacity_gib:.1f}"
    return (0.3 + 0.3 * e.share(*STATE), f"state is {e.share(*STATE):.0%} of the predicted peak") if e.share(*STATE) > 0.6 else None


def _activations(e: Evidence) -> Found:
    if not e.fault or e.memory is None:
        return None
    share = e.share("activations", "working_set", "loss")
    if share < 0.35:
        return None
    return 0.35 + 0.4 * share, f"activations are {share:.0%} of the predicted peak and grow with the sequence length and micro batch"


def _imbalance(e: Evidence) -> Found:
    fault = e.fault
    if not fault or not e.is_moe:
        return None
    if fault.after_iteration > 0:
        return 0.85, f"it ran {fault.after_iteration} step(s) first: the hottest expert rank decides, not the mean"
    return (0.55, "it failed inside the experts") if fault.phase == "experts" else None


def _experts(e: Evidence) -> Found:
    if e.fault and e.is_moe and e.layout.recompute.granularity == "selective" and not {"moe_act", "moe"} & set(e.layout.recompute.modules):
        return 0.6, f"recompute {e.layout.recompute} leaves the expert intermediates"
    return None


def _mla(e: Evidence) -> Found:
    mla = e.estimator is not None and any(isinstance(block, Mla) for block in e.estimator.model.attentions)
    if e.fault and mla and e.layout.recompute.granularity != "full" and "mla_up_proj" not in e.layout.recompute.modules:
        return 0.5, "latent attention keeps the expanded queries, keys and values"
    return None


def _useless_core_attn(e: Evidence) -> Found:
    if e.layout.recompute.modules == ("core_attn",) and e.layout.attention == "flash":
        return 0.2, "fused attention recomputes the scores already: the list saves nothing"
    return None


def _later(e: Evidence) -> Found:
    fault = e.fault
    if fault and fault.after_iteration > 0 and not e.is_moe:
        return 0.5, f"it ran {fault.after_iteration} step(s) first: a longer sample, evaluation or a growing allocator"
    return None


def _offloading(e: Evidence) -> Found:
    if e.layout.offload.activation_layers and e.layout.pp > 1:
        return 0.7, "activation offload needs PP=1, no recompute and no CUDA graphs"
    return None


def _more(name: str, score: float, text: str) -> Callable[[Evidence], Found]:
    def test(e: Evidence) -> Found:
        if not e.raised(name):
            return None
        return score, f"{name.upper()} {getattr(e.before, name)} -> {getattr(e.layout, name)}: {text}"

    return test


def _vpp_memory(e: Evidence) -> Found:
    if e.fault and e.raised("vpp"):
        return 0.65, "more chunks hold more buffers; VPP is for bubbles, not for memory"
    return None


def _cp_silent(e: Evidence) -> Found:
    if e.layout.cp_comm == "a2a+p2p" and not e.layout.cp_sizes:
        return 0.9, "a2a+p2p without sizes: each rank attends to its own chunk only; fast, and wrong"
    return None


def _tp_overlap(e: Evidence) -> Found:
    if e.layout.overlap_tp and (e.layout.tp < 2 or not e.layout.sp):
        return 0.6, "TP overlap is turned off: it needs TP of 2 or more and sequence parallel"
    return None


def _p2p(e: Evidence) -> Found:
    if not e.fault and e.layout.pp > 1 and e.layout.vpp == 1 and e.layout.schedule == "1f1b":
        return 0.3, "without virtual stages, sends between stages are not overlapped and the bubble is largest"
    return None


def _ep_nodes(e: Evidence) -> Found:
    if e.fault or not e.estimator or e.layout.ep == 1:
        return None
    spread = e.layout.ep * e.layout.etp
    if spread > e.estimator.cluster.domain:
        return 0.45, f"EP*ETP = {spread} crosses the fast domain of {e.estimator.cluster.domain} GPUs: all-to-all on the network"
    return None


def _host(e: Evidence) -> Found:
    if e.fault or not e.estimator:
        return None
    time = e.estimator.step_time(e.layout)
    share = time.terms.get("host", 0.0) / time.seconds
    return (0.4, f"launching kernels takes {share:.0%} of the predicted step") if share > 0.08 else None


def _nan(e: Evidence) -> Found:
    bad = next((step for step in (e.log.iterations if e.log else ()) if step.loss is not None and step.loss != step.loss), None)
    if bad and e.layout.cp > 1:
        return 0.8, f"loss is NaN at step {bad.number} with CP {e.layout.cp}: a rank whose tokens are all masked divides by zero"
    return None


def _loss_scope(e: Evidence) -> Found:
    if e.before and not e.fault and e.before.gbs != e.layout.gbs:
        return 0.25, f"the global batch went from {e.before.gbs} to {e.layout.gbs}: losses are not comparable"
    return None


SYMPTOMS: tuple[Symptom, ...] = (
    Symptom(symptom="out of memory with room left", cause="fragmentation", test=_fragmentation, remedies=("expandable",)),
    Symptom(
        symptom="out of memory in a library",
        cause="no room beside PyTorch's allocator",
        test=_outside,
        remedies=("expandable", "less_for_torch", "smaller_mbs"),
    ),
    Symptom(
        symptom="out of memory on the first stage only",
        cause="embedding and most micro batches in flight",
        test=_first_stage,
        remedies=("fewer_first", "smaller_mbs", "no_vpp"),
    ),
    Symptom(
        symptom="out of memory on the last stage",
        cause="logits, loss, MTP",
        test=_last_stage,
        remedies=("fused_loss", "chunked_loss", "fewer_last", "more_tp", "smaller_mbs"),
    ),
    Symptom(
        symptom="out of memory at the first optimizer step",
        cause="optimizer state appears then",
        test=_optimizer_step,
        remedies=("distributed_optimizer", "small_moments", "offload", "fsdp"),
    ),
    Symptom(
        symptom="out of memory before training",
        cause="model state too big",
        test=_state,
        remedies=("distributed_optimizer", "more_ep", "more_pp", "fsdp", "more_tp"),
    ),
    Symptom(
        symptom="out of memory that grows with the sequence",
        cause="activations",
        test=_activations,
        remedies=("sp", "more_cp", "layernorm", "mlp", "moe_act", "mla_up_proj", "smaller_mbs", "full"),
    ),
    Symptom(
        symptom="out of memory in some steps or ranks only",
        cause="token imbalance between experts",
        test=_imbalance,
        remedies=("balance", "capacity", "moe_act", "moe", "more_ep"),
    ),
    Symptom(
        symptom="high expert peak although attention is recomputed",
        cause="expert intermediates",
        test=_experts,
        remedies=("moe_act", "layernorm", "moe"),
    ),
    Symptom(symptom="latent attention still too big", cause="expanded q, k, v", test=_mla, remedies=("mla_up_proj",)),
    Symptom(symptom="core_attn recompute does nothing", cause="fused attention", test=_useless_core_attn, remedies=("no_core_attn",)),
    Symptom(
        symptom="out of memory in a later step", cause="uneven samples or allocator growth", test=_later, remedies=("expandable", "tokens")
    ),
    Symptom(symptom="out of memory after raising VPP", cause="buffers of more chunks", test=_vpp_memory, remedies=("no_vpp",)),
    Symptom(
        symptom="cpu_offloading refused",
        cause="activation offload with a pipeline",
        test=_offloading,
        remedies=("optimizer_offload", "offload"),
    ),
    Symptom(
        symptom="slower after more TP",
        cause="all-reduce volume, small matrices",
        test=_more("tp", 0.5, "more communication per layer, thinner matrix products"),
        remedies=("less_tp",),
    ),
    Symptom(
        symptom="slower after more PP",
        cause="fewer replicas, longer bubble",
        test=_more("pp", 0.5, "data parallel shrinks, bubble (PP-1)/(M*VP) grows"),
        remedies=("vpp", "less_pp"),
    ),
    Symptom(symptom="too fast after CP, loss wrong", cause="context parallel is off", test=_cp_silent, remedies=("cp_sizes",)),
    Symptom(symptom="TP overlap has no effect", cause="sequence parallel off or TP 1", test=_tp_overlap, remedies=("sp",)),
    Symptom(symptom="sends between stages not hidden", cause="no virtual stages", test=_p2p, remedies=("vpp",)),
    Symptom(
        symptom="expert communication large",
        cause="experts across nodes",
        test=_ep_nodes,
        remedies=("deepep", "hybridep", "ep_overlap"),
    ),
    Symptom(symptom="gaps on the GPU", cause="host bound", test=_host, remedies=("graphs", "larger_mbs", "manual_gc")),
    Symptom(symptom="NaN with CP", cause="a rank with every token masked", test=_nan, remedies=("per_token_loss",)),
    Symptom(symptom="loss differs", cause="another global batch", test=_loss_scope, remedies=("fix_batch",)),
)


def diagnose(evidence: Evidence, judge: Judge | None = None) -> list[Cause]:
    """Causes that fit the evidence, likeliest first, each with its remedies, cheapest first."""
    causes = []
    for row in SYMPTOMS:
        found = row.test(evidence)
        if found:
            cures = _cures(evidence, row.remedies, judge)
            causes.append(Cause(symptom=row.symptom, cause=row.cause, score=found[0], evidence=found[1], cures=cures))
    return sorted(causes, key=lambda cause: -cause.score)


def _cures(evidence: Evidence, names: Sequence[str], judge: Judge | None) -> tuple[Cure, ...]:
    cures: list[Cure] = []
    for name in names:
        remedy = REMEDIES[name]
        if remedy.change is None or evidence.estimator is None or evidence.memory is None:
            cures.append(Cure(text=remedy.text))
        else:
            for layout in remedy.change(evidence.layout, evidence.estimator.model):
                cure = _try(evidence, remedy.text, layout, judge)
                if cure:
                    cures.append(cure)
    return tuple(sorted(cures, key=_price))


def _price(cure: Cure) -> tuple[bool, float]:
    """Those that make it fit first, free ones before slower ones."""
    return cure.fits is False, cure.costs if cure.costs is not None else 0.0


def _try(evidence: Evidence, text: str, layout: Layout, judge: Judge | None) -> Cure | None:
    """The remedy's effect, or None where it is illegal. Measured need, where the log has it, minus the predicted saving."""
    estimator, memory = evidence.estimator, evidence.memory
    assert estimator is not None and memory is not None
    try:
        if judge and any(finding.severity == "error" for finding in judge(layout)):
            return None
        after = estimator.memory(layout)
        seconds = estimator.step_time(layout).seconds
    except LayoutError:
        return None
    saves = memory.allocated_gib - after.allocated_gib
    fits = after.fits
    fault = evidence.fault
    if fault and saves <= 0:
        return None
    if fault and fault.allocated_gib is not None and fault.capacity_gib is not None:
        need = max(memory.allocated_gib, fault.allocated_gib + (fault.tried_gib or 0.0)) - saves
        fits = needed(need * GIB) / GIB <= fault.capacity_gib
    return Cure(text=text, layout=layout, saves_gib=saves, costs=seconds / estimator.step_time(evidence.layout).seconds - 1, fits=fits)

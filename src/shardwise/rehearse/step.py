"""One rank of a run on a fake cluster: the modules, groups, schedule and optimizer of the real runtime, on tensors without data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from shardwise.collectives.counter import Communication, count_communication
from shardwise.errors import InputError, ShardwiseError
from shardwise.mesh.groups import axis_name
from shardwise.parallel.build import ParallelModel, parallelize_model
from shardwise.parallel.part import Held
from shardwise.parallel.pipeline import Loss, MicroBatch, Pipeline
from shardwise.parallel.reduce import GradientSums
from shardwise.parallel.step_optimizer import StepOptimizer
from shardwise.parallel.topology import Topology, connect
from shardwise.parallel.weights import trainable
from shardwise.rehearse.ledger import Ledger, Peak, Phase
from shardwise.spec.layout import Layout
from shardwise.spec.ranks import dense_grid
from shardwise.train.batches import Samples
from shardwise.train.loop import balance_of, make_optimizer
from shardwise.train.model import transformers_config
from shardwise.train.plan import RunPlan
from shardwise.train.step import Trainer

_AXES = ("tp", "cp", "dp", "pp", "dp_cp", "ep", "expt_tp", "expt_dp")
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a rank sends in one step. axis: names of the axes whose group it is, joined by "/"."""

    collective: str
    axis: str
    calls: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class RankRehearsal:
    """One rank in one step. peaks: the highest point of each phase. microbatches: those rehearsed; traffic is that of the whole step."""

    rank: int
    pp_rank: int
    layers: int
    parameters: int
    microbatches: int
    peaks: dict[Phase, Peak]
    traffic: tuple[Traffic, ...]

    @property
    def peak(self) -> Peak:
        return max(self.peaks.values(), key=lambda each: each.total)

    @property
    def pass_peak(self) -> Peak:
        """The highest point of forward and backward passes."""
        return max((self.peaks["forward"], self.peaks["backward"]), key=lambda each: each.total)


def distinct_ranks(layout: Layout) -> tuple[int, ...]:
    """The first rank of every pipeline rank: the others of a stage hold as much or less, and do the same."""
    return dense_grid(layout).group_of(0, ("pp",))


def enough_microbatches(layout: Layout, pp_rank: int) -> int:
    """Micro batches after which memory repeats itself: under 1F1B one backward more than it takes to fill the pipeline."""
    if layout.schedule == "1f1b" and layout.vpp == 1:
        return min(layout.microbatches, layout.pp - pp_rank + 1)
    return layout.microbatches


def rehearse(plan: RunPlan, *, processes: int | None = None) -> Iterator[RankRehearsal]:
    """One training step of every distinct rank, in order. processes: at most so many work at once [default: one per core, 8 at most].

    Raises as `rehearse_rank` does.
    """
    ranks = distinct_ranks(plan.layout)
    size = min(len(ranks), processes or os.cpu_count() or 1, 8)
    if size == 1:
        yield from (rehearse_rank(plan, rank) for rank in ranks)
        return
    with ProcessPoolExecutor(size, mp_context=get_context("spawn")) as pool:
        for found in pool.map(_attempt, repeat(plan), ranks):
            if isinstance(found, str):
                pool.shutdown(cancel_futures=True)
                raise ShardwiseError(found)
            yield found


def _attempt(plan: RunPlan, rank: int) -> RankRehearsal | str:
    """A rehearsal, or why there is none."""
    try:
        return rehearse_rank(plan, rank)
    except ShardwiseError as error:
        return str(error)


def rehearse_rank(plan: RunPlan, rank: int) -> RankRehearsal:
    """One training step of `rank`, as it is from the second step on. No data, no communication; the process must have no process group.

    Raises `InputError` for what cannot be expressed without data, `ModelError` when the model does not split that way.
    """
    layout = plan.layout
    if layout.sharding == "fsdp2":
        raise InputError(
            given="ddp.use_torch_fsdp2=true", why="FSDP2 is not rehearsed", try_="ddp.use_torch_fsdp2=false, or shardwise check"
        )
    pp_rank = dense_grid(layout).coordinates(rank)["pp"]
    count = enough_microbatches(layout, pp_rank)
    short = replace(plan, layout=layout.replace(gbs=layout.mbs * layout.dp * count))
    with _fake_world(layout.world, rank):
        fake = FakeTensorMode()
        return account(
            short,
            connect(short.layout),
            Ledger(),
            fake,
            fill=lambda *args, **options: _placeholders(fake, *args, **options),
            microbatches=layout.microbatches,
        )


def account(
    plan: RunPlan, topology: Topology, ledger: Ledger, mode: AbstractContextManager[object], *, fill: Callable[..., None], microbatches: int
) -> RankRehearsal:
    """One training step of this rank under a ledger. mode: where tensors are made, fill: what makes the weights. microbatches: of the step
    whose traffic is told; the plan may have fewer."""
    layout, config = plan.layout, plan.config
    model = parallelize_model(
        transformers_config(plan.hf_fields),
        topology,
        seed=config.rng.seed,
        device=torch.device("cpu"),
        balance=balance_of(config),
        fill=fill,
        dtype=torch.bfloat16 if layout.precision == "bf16" else torch.float32,
    )
    with mode, ledger:
        for stage in model.stages.values():
            ledger.hold((*stage.parameters(), *stage.buffers()), "weights")
            for parameter in stage.parameters():  # before the optimizer's hooks, which may let the gradient go
                parameter.register_post_accumulate_grad_hook(lambda each: ledger.hold((each.grad,), "gradients"))
        optimizer = StepOptimizer(model, lambda groups: _on_gpu(make_optimizer(config, groups)), config.optimizer.clip_grad)
        _start(optimizer, ledger)
        trainer = Trainer(model, optimizer)
        trainer.pipeline = watched = _Watched(trainer.pipeline, ledger)
        with count_communication() as everything:
            try:
                trainer.train(_samples(layout.mbs * microbatches, config.model.seq_length).rows(0, layout.mbs * layout.microbatches))
            except NotImplementedError as error:
                raise InputError(given=config.model.model_type, why=str(error), try_="another model or layout") from None
        ledger.hold((each.grad for each in _with_gradient(optimizer)), "gradients")
    return RankRehearsal(
        rank=topology.rank,
        pp_rank=topology.pp_rank,
        layers=sum(len(module.stage.layers) for module in model.stages.values()),
        parameters=sum(parameter.numel() for parameter, _ in model.parameters),
        microbatches=layout.microbatches,
        peaks={phase: ledger.peak(phase) for phase in PHASES},
        traffic=_traffic(everything, watched.sent, microbatches, layout.microbatches, model, optimizer.sums),
    )


class _Watched(Pipeline):
    """A pipeline whose passes are marked in the ledger and counted apart."""

    def __init__(self, pipeline: Pipeline, ledger: Ledger) -> None:
        vars(self).update(vars(pipeline))
        self.ledger, self.sent = ledger, Communication()

    def train(self, batches: Sequence[MicroBatch], loss: Loss, sums: GradientSums | None = None) -> Tensor:
        def counted(logits: Tensor, labels: Tensor) -> Tensor:
            with self.ledger.loss():
                return loss(logits, labels)

        with self.ledger.pipeline(), count_communication(self.sent):
            total = super().train(batches, counted, sums)
        self.ledger.hold(sums.flats if sums is not None else (), "gradients")
        return total


@contextmanager
def _fake_world(size: int, rank: int) -> Iterator[None]:
    if dist.is_initialized():
        raise InputError(
            given="a running process group", why="a rehearsal has a world of its own", try_="shardwise rehearse without torchrun"
        )
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _placeholders(
    fake: FakeTensorMode,
    model: PreTrainedModel,
    whole: PreTrainedModel,
    held: Mapping[str, Held],
    *,
    device: torch.device,
    dtype: torch.dtype,
    **_: Any,
) -> None:
    """Give the cut and split meta model fake parameters and buffers."""
    made: dict[nn.Parameter, nn.Parameter] = {}

    def new(x: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(x.shape, dtype=dtype, device=device)

    with fake:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter not in made:
                    made[parameter] = trainable(new(parameter, dtype), like=parameter)
                module._parameters[name] = made[parameter]
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = new(buffer, buffer.dtype)


def _on_gpu(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Updates in one kernel (AdamW) or over lists of tensors, as on a GPU."""
    for group in optimizer.param_groups:
        group["fused" if isinstance(optimizer, torch.optim.AdamW) else "foreach"] = True
    return optimizer


def _start(optimizer: StepOptimizer, ledger: Ledger) -> None:
    """Make the optimizer's state, which exists from the first step on."""
    values = [each.value for each in optimizer.updated]
    ledger.hold((each.value for each in optimizer.updated if each.value is not each.parameter), "optimizer")
    for value in values:
        value.grad = torch.zeros_like(value)
    optimizer.optimizer.step()
    ledger.hold((value.grad for value in values), "gradients")
    ledger.hold((x for state in optimizer.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)), "optimizer")
    ledger.forget_peaks()


def _with_gradient(optimizer: StepOptimizer) -> list[Tensor]:
    found = [*(parameter for parameter, _ in optimizer.model.parameters), *(each.value for each in optimizer.updated)]
    return [each for each in found if each.grad is not None]


def _samples(size: int, length: int) -> Samples:
    tokens = torch.zeros(size, length, dtype=torch.int64)
    return Samples(tokens=tokens, labels=torch.zeros_like(tokens), positions=torch.arange(length).expand(size, length))


def _traffic(
    everything: Communication, pipeline: Communication, wanted: int, count: int, model: ParallelModel, sums: GradientSums
) -> tuple[Traffic, ...]:
    """Messages of a whole step: those of the passes are the same for every micro batch, all others are sent once."""
    names = _names(model)
    once = {axis_name(group): axis_name(model.topology[name].group) for name, group in sums.groups.items()}
    names |= {own: names.get(axis, axis) for own, axis in once.items()}
    inside = {(r.collective, r.axis, r.direction): r for r in pipeline.records if r.axis not in once}
    rows: dict[tuple[str, str], tuple[int, int]] = {}
    for r in everything.records:
        passes = inside.get((r.collective, r.axis, r.direction))
        more = [0, 0] if passes is None else [each * (wanted - count) // count for each in (passes.calls, passes.bytes)]
        key = (r.collective, names.get(r.axis, r.axis.removeprefix("shardwise_")))
        calls, size = rows.get(key, (0, 0))
        rows[key] = (calls + r.calls + more[0], size + r.bytes + more[1])
    return tuple(Traffic(collective=c, axis=axis, calls=calls, bytes=size) for (c, axis), (calls, size) in sorted(rows.items()))


def _names(model: ParallelModel) -> dict[str, str]:
    """Names of the axes by the description of their group; axes of equal members share one group."""
    topology, result = model.topology, {"shardwise_pp_earlier": ["pp"]}
    experts = any(held.expert for _, held in model.parameters)
    used = {"dp_cp": topology.layout.cp > 1, **dict.fromkeys(("ep", "expt_tp", "expt_dp"), experts)}
    for name in _AXES:
        group = topology[name].group
        if group is not None and used.get(name, True):
            result.setdefault(axis_name(group), []).append(name)
    return {description: "/".join(names) for description, names in result.items()}

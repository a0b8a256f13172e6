"""The data parallel sums of a step's gradients: in buckets, each on its way while the backward goes on.

Buckets are started in one order that follows from the layout alone, on process groups that carry nothing else: a bucket whose gradients are
complete waits for those before it. So all ranks of a group start the same sums in the same order, whatever gradients came first or never.
Nothing waits for a sum before the backward is over: a rank that waits within it may hold back those it waits for.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.collectives.buckets import buckets
from shardwise.collectives.functional import PendingSum, start_all_reduce
from shardwise.errors import ShardwiseError
from shardwise.parallel.build import ParallelModel
from shardwise.parallel.gradients import gradient, tied_copies
from shardwise.parallel.part import Held
from shardwise.spec.schedules import actions

BUCKET_BYTES = 25 * 2**20  # that of torch's DistributedDataParallel


@dataclass(frozen=True, kw_only=True)
class Started:
    """A sum under way. flat: what is summed, in place of the gradients. take: what is done with the result."""

    flat: Tensor
    pending: PendingSum
    take: Callable[[Tensor], None] = lambda _: None


Start = Callable[[Sequence[nn.Parameter], dist.ProcessGroup], Started]


@dataclass(kw_only=True)
class _Bucket:
    """missing: parameters whose gradient is not complete."""

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup
    missing: set[nn.Parameter] = field(default_factory=set)
    started: Started | None = None


def start_whole(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Started:
    """Sum whole gradients, which become views of the flat buffer. Communication: one all-reduce."""
    grads = [gradient(parameter).reshape(-1) for parameter in parameters]
    flat = grads[0] if len(grads) == 1 else torch.cat(grads)
    for parameter, part in zip(parameters, flat.split([grad.numel() for grad in grads]), strict=True):
        parameter.grad = part.view_as(parameter)
    return Started(flat=flat, pending=start_all_reduce(flat, group))


class GradientSums:
    """The sums of one step after the other over the data parallel ranks, those of experts over theirs. FSDP2 has sums of its own.

    Late gradients are summed after the backward, once all that is to be added to them on this stage replica is there: those with pending
    sums, tied copies, and of parameters that need none.

    start: starts the sum of some parameters' gradients. Communication on creation: a group for dense parameters and one for experts, and
    a number over each.
    """

    def __init__(self, model: ParallelModel, start: Start) -> None:
        self._start = start
        self.groups = {} if model.fsdp else _groups(model)
        self._parameters = {stage: [*module.parameters()] for stage, module in model.stages.items()}
        self._stage = {parameter: stage for stage, parameters in self._parameters.items() for parameter in parameters}
        self._early, self._late = self._arrange(model)
        self._bucket = {parameter: bucket for bucket in self._early for parameter in bucket.parameters}
        for parameter in self._bucket:
            parameter.register_post_accumulate_grad_hook(partial(_tell, weakref.ref(self)))
        self.restart()

    def _arrange(self, model: ParallelModel) -> tuple[list[_Bucket], list[_Bucket]]:
        topology, tied = model.topology, set(tied_copies(model))
        members = [(p, held) for p, held in _order(model) if _axis(held) in self.groups]

        def kind(index: int) -> tuple[bool, str, torch.dtype, bool]:
            """Vectors are apart: a norm stands beside a layer's matrices, its gradient comes before or after all of theirs."""
            p, held = members[index]
            late = bool(held.pending) or p in tied or not p.requires_grad
            return late, _axis(held), p.grad_dtype or p.dtype, p.ndim > 1

        def size(index: int) -> int:
            """The same on ranks whose shares of a parameter differ."""
            _, held = members[index]
            split = topology["ep"].size * topology["expt_tp"].size if held.expert else topology["tp"].size
            return math.prod(held.part.shape) * kind(index)[2].itemsize // split

        found: tuple[list[_Bucket], list[_Bucket]] = ([], [])
        for run in sorted(buckets(range(len(members)), key=kind, size=size, limit=BUCKET_BYTES), key=lambda run: run[-1]):
            late, axis, *_ = kind(run[0])
            found[late].append(_Bucket(parameters=[members[index][0] for index in run], group=self.groups[axis]))
        return found

    @property
    def flats(self) -> list[Tensor]:
        """What is under way."""
        return [bucket.started.flat for bucket in (*self._early, *self._late) if bucket.started is not None]

    def restart(self) -> None:
        """Before a step's first backward: forget what is under way."""
        self._completing: int | None = None
        self._complete: set[int] = set()
        self._next = 0
        for bucket in (*self._early, *self._late):
            bucket.missing, bucket.started = set(bucket.parameters), None

    @contextmanager
    def completing(self, stage: int) -> Iterator[None]:
        """Around the backward that is the last of a stage to add to its gradients: sums start as these come, at the end those of gradients
        that never came. Raises `ShardwiseError` if there was one already since the last step."""
        if stage in self._complete:
            raise ShardwiseError(f"stage {stage} has had its last backward: its gradients are being summed. Call step() before the next")
        self._complete.add(stage)
        self._completing = stage
        try:
            yield
        finally:
            self._completing = None
        for bucket in self._early:
            bucket.missing.difference_update(self._parameters[stage])
        self._go_on()

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self._completing is not None and self._stage[parameter] == self._completing:
            self._bucket[parameter].missing.remove(parameter)
            self._go_on()

    def _go_on(self) -> None:
        while self._next < len(self._early) and not self._early[self._next].missing:
            self._launch(self._early[self._next])
            self._next += 1

    @torch.no_grad()
    def _launch(self, bucket: _Bucket) -> None:
        bucket.started = self._start(bucket.parameters, bucket.group)

    def start_rest(self) -> None:
        """Start all early sums that have not been. All ranks call it together, after the step's last backward."""
        for bucket in self._early[self._next :]:
            self._launch(bucket)
        self._next = len(self._early)

    def finish(self) -> None:
        """Start the late sums, and wait for all. All ranks call it together."""
        for bucket in self._late:
            self._launch(bucket)
        for bucket in (*self._early, *self._late):
            assert bucket.started is not None
            bucket.started.take(bucket.started.pending.wait())
            bucket.started = None
        self.restart()


def _tell(sums: weakref.ref[GradientSums], parameter: nn.Parameter) -> None:
    """A hook that does not keep the sums alive: the garbage collector does not look into hooks."""
    alive = sums()
    if alive is not None:
        alive._arrived(parameter)


def _axis(held: Held) -> str:
    return "expt_dp" if held.expert else "dp_cp"


def _groups(model: ParallelModel) -> dict[str, dist.ProcessGroup]:
    topology = model.topology
    used = {_axis(held) for _, held in model.parameters}
    axes = {name: topology[name] for name in ("dp_cp", "expt_dp") if name in used and topology[name].group is not None}
    groups = {name: topology.maker.another(axis.ranks, f"{name}_gradients") for name, axis in axes.items()}
    for group in groups.values():  # NCCL connects at the first message, which blocks: not in a backward
        dist.all_reduce(torch.zeros(1, device=model.parameters[0][0].device), group=group)
    return groups


def _order(model: ParallelModel) -> list[tuple[nn.Parameter, Held]]:
    """Parameters as their gradients become complete: stages by their last backward, and each from its end."""
    topology = model.topology
    last: dict[int, int] = {}
    if len(model.stages) > 1:
        last = {action.stage: at for at, action in enumerate(actions(topology.layout)[topology.pp_rank])}
    stages = {parameter: stage for stage, module in model.stages.items() for parameter in module.parameters()}
    return sorted(reversed(model.parameters), key=lambda member: last.get(stages[member[0]], 0))

"""One training step over the stages of a pipeline: runs the same action lists that the planner simulates.

Messages to later ranks of the pipeline and messages to earlier ones have a process group each, and the messages of a pair of ranks are
sent and received in one order, which both read from the action lists. So no rank waits for a message that its partner has queued behind
another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.counter import record
from shardwise.errors import ShardwiseError
from shardwise.parallel.attention import SequenceSplit
from shardwise.parallel.build import ParallelModel
from shardwise.parallel.reduce import GradientSums
from shardwise.spec.layout import Layout
from shardwise.spec.schedules import Action, Actions, actions
from shardwise.spec.sequence import even_sizes
from shardwise.spec.stages import rank_of_stage

Loss = Callable[[Tensor, Tensor], Tensor]
Message = tuple[str, int, int]  # "F" or "B", stage that needs it, micro batch


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro batch of this context parallel rank: tokens, labels and positions are [B, local rows]."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    split: SequenceSplit


@dataclass(kw_only=True)
class _Kept:
    """What a stage keeps of a micro batch between its forward and its backward."""

    x: Tensor
    out: Tensor
    grad: Tensor | None = None


def forward_actions(layout: Layout) -> Actions:
    """Evaluation: every micro batch through all stages, in order."""
    own: list[list[int]] = [[] for _ in range(layout.pp)]
    for stage in range(layout.stages):
        own[rank_of_stage(layout, stage)].append(stage)
    return tuple(tuple(Action("F", s, m) for m in range(layout.microbatches) for s in stages) for stages in own)


class Pipeline:
    """Runs steps of a parallel model. Communication on creation: a second group of the pipeline's ranks."""

    def __init__(self, model: ParallelModel) -> None:
        layout = model.topology.layout
        if layout.schedule == "dualpipe":
            raise ShardwiseError("schedule dualpipe keeps two copies of every stage and is not run; use dualpipev")
        self.model, self.layout = model, layout
        self.rank = model.topology.pp_rank
        self.actions = actions(layout)
        pipeline = model.topology["pp"]
        self.later = pipeline.group
        self.earlier = None if pipeline.group is None else model.topology.maker.another(pipeline.ranks, "pp_earlier")

    def group(self, source: int, target: int) -> dist.ProcessGroup:
        """The group that carries messages from one pipeline rank to another."""
        group = self.later if source < target else self.earlier
        assert group is not None
        return group

    def train(self, batches: Sequence[MicroBatch], loss: Loss, sums: GradientSums | None = None) -> Tensor:
        """Forward and backward of all micro batches; gradients are added up on the parameters. Returns the sum of the losses of this
        rank's last stage (0 without one).

        sums: data parallel sums that begin in the last backward of every stage; for a step's last pass.
        """
        return _Run(self, batches, loss, self.actions, backward=True, sums=sums).go()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch], loss: Loss) -> Tensor:
        layout = self.layout.replace(gbs=len(batches) * self.layout.mbs * self.layout.dp)
        return _Run(self, batches, loss, forward_actions(layout), backward=False).go()


@dataclass(kw_only=True)
class _Channel:
    """Messages from one rank in the order it sends them."""

    expected: list[Message]
    waiting: dict[Message, tuple[dist.Work, Tensor]] = field(default_factory=dict)
    posted: int = 0


class _Run:
    """One pass over the action lists."""

    def __init__(
        self,
        pipeline: Pipeline,
        batches: Sequence[MicroBatch],
        loss: Loss,
        lists: Actions,
        *,
        backward: bool,
        sums: GradientSums | None = None,
    ) -> None:
        self.pipeline, self.batches, self.loss, self.lists, self.backward, self.sums = pipeline, batches, loss, lists, backward, sums
        self.layout, self.rank = pipeline.layout, pipeline.rank
        self.model = pipeline.model
        self.last = self.layout.stages - 1
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.here: dict[Message, Tensor] = {}
        self.sending: list[tuple[dist.Work, Tensor]] = []
        self.left = {stage: len(batches) for stage in self.model.stages}  # micro batches whose weight gradients are to come
        self.total = torch.zeros((), device=batches[0].tokens.device)
        self.channels = {source: _Channel(expected=self._messages(source)) for source in range(self.layout.pp) if source != self.rank}

    def _messages(self, source: int) -> list[Message]:
        """What `source` sends to this rank, in its order."""
        result: list[Message] = []
        for kind, stage, m in self.lists[source]:
            target = stage + 1 if kind == "F" else stage - 1
            if kind != "W" and 0 <= target <= self.last and rank_of_stage(self.layout, target) == self.rank:
                result.append(("F" if kind == "F" else "B", target, m))
        return result

    def go(self) -> Tensor:
        for kind, stage, m in self.lists[self.rank]:
            if kind == "F":
                self._forward(stage, m)
            elif kind == "W":
                self._weights(stage, m)
            else:
                self._backward(stage, m, inputs_only=kind == "I")
        for work, _ in self.sending:
            work.wait()
        return self.total

    def _forward(self, stage: int, m: int) -> None:
        batch, module = self.batches[m], self.model.stages[stage]
        self.model.rows.length, self.model.rows.batch = batch.tokens.shape[1], batch.tokens.shape[0]
        x = batch.tokens if stage == 0 else self._receive(("F", stage, m))
        if stage and self.backward:
            x.requires_grad_()
        with self.model.savings.saving() if self.model.savings.active else nullcontext():
            out = module(x, batch.positions, batch.split)
            if stage == self.last:
                out = self.loss(out, batch.labels)
        if stage == self.last:
            self.total += out.detach()
        else:
            self._send(("F", stage + 1, m), out.detach())
        if self.backward:
            self.kept[stage, m] = _Kept(x=x, out=out)

    def _backward(self, stage: int, m: int, *, inputs_only: bool) -> None:
        kept = self.kept[stage, m]
        kept.grad = None if stage == self.last else self._receive(("B", stage, m))
        if inputs_only and not self.model.fsdp:
            if stage:
                torch.autograd.backward(kept.out, kept.grad, inputs=[kept.x], retain_graph=True)
        else:
            with self._to_weights(stage):
                torch.autograd.backward(kept.out, kept.grad)
            del self.kept[stage, m]
        if stage:
            assert kept.x.grad is not None
            self._send(("B", stage - 1, m), kept.x.grad)
            kept.x.grad = None

    def _weights(self, stage: int, m: int) -> None:
        kept = self.kept.pop((stage, m), None)
        if kept is not None:
            weights = [parameter for parameter in self.model.stages[stage].parameters() if parameter.requires_grad]
            with self._to_weights(stage):
                torch.autograd.backward(kept.out, kept.grad, inputs=weights)

    def _to_weights(self, stage: int) -> AbstractContextManager[None]:
        """Around a backward that adds to the gradients of the stage's weights."""
        self.left[stage] -= 1
        last = self.left[stage] == 0
        if self.model.fsdp:
            self.model.stages[stage].set_requires_gradient_sync(last)
            self.model.stages[stage].set_is_last_backward(last)
        return self.sums.completing(stage) if last and self.sums is not None else nullcontext()

    def _send(self, message: Message, value: Tensor) -> None:
        target = rank_of_stage(self.layout, message[1])
        if target == self.rank:
            self.here[message] = value.detach()
            return
        value = value.contiguous()
        group = self.pipeline.group(self.rank, target)
        record("send", group, value.numel() * value.element_size())
        work = dist.isend(value, self.model.topology["pp"].ranks[target], group=group)
        assert work is not None
        self.sending = [(work, kept) for work, kept in self.sending if not work.is_completed()]
        self.sending.append((work, value))

    def _receive(self, message: Message) -> Tensor:
        """The message, once it is here. Those that its sender sends before it are received too."""
        if message in self.here:
            return self.here.pop(message)
        kind, stage, _ = message
        source = rank_of_stage(self.layout, stage - 1 if kind == "F" else stage + 1)
        channel = self.channels[source]
        while message not in channel.waiting:
            following = channel.expected[channel.posted]
            channel.posted += 1
            buffer = torch.empty(self._shape(following[2]), device=self.total.device, dtype=self.model.dtype)
            work = dist.irecv(buffer, self.model.topology["pp"].ranks[source], group=self.pipeline.group(source, self.rank))
            assert work is not None
            channel.waiting[following] = (work, buffer)
        work, buffer = channel.waiting.pop(message)
        work.wait()
        return buffer

    def _shape(self, m: int) -> tuple[int, ...]:
        """Shape of what passes between stages: [B, rows, hidden]."""
        batch, rows = self.batches[m].tokens.shape
        if self.layout.sp:
            rows = even_sizes(rows, self.layout.tp)[self.model.topology["tp"].rank]
        return batch, rows, self.model.hidden

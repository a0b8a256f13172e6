"""The data parallel sum, clipping and the optimizer step: replicated, distributed optimizer (ZeRO-1) or FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.collectives.functional import all_gather, start_reduce_scatter
from shardwise.parallel.build import ParallelModel
from shardwise.parallel.gradients import finish, gradient, local, squared_norm
from shardwise.parallel.part import Held, Part
from shardwise.parallel.reduce import GradientSums, Started, start_whole
from shardwise.parallel.topology import Axis
from shardwise.spec.spans import Span, chunk_sizes, spans_of

Make = Callable[[list[dict[str, object]]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Updated:
    """A tensor the optimizer updates: this rank's `rows` (of dim 0) of a parameter, in float32. It is the parameter itself where that is
    whole and float32. copies: ranks of the world with the same elements."""

    value: Tensor
    parameter: nn.Parameter
    held: Held
    rows: Span
    copies: int

    @property
    def part(self) -> Part:
        return self.held.part.rows(self.rows)


class StepOptimizer:
    """Turns the gradients of a step into new weights.

    make: builds a torch optimizer from parameter groups (`params`, `decayed`: False for vectors, which get no weight decay).
    Communication on creation: that of `GradientSums`.
    """

    def __init__(self, model: ParallelModel, make: Make, clip: float) -> None:
        self.model, self.clip = model, clip
        self.shards = _shards(model) if model.topology.layout.sharding in ("distributed_optimizer", "zero2") else []
        self.updated = list(self._updated())
        self._of = {each.parameter: each for each in self.updated}
        self.sums = GradientSums(model, self._start_rows if self.shards else start_whole)
        groups = [
            {"params": [each.value for each in self.updated if (each.parameter.ndim > 1) == decayed], "decayed": decayed}
            for decayed in (True, False)
        ]
        self.optimizer = make([group for group in groups if group["params"]])

    def _updated(self) -> Iterator[Updated]:
        layout = self.model.topology.layout
        if self.shards:
            for shard in self.shards:
                yield from shard.updated
            return
        for parameter, held in self.model.parameters:
            replicas = layout.edp if held.expert else layout.dp * layout.cp
            rows, copies = (0, held.part.local_shape[0]), held.copies * replicas
            if isinstance(parameter, DTensor):
                rows, copies = fsdp_rows(parameter), copies // _shard_ranks(parameter)
            yield Updated(value=_precise(parameter), parameter=parameter, held=held, rows=rows, copies=copies)

    def _start_rows(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Started:
        """Sum gradients, of which this rank keeps the rows it updates; the whole ones go. Communication: one reduce-scatter."""
        rows = [_rows(parameter, group.size()) for parameter in parameters]
        grads = [gradient(parameter) for parameter in parameters]
        flat = grads[0].reshape(-1) if len(grads) == 1 else torch.cat(_pieces(grads, rows))
        for parameter in parameters:
            parameter.grad = None
        chosen = [self._of[parameter] for parameter in parameters]

        def take(own: Tensor) -> None:
            for each, grad in zip(chosen, own.split([each.value.numel() for each in chosen]), strict=True):
                each.value.grad = grad.view_as(each.value)

        return Started(flat=flat, pending=start_reduce_scatter(flat, _sizes(parameters, rows), group), take=take)

    def zero_grad(self) -> None:
        for parameter, _ in self.model.parameters:
            parameter.grad = None
        for each in self.updated:
            each.value.grad = None
        self.sums.restart()

    def step(self) -> float:
        """Reduce, clip, update. Returns the gradient norm before clipping. All ranks call it together."""
        self.sums.start_rest()
        finish(self.model)
        self.sums.finish()
        self._hand_over()
        grads = [local(each.value.grad) for each in self.updated if each.value.grad is not None]
        norm = squared_norm(
            self.model, ((local(each.value.grad), each.copies, each.held.counted) for each in self.updated if each.value.grad is not None)
        ).sqrt()
        if self.clip > 0 and float(norm) > self.clip:
            for grad in grads:
                grad.mul_(self.clip / (float(norm) + 1e-6))
        self.optimizer.step()
        self.publish()
        return float(norm)

    def _hand_over(self) -> None:
        """Gradients of whole parameters to what is updated in their place; zeros where there are none."""
        for each in self.updated:
            if each.value is each.parameter:
                gradient(each.parameter)
        for each in self._apart():
            each.value.grad = gradient(each.parameter)

    @torch.no_grad()
    def publish(self) -> None:
        """What is updated into the parameters that compute. All ranks call it together."""
        for each in self._apart():
            each.parameter.copy_(each.value)
        for shard in self.shards:
            shard.publish()

    def _apart(self) -> Iterator[Updated]:
        """What is updated in the place of a whole parameter."""
        whole = [self.updated] if not self.shards else [shard.updated for shard in self.shards if shard.axis.group is None]
        return (each for some in whole for each in some if each.value is not each.parameter)


def fsdp_rows(parameter: DTensor) -> Span:
    """Rows of dim 0 that FSDP keeps on this rank."""
    mesh = parameter.device_mesh
    dim = mesh.ndim - 1
    return spans_of(chunk_sizes(parameter.shape[0], mesh.size(dim)))[mesh.get_local_rank(dim)]


def _shard_ranks(parameter: DTensor) -> int:
    mesh = parameter.device_mesh
    return mesh.size(mesh.ndim - 1)


def _by_axis(model: ParallelModel) -> Iterator[tuple[Axis, list[tuple[nn.Parameter, Held]]]]:
    """Parameters by the axis their gradients are summed over."""
    for name, expert in (("dp_cp", False), ("expt_dp", True)):
        members = [(parameter, held) for parameter, held in model.parameters if held.expert == expert]
        if members:
            yield model.topology[name], members


def _shards(model: ParallelModel) -> list[_Shard]:
    return [_Shard(axis, members) for axis, members in _by_axis(model)]


class _Shard:
    """Parameters whose gradients and optimizer state are dealt out by rows over one axis (Rajbhandari et al., arXiv:1910.02054, stage 1).

    A flat buffer holds the rows of rank 0 of every parameter, then those of rank 1, ...: one all-gather of weights per step.
    """

    def __init__(self, axis: Axis, members: list[tuple[nn.Parameter, Held]]) -> None:
        self.axis, self.parameters = axis, [parameter for parameter, _ in members]
        self.rows = [_rows(parameter, axis.size) for parameter in self.parameters]
        self.updated = [
            Updated(
                value=_precise(parameter) if axis.size == 1 else nn.Parameter(parameter.detach()[slice(*rows[axis.rank])].float().clone()),
                parameter=parameter,
                held=held,
                rows=rows[axis.rank],
                copies=held.copies,
            )
            for (parameter, held), rows in zip(members, self.rows, strict=True)
        ]

    @torch.no_grad()
    def publish(self) -> None:
        """Every rank's new rows into the parameters."""
        if self.axis.group is None:
            return
        flat = torch.cat([each.value.detach().reshape(-1) for each in self.updated]).to(self.parameters[0].dtype)
        everything = all_gather(flat, 0, _sizes(self.parameters, self.rows), self.axis.group)
        targets = _pieces(self.parameters, self.rows)
        torch._foreach_copy_(targets, everything.split([target.numel() for target in targets]))


def _precise(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, or a float32 copy of one with fewer bits, whose small updates would be rounded away."""
    return parameter if parameter.dtype not in (torch.bfloat16, torch.float16) else nn.Parameter(parameter.detach().float())


def _rows(parameter: nn.Parameter, ranks: int) -> tuple[Span, ...]:
    """The rows that each rank updates."""
    return spans_of(chunk_sizes(parameter.shape[0], ranks))


def _sizes(parameters: Sequence[nn.Parameter], rows: Sequence[tuple[Span, ...]]) -> list[int]:
    """Elements of all parameters that each rank updates."""
    return [sum(sizes) for sizes in zip(*(_elements(p, each) for p, each in zip(parameters, rows, strict=True)), strict=True)]


def _elements(x: Tensor, rows: tuple[Span, ...]) -> list[int]:
    width = x.numel() // x.shape[0] if x.shape[0] else 0
    return [(stop - start) * width for start, stop in rows]


def _pieces(tensors: Sequence[Tensor], rows: Sequence[tuple[Span, ...]]) -> list[Tensor]:
    """Rank by rank the rows of every tensor, flat."""
    by_tensor = [x.detach().reshape(-1).split(_elements(x, each)) for x, each in zip(tensors, rows, strict=True)]
    return [piece for pieces in zip(*by_tensor, strict=True) for piece in pieces]

"""The data parallel sum, clipping and the optimizer step: replicated, distributed optimizer (ZeRO-1) or FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.collectives.functional import all_gather, reduce_scatter
from shardwise.parallel.build import ParallelModel
from shardwise.parallel.gradients import finish, gradient, local, squared_norm, sum_flat
from shardwise.parallel.part import Held, Part
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
    """

    def __init__(self, model: ParallelModel, make: Make, clip: float) -> None:
        self.model, self.clip = model, clip
        self.shards = _shards(model) if model.topology.layout.sharding in ("distributed_optimizer", "zero2") else []
        self.updated = list(self._updated())
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

    def zero_grad(self) -> None:
        for parameter, _ in self.model.parameters:
            parameter.grad = None
        for each in self.updated:
            each.value.grad = None

    def step(self) -> float:
        """Reduce, clip, update. Returns the gradient norm before clipping. All ranks call it together."""
        finish(self.model)
        if self.shards:
            for shard in self.shards:
                shard.reduce()
        elif not self.model.fsdp:
            for axis, members in _by_axis(self.model):
                if axis.group is not None:
                    sum_flat([gradient(parameter) for parameter, _ in members], axis.group)
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
        """Gradients of whole parameters to what is updated in their place."""
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

    The flat buffer holds the rows of rank 0 of every parameter, then those of rank 1, ...: one reduce-scatter of gradients and one
    all-gather of weights per step.
    """

    def __init__(self, axis: Axis, members: list[tuple[nn.Parameter, Held]]) -> None:
        self.axis, self.parameters = axis, [parameter for parameter, _ in members]
        self.rows = [spans_of(chunk_sizes(parameter.shape[0], axis.size)) for parameter in self.parameters]
        self.sizes = [sum(rows[rank][1] * _width(p) - rows[rank][0] * _width(p) for p, rows in self._pairs()) for rank in range(axis.size)]
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

    def _pairs(self) -> Iterable[tuple[nn.Parameter, tuple[Span, ...]]]:
        return zip(self.parameters, self.rows, strict=True)

    @staticmethod
    def _pieces(x: Tensor, rows: tuple[Span, ...]) -> tuple[Tensor, ...]:
        """The rows of every rank, flat."""
        width = x.numel() // x.shape[0] if x.shape[0] else 0
        return x.detach().reshape(-1).split([(stop - start) * width for start, stop in rows])

    def reduce(self) -> None:
        """The summed gradient of this rank's rows."""
        if self.axis.group is None:
            return
        by_parameter = [self._pieces(gradient(parameter), rows) for parameter, rows in self._pairs()]
        flat = torch.cat([piece for pieces in zip(*by_parameter, strict=True) for piece in pieces])
        own = reduce_scatter(flat, 0, self.sizes, self.axis.group)
        for each, grad in zip(self.updated, own.split([each.value.numel() for each in self.updated]), strict=True):
            each.value.grad = grad.view_as(each.value)

    @torch.no_grad()
    def publish(self) -> None:
        """Every rank's new rows into the parameters."""
        if self.axis.group is None:
            return
        flat = torch.cat([each.value.detach().reshape(-1) for each in self.updated]).to(self.parameters[0].dtype)
        everything = all_gather(flat, 0, self.sizes, self.axis.group)
        by_parameter = [self._pieces(parameter, rows) for parameter, rows in self._pairs()]
        targets = [piece for pieces in zip(*by_parameter, strict=True) for piece in pieces]
        torch._foreach_copy_(targets, everything.split([target.numel() for target in targets]))


def _precise(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, or a float32 copy of one with fewer bits, whose small updates would be rounded away."""
    return parameter if parameter.dtype not in (torch.bfloat16, torch.float16) else nn.Parameter(parameter.detach().float())


def _width(parameter: nn.Parameter) -> int:
    return parameter.numel() // parameter.shape[0] if parameter.shape[0] else 0

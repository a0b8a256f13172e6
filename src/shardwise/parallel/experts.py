"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

The experts module of a `transformers` model keeps its own mathematics; only the rows it is called with change. Router weights are applied
where the token lives, after its results have come back.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.collectives.functional import all_gather, all_to_all, reduce_scatter
from shardwise.errors import ModelError
from shardwise.parallel.part import Held
from shardwise.parallel.tensor import join_copies, split_copies, split_parameter
from shardwise.parallel.topology import Topology
from shardwise.spec.sequence import even_sizes
from shardwise.spec.spans import Spans, spans_of

_ALIGNED = 8  # features of a row: torch's grouped matrix products take rows of whole 16 bytes only


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """How tokens reach the experts. count: routed experts in all. capacity_factor: see `kept_choices`; None keeps every choice."""

    topology: Topology
    count: int
    capacity_factor: float | None = None

    @property
    def here(self) -> int:
        return self.count // self.topology["ep"].size


def split_experts(experts: nn.Module, path: str, dispatch: Dispatch, held: dict[str, Held]) -> None:
    """Keep this rank's experts (and its features of them under expert tensor parallelism), and send tokens to where their experts are."""
    topology = dispatch.topology
    ep, etp = topology["ep"], topology["expt_tp"]
    first = ep.rank * dispatch.here
    for name, parameter in list(experts.named_parameters(recurse=False)):
        info = held[f"{path}.{name}"]
        info.expert = True
        part = info.part.split(0, ((first, first + dispatch.here),))
        if etp.size > 1:
            dim, spans = _features(experts, path, name, tuple(parameter.shape), etp.rank, etp.size)
            part = part.split(dim, spans)
        split_parameter(experts, name, part, info)
    experts.num_experts = dispatch.here
    if hasattr(experts, "config") and any(parameter.shape[-1] % _ALIGNED for parameter in experts.parameters(recurse=False)):
        experts.config = copy.copy(experts.config)
        experts.config._experts_implementation = "eager"
    plain = experts.forward

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return _Call(dispatch, experts, plain)(hidden_states, top_k_index, top_k_weights)

    experts.forward = forward


def _features(experts: nn.Module, path: str, name: str, shape: tuple[int, ...], rank: int, size: int) -> tuple[int, Spans]:
    """The dim and rows of expert tensor parallelism: the inner features, of both halves where gate and up are stacked."""
    if (
        getattr(experts, "is_transposed", False)
        or not getattr(experts, "is_concatenated", True)
        or name not in ("gate_up_proj", "down_proj")
    ):
        raise ModelError([f"{path}.{name}: expert tensor parallelism knows stacked [gate; up] weights, this model has others. Try: ETP 1"])
    inner = shape[1] // 2 if name == "gate_up_proj" else shape[2]
    if inner % size:
        raise ModelError([f"{path}.{name}: {inner} features do not split over {size} expert tensor parallel ranks"])
    start, stop = spans_of(even_sizes(inner, size))[rank]
    return (1, ((start, stop), (inner + start, inner + stop))) if name == "gate_up_proj" else (2, ((start, stop),))


class _Call:
    """One call of the routed experts."""

    def __init__(self, dispatch: Dispatch, experts: nn.Module, plain: Any) -> None:
        self.dispatch, self.experts, self.plain = dispatch, experts, plain
        self.topology = dispatch.topology

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        layout, tp = self.topology.layout, self.topology["tp"]
        if tp.group is None or layout.sp:
            return self._route(hidden, index, weights)
        # all tensor parallel ranks hold the same tokens: each sends its share of them
        tokens = hidden.shape[0]
        mine = [split_copies(x, 0, tp.group) for x in (hidden, weights)]
        index = index[slice(*spans_of(even_sizes(tokens, tp.size))[tp.rank])]
        return join_copies(self._route(mine[0], index, mine[1]), 0, tokens, tp.group)

    def _route(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        tokens, width = hidden.shape
        choices = index.shape[1]
        flat = index.reshape(-1)
        keep = torch.ones_like(flat, dtype=torch.bool)
        if self.dispatch.capacity_factor is not None:
            keep = kept_choices(index, weights.detach(), self.dispatch.count, self.dispatch.capacity_factor).reshape(-1)
        order = torch.argsort(torch.where(keep, flat, self.dispatch.count), stable=True)[: int(keep.sum())]
        result = self._exchange(hidden[order // choices], flat[order])
        if len(order) < len(flat):
            result = torch.cat((result, result.new_zeros(1, width)))  # what a dropped choice gives
        place = order.new_full(flat.shape, len(order)).scatter(0, order, torch.arange(len(order), device=order.device))
        back = result.index_select(0, place)
        return (back.view(tokens, choices, width) * weights.unsqueeze(-1).to(back.dtype)).sum(1)

    def _exchange(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Rows sorted by expert, through their experts and back in the same order."""
        ep = self.topology["ep"]
        if ep.group is None:
            return self._compute(rows, expert)
        here = self.dispatch.here
        sent = torch.bincount(expert // here, minlength=ep.size)
        received = all_to_all(sent, [1] * ep.size, [1] * ep.size, 0, ep.group)
        send, receive = torch.stack((sent, received)).tolist()
        arrived = all_to_all(rows, send, receive, 0, ep.group)
        ids = all_to_all(expert % here, send, receive, 0, ep.group)
        return all_to_all(self._compute(arrived, ids), receive, send, 0, ep.group)

    def _compute(self, rows: Tensor, expert: Tensor) -> Tensor:
        etp = self.topology["expt_tp"]
        if etp.group is None:
            return self._local(rows, expert)
        sizes = _sizes(rows.shape[0], rows.device, etp.size, etp.group)
        whole = self._local(all_gather(rows, 0, sizes, etp.group), all_gather(expert, 0, sizes, etp.group))
        return reduce_scatter(whole, 0, sizes, etp.group)

    def _local(self, rows: Tensor, expert: Tensor) -> Tensor:
        if rows.shape[0] == 0:  # tokens and weights stay part of the graph, so that this rank's backward communicates like the others'
            return rows + sum(weight.reshape(-1)[:1].sum() * 0 for weight in self.experts.parameters(recurse=False))
        return self.plain(rows, expert.unsqueeze(1), rows.new_ones(rows.shape[0], 1))


def _sizes(rows: int, device: torch.device, ranks: int, group: dist.ProcessGroup) -> list[int]:
    return all_gather(torch.tensor([rows], device=device), 0, [1] * ranks, group).tolist()


def kept_choices(index: Tensor, weights: Tensor, experts: int, factor: float) -> Tensor:
    """Which (token, choice) pairs an expert has room for: the `ceil(tokens * k / experts * factor)` of largest weight.

    index, weights: [tokens, k]; tokens are those of this rank. Returns booleans [tokens, k] (Megatron Core, drop policy "probs").
    """
    tokens, choices = index.shape
    capacity = math.ceil(tokens * choices / experts * factor)
    if capacity >= tokens:
        return torch.ones_like(index, dtype=torch.bool)
    scores = weights.new_full((tokens, experts), -torch.inf).scatter(1, index, weights)
    best = scores.topk(capacity, dim=0).indices
    room = torch.zeros_like(scores, dtype=torch.bool).scatter(0, best, True)
    return room.gather(1, index)

"""Tensor and sequence parallelism on plain modules: smaller weights, and communication where activations enter and leave a block.

Between two blocks activations are the same on all ranks of the tensor parallel group, or split over them by sequence rows (sequence
parallel). Inside a block they are whole in sequence and split by features, and every gradient is a share: so a replicated weight inside
a block has a pending gradient, and the entry sums the gradient of its input (Shoeybi et al., arXiv:1909.08053; Korthikanti et al.,
arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.collectives.functional import all_gather, reduce_scatter, sum_forward, sum_gradient
from shardwise.errors import ModelError
from shardwise.parallel.part import Held, Part
from shardwise.parallel.roles import LinearRole
from shardwise.parallel.saved import Savings
from shardwise.spec.sequence import even_sizes
from shardwise.spec.spans import Span, spans_of


@dataclass(kw_only=True)
class Rows:
    """Sequence rows of the micro batch that runs: set before each forward, the same for all of a step.

    length: rows of this context parallel rank, whole over tensor parallel ranks. batch: samples.
    """

    length: int = 0
    batch: int = 0


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """The tensor parallel group as the modules see it. sequence: activations between blocks are split by sequence rows. sharing: the
    ranks that hold the same key head, where there are fewer of these than ranks."""

    group: dist.ProcessGroup
    sharing: dist.ProcessGroup | None
    rank: int
    size: int
    sequence: bool
    rows: Rows
    savings: Savings

    def span(self, units: int) -> Span:
        return spans_of(even_sizes(units, self.size))[self.rank]

    def _sizes(self, x: Tensor) -> tuple[int, ...]:
        """Rows per rank on dim -2: of the sequence, or of all samples' rows where a module flattened them."""
        sizes = even_sizes(self.rows.length, self.size)
        return sizes if x.ndim > 2 else tuple(size * self.rows.batch for size in sizes)

    def enter(self, x: Tensor) -> Tensor:
        """Whole rows in a block, from what lies between blocks."""
        if self.sequence:
            dim, sizes, part = x.ndim - 2, self._sizes(x), x.detach()
            return self.savings.again(all_gather(x, dim, sizes, self.group), lambda: all_gather(part, dim, sizes, self.group))
        return sum_gradient(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """What lies between blocks, from pending sums with whole rows."""
        if self.sequence:
            return reduce_scatter(x, x.ndim - 2, self._sizes(x), self.group)
        return sum_forward(x, self.group)


class _SplitFeatures(torch.autograd.Function):
    """A rank's features of a value that all ranks hold; the gradient is gathered, so that all ranks hold it too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.dim, ctx.group = sizes, dim, group
        start = sum(sizes[: group.rank()])
        return x.narrow(dim, start, sizes[group.rank()]).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather(grad.contiguous(), ctx.dim, ctx.sizes, ctx.group), None, None, None


class _GatherFeatures(torch.autograd.Function):
    """All features of a value of which each rank holds some; its gradient is the same on all ranks, each takes its own features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.dim, ctx.group = sizes, dim, group
        return all_gather(x.contiguous(), dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        start = sum(ctx.sizes[: ctx.group.rank()])
        return grad.narrow(ctx.dim, start, ctx.sizes[ctx.group.rank()]).contiguous(), None, None, None


def split_copies(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of `dim` of a value that all ranks hold."""
    return _SplitFeatures.apply(x, even_sizes(x.shape[dim], group.size()), dim % x.ndim, group)


def join_copies(x: Tensor, dim: int, whole: int, group: dist.ProcessGroup) -> Tensor:
    """The value that all ranks hold, of `whole` rows on `dim`, from this rank's rows."""
    return _GatherFeatures.apply(x, even_sizes(whole, group.size()), dim % x.ndim, group)


def split_parameter(module: nn.Module, name: str, part: Part, held: Held) -> None:
    """Give the module a smaller meta parameter that stands for `part`."""
    old = getattr(module, name)
    held.part = part
    setattr(module, name, nn.Parameter(torch.empty(part.local_shape, device=old.device, dtype=old.dtype), requires_grad=old.requires_grad))


def split_block(block: nn.Module, path: str, roles: dict[str, LinearRole], tp: TensorGroup, held: dict[str, Held], config: Any) -> None:
    """Split the linear layers of one block, with its communication."""
    heads = getattr(config, "num_attention_heads", 0)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    attention = hasattr(block, "is_causal") or hasattr(block, "num_key_value_groups")
    for child, role in roles.items():
        linear = block.get_submodule(child)
        assert isinstance(linear, nn.Linear)
        where = f"{path}.{child}"
        if role.kind == "row":
            _split_row(linear, where, role, tp, held)
        elif attention and child in ("k_proj", "v_proj") and key_heads % tp.size and not role.whole:
            _share_heads(linear, where, key_heads, tp, held)
        else:
            units = linear.out_features
            if attention and not role.whole:
                units = key_heads if child in ("k_proj", "v_proj") else heads
            _split_column(linear, where, role, units, tp, held)
    whole = any(role.whole for role in roles.values())
    if attention and not whole and hasattr(block, "num_key_value_groups"):
        block.num_key_value_groups = (heads // tp.size) // max(1, key_heads // tp.size)
    if not whole:
        for name, _ in block.named_parameters():
            info = held.get(f"{path}.{name}")
            if info is not None and name.rpartition(".")[0] not in roles:
                info.pending.append(tp.group)
    block.register_forward_pre_hook(lambda _, args, kwargs: _enter(args, kwargs, tp), with_kwargs=True)


def _enter(args: tuple[Any, ...], kwargs: dict[str, Any], tp: TensorGroup) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args and isinstance(args[0], Tensor):
        return (tp.enter(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": tp.enter(kwargs["hidden_states"])}


def _split_column(linear: nn.Linear, where: str, role: LinearRole, units: int, tp: TensorGroup, held: dict[str, Held]) -> None:
    out = linear.out_features
    if units % tp.size or out % units:
        raise ModelError([f"{where}: {units} heads or features do not split over {tp.size} tensor parallel ranks"])
    _take_rows(linear, where, tp.span(units), out // units, held, copies=1)
    if role.whole:
        plain = linear.forward
        linear.forward = lambda x: join_copies(plain(x), -1, out, tp.group)


def _take_rows(linear: nn.Linear, where: str, span: Span, width: int, held: dict[str, Held], copies: int) -> None:
    rows = ((span[0] * width, span[1] * width),)
    for name in ("weight", "bias"):
        if getattr(linear, name) is not None:
            info = held[f"{where}.{name}"]
            split_parameter(linear, name, info.part.split(0, rows), info)
            info.copies = copies
    linear.out_features = rows[0][1] - rows[0][0]


def _share_heads(linear: nn.Linear, where: str, heads: int, tp: TensorGroup, held: dict[str, Held]) -> None:
    """Fewer key heads than ranks: every rank holds the one head its queries use, and ranks that share it sum its gradient."""
    if tp.size % heads:
        raise ModelError([f"{where}: {heads} key heads and {tp.size} tensor parallel ranks: one must divide the other"])
    sharing = tp.size // heads
    head = tp.rank // sharing
    _take_rows(linear, where, (head, head + 1), linear.out_features // heads, held, copies=sharing)
    assert tp.sharing is not None
    for name in ("weight", "bias"):
        if getattr(linear, name) is not None:
            held[f"{where}.{name}"].pending.append(tp.sharing)


def sharing_ranks(key_heads: int, ranks: tuple[int, ...], rank: int) -> tuple[int, ...] | None:
    """The ranks that hold the same key head as `rank` (its place in `ranks`), where there are fewer key heads than ranks."""
    if not key_heads or key_heads >= len(ranks) or len(ranks) % key_heads:
        return None
    sharing = len(ranks) // key_heads
    first = rank // sharing * sharing
    return ranks[first : first + sharing]


def _split_row(linear: nn.Linear, where: str, role: LinearRole, tp: TensorGroup, held: dict[str, Held]) -> None:
    if linear.in_features % tp.size:
        raise ModelError([f"{where}: {linear.in_features} features do not split over {tp.size} tensor parallel ranks"])
    info = held[f"{where}.weight"]
    split_parameter(linear, "weight", info.part.split(1, (tp.span(linear.in_features),)), info)
    linear.in_features //= tp.size
    if linear.bias is not None and tp.sequence:
        held[f"{where}.bias"].pending.append(tp.group)

    def forward(x: Tensor) -> Tensor:
        y = tp.leave(F.linear(split_copies(x, -1, tp.group) if role.whole else x, linear.weight))
        return y if linear.bias is None else y + linear.bias

    linear.forward = forward


def split_embedding(embedding: nn.Embedding, path: str, tp: TensorGroup, held: dict[str, Held]) -> None:
    """Each rank holds a run of the vocabulary's rows (sizes differ by at most one) and looks up its own tokens; the results are summed."""
    start, stop = tp.span(embedding.num_embeddings)
    info = held[f"{path}.weight"]
    split_parameter(embedding, "weight", info.part.split(0, ((start, stop),)), info)
    padding = embedding.padding_idx
    embedding.padding_idx = padding - start if padding is not None and start <= padding < stop else None
    plain: Callable[[Tensor], Tensor] = embedding.forward

    def forward(tokens: Tensor) -> Tensor:
        here = (tokens >= start) & (tokens < stop)
        found = plain(torch.where(here, tokens - start, 0))
        return tp.leave(found.masked_fill(~here.unsqueeze(-1), 0.0))

    embedding.forward = forward


def split_head(head: nn.Linear, path: str, tp: TensorGroup, held: dict[str, Held], *, tied: nn.Parameter | None) -> None:
    """The output layer computes its own run of the vocabulary; the loss is taken over the split logits."""
    span = tp.span(head.out_features)
    for name in ("weight", "bias"):
        if getattr(head, name) is None:
            continue
        if name == "weight" and tied is not None:
            head.weight = tied
            continue
        info = held[f"{path}.{name}"]
        split_parameter(head, name, info.part.split(0, (span,)), info)
    head.out_features = span[1] - span[0]
    head.register_forward_pre_hook(lambda _, args: (tp.enter(args[0]), *args[1:]))

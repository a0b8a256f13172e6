"""Losses with the mean over the whole tensor, however it is split.

A loss is computed for each element or row on the rank that holds it; `mean` divides the sum over all ranks by the global
number of elements, or by the global sum of weights of the targets that count, so it never depends on the split, and an
empty shard adds nothing. A plain target has the global shape and counts as replicated.
"""

from __future__ import annotations

import inspect
from functools import cache
from math import prod

import torch
from torch import Tensor
from torch.nn import _reduction as legacy
from torch.nn import functional as F

from shardwise.collectives import functional as comm
from shardwise.shard_tensor.ops.pointwise import pointwise_rule
from shardwise.shard_tensor.ops.reductions import mean_rule, sum_rule
from shardwise.shard_tensor.promote import plain_operand
from shardwise.shard_tensor.readable import values_readable
from shardwise.shard_tensor.reduction_plan import (
    HALF,
    accumulation_dtype,
    extreme_over_ranks,
    lowest,
    padded,
    reduction_plan,
)
from shardwise.shard_tensor.registry import call_function, shard_function, shard_function_table, shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local

aten = torch.ops.aten
REDUCTIONS = ("none", "mean", "sum")


# ---------------------------------------------------------------------- a loss for each element


# Functions that give one loss for each element, or for each sample, before they reduce.
BY_ELEMENT = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div,
    F.poisson_nll_loss, F.gaussian_nll_loss, F.soft_margin_loss, F.hinge_embedding_loss, F.margin_ranking_loss,
    F.cosine_embedding_loss, F.multilabel_soft_margin_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
)  # fmt: skip
# Whose `mean` divides by the sum of `weight`, where there is one.
WEIGHTED_MEAN = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)


@cache
def _signature(func) -> inspect.Signature:
    return inspect.signature(func)


def _by_element(func, args, kwargs):
    """The losses of each rank's elements, then their sum or mean. Communication: none; a sum or mean is a pending sum."""
    bound = _signature(func).bind(*args, **kwargs)
    named = bound.arguments
    reduction = named.get("reduction", "mean")
    if named.get("size_average") is not None or named.get("reduce") is not None:
        reduction = legacy.legacy_get_string(named.pop("size_average", None), named.pop("reduce", None))
    named["reduction"] = "none"
    losses = call_function(func, (), bound.args, bound.kwargs)
    if reduction == "none":
        return losses
    if reduction == "batchmean" and func is F.kl_div:
        return losses.sum() / named["input"].shape[0]
    if reduction not in REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction: use 'none', 'mean' or 'sum'")
    if reduction == "mean" and func in WEIGHTED_MEAN and named.get("weight") is not None:
        return losses.sum() / named["weight"].sum()
    return losses.mean() if reduction == "mean" else losses.sum()


shard_function_table(BY_ELEMENT, _by_element)

# Operators with a `reduction` argument, and its place.
ELEMENT_OPS = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
    aten.mse_loss_backward.default: 3,
    aten.smooth_l1_loss_backward.default: 3,
    aten.huber_loss_backward.default: 3,
    aten.soft_margin_loss_backward.default: 3,
    aten.binary_cross_entropy_backward.default: 4,
}
_MEAN = 1


@shard_rule(*ELEMENT_OPS)
def element_loss(op, args, kwargs):
    """Communication: as a pointwise op; a sum or mean is a pending sum."""
    place = ELEMENT_OPS[op]
    names = [a.name for a in op._schema.arguments]
    defaults = [a.default_value for a in op._schema.arguments]
    values = [*args, *(kwargs.get(name, default) for name, default in zip(names[len(args) :], defaults[len(args) :], strict=True))]
    reduction, values[place] = values[place], 0
    if "backward" in op._schema.name:
        if reduction == _MEAN:
            count = prod(torch.broadcast_shapes(values[1].shape, values[2].shape))
            values[0] = pointwise_rule(aten.div.Scalar, (values[0], count), {}) if isinstance(values[0], ShardTensor) else values[0] / count
        return pointwise_rule(op, tuple(values), {})
    losses = pointwise_rule(op, tuple(values), {})
    if not reduction:
        return losses
    return mean_rule(None, (losses,), {}) if reduction == _MEAN else sum_rule(aten.sum.default, (losses,), {})


# ---------------------------------------------------------------------- a loss for each row of classes


@shard_function(F.cross_entropy)
def cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0):
    """Class indices or probabilities, classes on dim 1 (dim 0 of a vector), sharded or not.

    Communication: unsharded classes: none for `none` and `sum`, one all-reduce of three numbers for `mean`. Sharded classes
    (vocabulary-parallel): also one all-reduce for the maxima and one for the sums, of one number for each row and term.
    Errors: IndexError for a target that is no class, on all ranks, where all know of it: for a plain target and for `mean`.
    `none` and `sum` of a sharded target raise on the rank that holds it. CUDA: a device assertion on that rank, as in plain torch.
    """
    if not isinstance(input, ShardTensor):
        return NotImplemented
    rows = _Rows(input, target, weight, _reduction(reduction, size_average, reduce), ignore_index)
    if rows.probabilities:
        losses = _probability_losses(rows, label_smoothing)
        return rows.reduce(losses, None)
    if rows.split:
        losses = _index_losses(rows, *_log_sums(rows, label_smoothing), ignore_index, label_smoothing)
    else:
        losses = F.cross_entropy(
            rows.local, rows.target, rows.weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )
    return rows.reduce(losses, ignore_index)


@shard_function(F.nll_loss)
def nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    """As `cross_entropy` of log-probabilities. Communication: as there, without the maxima."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    rows = _Rows(input, target, weight, _reduction(reduction, size_average, reduce), ignore_index)
    if rows.split:
        chosen = comm.sum_forward(_chosen(rows, rows.local), rows.class_group)
        losses = _index_losses(rows, None, chosen, None, ignore_index, 0.0)
    else:
        losses = F.nll_loss(rows.local, rows.target, rows.weight, ignore_index=ignore_index, reduction="none")
    return rows.reduce(losses, ignore_index)


@shard_function(F.linear_cross_entropy)
def linear_cross_entropy(
    input, linear_weight, target, *, linear_bias=None, weight=None, reduction="mean", ignore_index=None, label_smoothing=0.0, options=None
):
    """`cross_entropy(linear(input))`; `options` only choose how one process cuts the work. Communication: as these two."""
    if linear_weight.ndim != 2:
        return NotImplemented
    logits = F.linear(input, linear_weight, linear_bias)
    return F.cross_entropy(
        logits,
        target,
        weight,
        ignore_index=-100 if ignore_index is None else ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _reduction(reduction: str, size_average, reduce) -> str:
    if size_average is not None or reduce is not None:
        reduction = legacy.legacy_get_string(size_average, reduce)
    if reduction not in REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction: use 'none', 'mean' or 'sum'")
    return reduction


class _Rows:
    """This rank's rows of scores, their targets and class weights, all plain, and how losses of rows are reduced."""

    def __init__(self, input: ShardTensor, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int) -> None:
        x = redistribute(input, input._spec.gradient())
        self.spec = x._spec
        self.reduction = reduction
        self.dim = 1 if self.spec.ndim > 1 else 0
        self.classes = self.spec.shape[self.dim]
        self.plan = reduction_plan(self.spec, self.dim)
        self.split = bool(self.plan.axes)
        self.rows = self.plan.out
        self.probabilities = target.is_floating_point() and tuple(target.shape) == tuple(self.spec.shape)
        wanted = self.spec if self.probabilities else self.rows
        if tuple(target.shape) != tuple(wanted.shape):
            raise ValueError(
                f"target of shape {tuple(target.shape)} for an input of global shape {tuple(self.spec.shape)}: "
                f"give class indices of shape {tuple(self.rows.shape)} (of the whole tensor, or a ShardTensor)"
            )
        self.local = to_local(x)
        self.no_class = 0  # targets of this rank that are no class, counted where the others hear of them
        if not self.probabilities and not isinstance(target, ShardTensor):
            self._refuse(self._count_no_class(target, ignore_index))
        self.target = _part(target, wanted, self.spec)
        if not self.probabilities and isinstance(target, ShardTensor):
            self.no_class = self._count_no_class(self.target, ignore_index)
            if self.no_class and reduction == "mean":
                self.target = torch.full_like(self.target, ignore_index)
            self._refuse(self.no_class if reduction != "mean" else 0)
        self.weight = plain_operand(weight, (self.spec,))
        self.class_group = self.plan.group if self.split else None

    def reduce(self, losses: Tensor, ignore_index: int | None) -> ShardTensor:
        """losses: of this rank's rows. ignore_index: None where the mean is over all rows."""
        if self.reduction == "none":
            return from_local(losses.to(self.local.dtype), self.rows)
        plan = reduction_plan(self.rows, None)
        total = losses.sum(dtype=accumulation_dtype(losses.dtype))
        half = self.local.dtype in HALF
        if self.reduction == "mean":
            if ignore_index is None:
                total = total / self.rows.numel
            else:
                both = torch.stack((total, self._weight_of_targets(ignore_index, total.dtype), total.new_full((), self.no_class)))
                both = comm.sum_forward(both, plan.group) if plan.axes else both
                if values_readable(both):
                    self._refuse(int(both[2]))
                return from_local((both[0] / both[1]).to(self.local.dtype), plan.out)
        if half:
            total = comm.sum_forward(total, plan.group) if plan.axes else total
            return from_local(total.to(self.local.dtype), plan.out)
        return from_local(total, plan.pending)

    def _count_no_class(self, target: Tensor, ignore_index: int) -> int:
        if not values_readable(target):
            return 0
        return int(((target < 0) | (target >= self.classes)).logical_and_(target != ignore_index).sum())

    def _refuse(self, count: int) -> None:
        if count:
            raise IndexError(
                f"{count} targets for {self.classes} classes are out of bounds: give class indices from 0 to {self.classes - 1}, "
                "or ignore_index for positions that do not count"
            )

    def _weight_of_targets(self, ignore_index: int, dtype: torch.dtype) -> Tensor:
        valid = self.target != ignore_index
        if self.weight is None:
            return valid.sum().to(dtype)
        return torch.where(valid, self.weight[torch.where(valid, self.target, 0)], 0).sum(dtype=dtype)


def _part(value: Tensor, wanted: ShardTensorSpec, spec: ShardTensorSpec) -> Tensor:
    """This rank's rows of `value`, plain; a plain `value` is complete on every rank."""
    if isinstance(value, ShardTensor):
        return to_local(redistribute(value, wanted.with_dtype(value.dtype)))
    return plain_operand(value, (spec,))[tuple(slice(start, stop) for start, stop in wanted.box())]


def _own_weight(rows: _Rows) -> Tensor | None:
    """The weights of this rank's classes, shaped to broadcast against its scores."""
    if rows.weight is None:
        return None
    shape = [1] * rows.spec.ndim
    shape[rows.dim] = -1
    return rows.weight[slice(*rows.spec.box()[rows.dim])].view(shape)


def _shifted(rows: _Rows) -> Tensor:
    """The scores less the maximum of their row over all ranks. Communication: one all-reduce."""
    scores = rows.local.to(accumulation_dtype(rows.local.dtype))
    with torch.no_grad():
        top = padded(scores, rows.plan, lowest(scores.dtype)).amax(rows.dim)
        top = extreme_over_ranks(top, rows.class_group, largest=True)
        top = torch.where(top.abs() == torch.inf, 0, top)
    return scores - top.unsqueeze(rows.dim)


def _log_sums(rows: _Rows, label_smoothing: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of each row, relative to its maximum: log of the sum of exponentials, score of the target, weighted sum of scores."""
    shifted = _shifted(rows)
    terms = [shifted.exp().sum(rows.dim), _chosen(rows, shifted)]
    if label_smoothing:
        weight = _own_weight(rows)
        terms.append((shifted if weight is None else shifted * weight).sum(rows.dim))
    total = comm.sum_forward(torch.stack(terms), rows.class_group)
    return total[0].log(), total[1], total[2] if label_smoothing else None


def _chosen(rows: _Rows, scores: Tensor) -> Tensor:
    """The score of each row's target if this rank has that class, else 0."""
    start, stop = rows.spec.box()[rows.dim]
    if start == stop:
        return scores.sum(rows.dim)
    inside = (rows.target >= start) & (rows.target < stop)
    place = torch.where(inside, rows.target - start, 0).unsqueeze(rows.dim)
    return torch.where(inside, scores.gather(rows.dim, place).squeeze(rows.dim), 0)


def _index_losses(rows: _Rows, log_sum, chosen: Tensor, summed, ignore_index: int, label_smoothing: float) -> Tensor:
    """The loss of each row from sums over all classes; 0 for ignored targets."""
    valid = rows.target != ignore_index
    losses = -chosen if log_sum is None else log_sum - chosen
    if rows.weight is not None:
        losses = losses * rows.weight[torch.where(valid, rows.target, 0)]
    if label_smoothing:
        weights = rows.classes if rows.weight is None else rows.weight.sum()
        losses = (1 - label_smoothing) * losses + label_smoothing / rows.classes * (log_sum * weights - summed)
    return torch.where(valid, losses, 0)


def _probability_losses(rows: _Rows, label_smoothing: float) -> Tensor:
    """The loss of each row for target probabilities."""
    if not rows.split:
        return F.cross_entropy(rows.local, rows.target, rows.weight, reduction="none", label_smoothing=label_smoothing)
    shifted = _shifted(rows)
    target = rows.target * (1 - label_smoothing) + label_smoothing / rows.classes if label_smoothing else rows.target
    weight = _own_weight(rows)
    target = target if weight is None else target * weight
    terms = [t.sum(rows.dim) for t in (shifted.exp(), target * shifted, target.to(shifted.dtype))]
    total = comm.sum_forward(torch.stack(terms), rows.class_group)
    return total[0].log() * total[2] - total[1]


# ---------------------------------------------------------------------- margins between classes


@shard_function(F.multi_margin_loss)
def multi_margin_loss(input, target, p=1, margin=1.0, weight=None, size_average=None, reduce=None, reduction="mean"):
    """Classes are gathered if sharded. Communication: none else; a sum or mean is a pending sum."""
    reduction = _reduction(reduction, size_average, reduce)
    return _margin(lambda x, t, w: F.multi_margin_loss(x, t, p, margin, w, reduction="none"), input, target, weight, reduction)


@shard_function(F.multilabel_margin_loss)
def multilabel_margin_loss(input, target, size_average=None, reduce=None, reduction="mean"):
    """Classes are gathered if sharded. Communication: none else; a sum or mean is a pending sum."""
    reduction = _reduction(reduction, size_average, reduce)
    return _margin(lambda x, t, w: F.multilabel_margin_loss(x, t, reduction="none"), input, target, None, reduction)


def _margin(losses_of, input, target, weight, reduction: str):
    if not isinstance(input, ShardTensor):
        return NotImplemented
    spec = input._spec.gradient()
    x = redistribute(input, spec.replicate(spec.mesh_dims_of(spec.ndim - 1)))
    spec = x._spec
    rows = reduction_plan(spec, spec.ndim - 1).out
    local = to_local(x)
    wanted = spec if target.ndim == spec.ndim else rows
    target, weight = _part(target, wanted, spec), plain_operand(weight, (spec,))
    losses = losses_of(local, target, weight) if local.numel() else local.sum(-1)
    result = from_local(losses, rows)
    return result if reduction == "none" else result.mean() if reduction == "mean" else result.sum()

"""Dropout: the same elements (or channels) of the whole tensor are dropped whatever the split. See `shardwise.random`."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.random import keep_mask
from shardwise.shard_tensor.ops.random import local_values
from shardwise.shard_tensor.reduction_plan import completed, reduction_plan
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, redistribute

aten = torch.ops.aten
_NoTorchFunction = torch._C.DisableTorchFunctionSubclass
ALPHA = 1.7580993408473766  # of alpha dropout: minus the limit of SELU at minus infinity (Klambauer et al. 2017)


def _check(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _scale(p: float) -> float:
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def _kept(spec: ShardTensorSpec, device: torch.device, p: float) -> Tensor:
    """Which elements of this rank's shard of `spec` are kept."""
    return local_values(lambda bits: keep_mask(bits, 1.0 - p), spec, device)


@shard_rule(aten.native_dropout.default)
def native_dropout(op, args, kwargs):
    """The result, and which elements were kept. Communication: none."""
    x, p, train = args
    local, spec = completed(x)
    if train is False:
        return ShardTensor(local.clone(), spec), ShardTensor(torch.ones_like(local, dtype=torch.bool), spec)
    keep = _kept(spec, local.device, p)
    return ShardTensor(local * keep * _scale(p), spec), ShardTensor(keep, spec.contiguous())


@shard_function(F.dropout)
def dropout(input, p=0.5, training=True, inplace=False):
    """Communication: none."""
    _check(p)
    if not isinstance(input, ShardTensor) or not training or p == 0.0:
        return input
    if inplace:
        return input.mul_(_noise(input, input._spec.gradient(), p))
    with _NoTorchFunction():
        return torch.native_dropout(input, p, True)[0]


@shard_function(torch.dropout)
def torch_dropout(input, p, train):
    """As `F.dropout`."""
    return dropout(input, p, train)


@shard_function(torch.dropout_)
def torch_dropout_(input, p, train):
    """As `F.dropout` in place."""
    return dropout(input, p, train, True)


def _noise(x: ShardTensor, spec: ShardTensorSpec, p: float) -> ShardTensor:
    """Factors laid out as `spec`: 0 where dropped, `1 / (1 - p)` where kept."""
    keep = _kept(spec, x._local_tensor.device, p)
    return ShardTensor(keep.to(x.dtype) * _scale(p), spec.contiguous())


def _channels(x: ShardTensor, batched: bool) -> ShardTensorSpec:
    """The layout of one number for each channel of each sample."""
    return reduction_plan(x._spec.gradient(), range(2 if batched else 1, x._spec.ndim), keepdim=True).out


def _channel_dropout(input, p: float, training: bool, inplace: bool, unbatched_ndim: int | None):
    _check(p)
    if not isinstance(input, ShardTensor) or not training or p == 0.0:
        return input
    if input.ndim < 2:
        raise RuntimeError(f"Feature dropout requires at least 2 dimensions in the input, got {input.ndim}")
    noise = _noise(input, _channels(input, input.ndim != unbatched_ndim), p)
    return input.mul_(noise) if inplace else input * noise


@shard_function(F.dropout1d)
def dropout1d(input, p=0.5, training=True, inplace=False):
    """Drops whole channels. Communication: none."""
    if input.ndim not in (2, 3):
        raise RuntimeError(f"dropout1d: Expected 2D or 3D input, but received a {input.ndim}D input: use dropout2d or dropout3d for it")
    return _channel_dropout(input, p, training, inplace, 2)


@shard_function(F.dropout2d)
def dropout2d(input, p=0.5, training=True, inplace=False):
    """Drops whole channels. Communication: none."""
    return _channel_dropout(input, p, training, inplace, None)


@shard_function(F.dropout3d)
def dropout3d(input, p=0.5, training=True, inplace=False):
    """Drops whole channels. Communication: none."""
    return _channel_dropout(input, p, training, inplace, 4)


@shard_function(torch.feature_dropout)
def feature_dropout(input, p, train):
    """Drops whole channels. Communication: none."""
    return _channel_dropout(input, p, train, False, None)


@shard_function(F.alpha_dropout)
def alpha_dropout(input, p=0.5, training=False, inplace=False):
    """Keeps mean and variance under SELU. Communication: none."""
    return _alpha_dropout(input, p, training, inplace, by_channel=False)


@shard_function(F.feature_alpha_dropout)
def feature_alpha_dropout(input, p=0.5, training=False, inplace=False):
    """As `alpha_dropout`, of whole channels. Communication: none."""
    return _alpha_dropout(input, p, training, inplace, by_channel=True)


@shard_function(torch.alpha_dropout)
def torch_alpha_dropout(input, p, train):
    """As `F.alpha_dropout`."""
    return alpha_dropout(input, p, train)


@shard_function(torch.feature_alpha_dropout)
def torch_feature_alpha_dropout(input, p, train):
    """As `F.feature_alpha_dropout`."""
    return feature_alpha_dropout(input, p, train)


def _alpha_dropout(input, p: float, training: bool, inplace: bool, by_channel: bool):
    _check(p)
    if not isinstance(input, ShardTensor) or not training or p == 0.0:
        return input
    spec = _channels(input, True) if by_channel else input._spec.gradient()
    keep = _kept(spec, input._local_tensor.device, p).to(input.dtype)
    a = 1.0 / math.sqrt((ALPHA**2 * p + 1) * (1 - p)) if p < 1.0 else 0.0
    factor, shift = (ShardTensor(t, spec.contiguous()) for t in (keep * a, (keep - 1) * (ALPHA * a) + ALPHA * a * p))
    if inplace:
        return input.mul_(factor).add_(shift)
    return redistribute(input, input._spec.gradient()) * factor + shift

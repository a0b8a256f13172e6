"""Ops that draw random numbers: the same global numbers whatever the split. See `shardwise.random`.

Communication: none, but for what `shardwise.random` says. Ops without a form here gather their arguments and run from a
generator seeded with the op's key, so that no rank ever draws numbers of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.random import draw_key, integers, keep_mask, normal, open_uniform, random_values, uniform
from shardwise.shard_tensor import registry
from shardwise.shard_tensor.aliases import after_write, check_writable, replace_shard
from shardwise.shard_tensor.fallback import fallback_rule
from shardwise.shard_tensor.reduction_plan import completed
from shardwise.shard_tensor.registry import shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor

aten = torch.ops.aten


# ---------------------------------------------------------------------- distributions

# Values of each from 64 bits; the other arguments are those of the torch function.


def _normal(bits: Tensor, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return normal(bits, dtype) * std + mean


def _uniform(bits: Tensor, dtype: torch.dtype, **bounds: float) -> Tensor:
    low, high = bounds.get("from", 0.0), bounds.get("to", 1.0)
    return uniform(bits, dtype) * (high - low) + low


def _bernoulli(bits: Tensor, dtype: torch.dtype, p: float = 0.5) -> Tensor:
    return keep_mask(bits, p).to(dtype)


def _exponential(bits: Tensor, dtype: torch.dtype, lambd: float = 1.0) -> Tensor:
    return (-open_uniform(bits).log() / lambd).to(dtype)


def _cauchy(bits: Tensor, dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return (((open_uniform(bits) - 0.5) * math.pi).tan() * sigma + median).to(dtype)


def _geometric(bits: Tensor, dtype: torch.dtype, p: float) -> Tensor:
    if p == 1:
        return torch.ones_like(bits).to(dtype)
    return (open_uniform(bits).log() / math.log1p(-p)).ceil().to(dtype)


def _log_normal(bits: Tensor, dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return (normal(bits, torch.float64) * std + mean).exp().to(dtype)


def _random(bits: Tensor, dtype: torch.dtype, **bounds: int | None) -> Tensor:
    low, high = bounds.get("from") or 0, bounds.get("to")
    if high is None:
        if dtype.is_floating_point:
            high = 2 ** {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24) + 1
        else:
            high = 2 if dtype is torch.bool else torch.iinfo(dtype).max if dtype is torch.int64 else torch.iinfo(dtype).max + 1
    return integers(bits, low, high).to(dtype)


FILLS = {
    aten.normal_.default: _normal,
    aten.normal_functional.default: _normal,
    aten.uniform_.default: _uniform,
    aten.uniform.default: _uniform,
    aten.bernoulli_.float: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.exponential_.default: _exponential,
    aten.exponential.default: _exponential,
    aten.cauchy_.default: _cauchy,
    aten.cauchy.default: _cauchy,
    aten.geometric_.default: _geometric,
    aten.geometric.default: _geometric,
    aten.log_normal_.default: _log_normal,
    aten.log_normal.default: _log_normal,
    aten.random_.default: _random,
    aten.random_.to: _random,
    getattr(aten.random_, "from"): _random,
}
LIKE = {
    aten.rand_like.default: _uniform,
    aten.rand_like.generator: _uniform,
    aten.randn_like.default: _normal,
    aten.randn_like.generator: _normal,
}
INTEGERS_LIKE = {
    aten.randint_like.default,
    aten.randint_like.generator,
    aten.randint_like.low_dtype,
    aten.randint_like.low_generator_dtype,
}


def local_values(make, spec: ShardTensorSpec, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """This rank's shard of a random tensor laid out as `spec`. make: 64 random bits to a value, by element."""
    return random_values(make, draw_key(spec.mesh, generator), spec.box(), spec.shape, device)


def local_numbers(spec: ShardTensorSpec, device: torch.device, dtype: torch.dtype, make, generator=None, **arguments) -> Tensor:
    """The same with one of the distributions above."""
    if not dtype.is_complex:
        return local_values(lambda bits: make(bits, dtype, **arguments), spec, device, generator)
    key, real = draw_key(spec.mesh, generator), dtype.to_real()
    parts = random_values(lambda bits: make(bits, real, **arguments), key, (*spec.box(), (0, 2)), (*spec.shape, 2), device)
    return torch.view_as_complex(parts * math.sqrt(0.5) if make is _normal else parts)


def _named(op, args: tuple, kwargs: dict) -> dict:
    """The arguments of `op` after the tensor, by name."""
    names = [a.name for a in op._schema.arguments[1 : len(args)]]
    return {**dict(zip(names, args[1:], strict=True)), **kwargs}


@shard_rule(*FILLS)
def fill(op, args, kwargs):
    """Fills a tensor, or makes one like it. Communication: none."""
    x = args[0]
    named = _named(op, args, kwargs)
    op(x._local_tensor.new_empty(0), *args[1:], **kwargs)  # the op's own checks of its arguments
    generator = named.pop("generator", None)
    spec = x._spec.gradient()
    numbers = local_numbers(spec, x.device, x.dtype, FILLS[op], generator, **named)
    if not op._schema.is_mutable:
        return ShardTensor(numbers, spec.contiguous())
    check_writable(x)
    if x._spec is spec:
        x._local_tensor.copy_(numbers)
    else:
        replace_shard(x, numbers, spec)
    after_write(x)
    return x


@shard_rule(*LIKE)
def random_like(op, args, kwargs):
    """In the layout of the argument. Communication: none."""
    x = args[0]
    spec = x._spec.gradient().contiguous()
    dtype = kwargs.get("dtype") or x.dtype
    device = torch.device(kwargs.get("device") or x.device)
    return ShardTensor(local_numbers(spec, device, dtype, LIKE[op], kwargs.get("generator")), spec)


@shard_rule(*INTEGERS_LIKE)
def randint_like(op, args, kwargs):
    """In the layout of the argument. Communication: none."""
    x = args[0]
    low, high = args[1:] if len(args) == 3 else (0, args[1])
    if high <= low:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    spec = x._spec.gradient().contiguous()
    device = torch.device(kwargs.get("device") or x.device)
    dtype = kwargs.get("dtype") or x.dtype
    return ShardTensor(local_values(lambda bits: integers(bits, low, high).to(dtype), spec, device, kwargs.get("generator")), spec)


@shard_rule(aten.bernoulli.default)
def bernoulli(op, args, kwargs):
    """The argument holds the probabilities. Communication: none."""
    local, spec = completed(args[0])
    draws = local_values(lambda bits: uniform(bits, torch.float64), spec, local.device, kwargs.get("generator"))
    return ShardTensor((draws < local).to(local.dtype), spec)


@shard_rule(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal_of_tensors(op, args, kwargs):
    """Communication: as the sum and product of its arguments."""
    mean, std = (*args, 1.0)[:2]
    std = kwargs.get("std", std)
    like = mean if isinstance(mean, ShardTensor) else std
    if any(isinstance(t, Tensor) and t.shape != like.shape for t in (mean, std)):
        return seeded_rule(op, args, kwargs)
    spec = like._spec.gradient().contiguous()
    numbers = ShardTensor(local_numbers(spec, like.device, like.dtype, _normal, kwargs.get("generator")), spec)
    return aten.add.Tensor(aten.mul.Tensor(numbers, std), mean)


# ---------------------------------------------------------------------- all others


def is_random(op) -> bool:
    """Whether `op` may draw from a generator."""
    return torch.Tag.nondeterministic_seeded in op.tags or any(a.name == "generator" for a in op._schema.arguments)


def seeded_rule(op, args: tuple, kwargs: dict):
    """Gathers, and runs on all ranks from one generator state. Communication: as the fallback."""
    named = {a.name: value for a, value in zip(op._schema.arguments, args, strict=False)} | kwargs
    if any(named.get(name) == 0 for name in ("dropout_p", "dropout")):
        return fallback_rule(op, args, kwargs)
    values = [v for value in named.values() for v in (value if isinstance(value, list | tuple) else [value])]
    first = next(v for v in values if isinstance(v, ShardTensor))
    seed = int(draw_key(first._spec.mesh, named.get("generator")))
    device = first._local_tensor.device
    if any(a.name == "generator" for a in op._schema.arguments):
        position = [a.name for a in op._schema.arguments].index("generator")
        args = args[:position] if not op._schema.arguments[position].kwarg_only else args
        return fallback_rule(op, args, {**kwargs, "generator": torch.Generator(device).manual_seed(seed)})
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type if device.type != "cpu" else "cuda"):
        torch.manual_seed(seed)
        return fallback_rule(op, args, kwargs)


registry.rule_families.append((is_random, seeded_rule))

"""Fourier transforms over dims that may be sharded: the split moves to another dim, then every transform is local.

A forward transform leaves the split where it moved it: what follows is mostly a product with the spectrum, or with its lowest modes, and
an inverse transform, which brings the split back. So a pair costs two all-to-alls, and modes that are cut off never travel. Reading the
real or imaginary part, or the magnitude, of a spectrum also brings the split back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.shard_tensor.arguments import normal_dim, torch_names
from shardwise.shard_tensor.fallback import fallback_rule
from shardwise.shard_tensor.registry import shard_function, shard_function_table, shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, redistribute
from shardwise.shard_tensor.transposed import like_spec, run_whole, whole_spec

aten = torch.ops.aten
fft = torch.fft


# ---------------------------------------------------------------------- where the split came from


def _moved_from(spec: ShardTensorSpec, moved: ShardTensorSpec) -> None:
    """Remember that a spectrum laid out as `moved` came from a tensor laid out as `spec`. A hint only, the same on all ranks; any layout
    is right."""
    if moved.placements != spec.placements:
        spec.mesh.__dict__.setdefault("_shardwise_spectra", {})[spec.ndim, moved.placements] = spec.gradient()


def _brought_back(x: ShardTensor, spectrum: ShardTensorSpec) -> ShardTensor:
    """`x`, made from a spectrum laid out as `spectrum`, in the layout from which that came."""
    source = spectrum.mesh.__dict__.get("_shardwise_spectra", {}).get((spectrum.ndim, spectrum.placements))
    return x if source is None or source.ndim != x.ndim else redistribute(x, like_spec(source, tuple(x.shape)))


# ---------------------------------------------------------------------- transforms

ONE_DIM = [fft.fft, fft.ifft, fft.rfft, fft.irfft, fft.hfft, fft.ihfft]
MANY_DIMS = [fft.fftn, fft.ifftn, fft.rfftn, fft.irfftn, fft.hfftn, fft.ihfftn]
TWO_DIMS = [fft.fft2, fft.ifft2, fft.rfft2, fft.irfft2, fft.hfft2, fft.ihfft2]
INVERSE = {fft.ifft, fft.irfft, fft.ifftn, fft.irfftn, fft.ifft2, fft.irfft2, fft.hfft, fft.hfftn, fft.hfft2}


def _transformed(func: Callable, x: ShardTensor, dims: list[int], run: Callable[[Tensor], Tensor]) -> ShardTensor:
    before = x._spec
    moved = whole_spec(before, dims)
    result = run_whole(x, dims, run)
    if func in INVERSE:
        return _brought_back(result, moved)
    _moved_from(before, moved)
    return result


def _one_dim(func: Callable):
    @torch_names
    def handler(input: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, *, out: Tensor | None = None):
        if not isinstance(input, ShardTensor) or out is not None or not input.ndim:
            return NotImplemented
        dim = normal_dim(dim, input.ndim)
        return _transformed(func, input, [dim], lambda x: func(x, n, dim, norm))

    handler.__doc__ = "Communication: none along an unsharded dim, else an all-to-all; inverse transforms one more, back."
    return handler


def _many_dims(func: Callable, default: tuple[int, ...] | None):
    @torch_names
    def handler(input: Tensor, s=None, dim=default, norm: str | None = None, *, out: Tensor | None = None):
        if not isinstance(input, ShardTensor) or out is not None or not input.ndim:
            return NotImplemented
        dim = (dim,) if isinstance(dim, int) else dim
        s = (s,) if isinstance(s, int) else s
        if dim is None:
            dim = range(input.ndim) if s is None else range(input.ndim - len(s), input.ndim)
        dims = [normal_dim(d, input.ndim) for d in dim]
        return _transformed(func, input, dims, lambda x: func(x, s, dims, norm))

    handler.__doc__ = "Communication: none along unsharded dims, else an all-to-all; inverse transforms one more, back."
    return handler


for _func in ONE_DIM:
    shard_function(_func)(_one_dim(_func))
for _func in MANY_DIMS:
    shard_function(_func)(_many_dims(_func, None))
for _func in TWO_DIMS:
    shard_function(_func)(_many_dims(_func, (-2, -1)))


def _shift(inverse: bool):
    @torch_names
    def handler(input: Tensor, dim=None):
        if not isinstance(input, ShardTensor):
            return NotImplemented
        dims = range(input.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
        dims = [normal_dim(d, input.ndim) for d in dims]
        shifts = [(input.shape[d] + inverse) // 2 for d in dims]
        return torch.roll(input, shifts, dims)

    handler.__doc__ = "Communication: as `torch.roll`."
    return handler


shard_function(fft.fftshift)(_shift(False))
shard_function(fft.ifftshift)(_shift(True))


# ---------------------------------------------------------------------- from the spectrum to real numbers


def _parts(func, args, kwargs):
    """`func` of a spectrum, with the split brought back first; of any other tensor as it is."""
    x = args[0]
    if len(args) == 1 and not kwargs and isinstance(x, ShardTensor) and x.dtype.is_complex:
        back = _brought_back(x, x._spec)
        if back is not x:
            with torch._C.DisableTorchFunctionSubclass():
                return func(back)
    return NotImplemented


shard_function_table([torch.real, Tensor.real.__get__, torch.imag, Tensor.imag.__get__, torch.angle, Tensor.angle], _parts)


# ---------------------------------------------------------------------- below autograd


@shard_rule(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def fft_rule(op, args, kwargs):
    """Communication: as the functions; the split stays where it is moved."""
    x, dims, *rest = args
    if not dims or not x._spec.ndim:
        return fallback_rule(op, args, kwargs)
    dims = [normal_dim(d, x._spec.ndim) for d in dims]
    with torch.no_grad():
        return run_whole(x, dims, lambda local: op(local, dims, *rest, **kwargs))

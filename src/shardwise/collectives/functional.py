"""Collectives with gradients, on plain tensors.

Every function takes a process group and speaks group ranks. Shards may be uneven and empty: their sizes are given as ints that all
ranks know, so nothing is asked at run time and exactly these rows travel, contiguous. All are differentiable any number of times:
the gradient of a collective is its transpose, itself one of these collectives. In a group of one rank the result is x itself.

Data moves for every dtype. Sums take numbers (bool is refused: a sum of bool has no bool result), averages floating or complex numbers,
maximum and minimum real numbers and bool. Compiled graphs work too; what they send is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardwise.collectives.counter import record

Op = Literal["sum", "avg", "max", "min", "product"]

_c10d = torch.ops._c10d_functional


def all_gather(x: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the shards of all ranks along `dim`; rank r holds `sizes[r]` rows. The gradient is `reduce_scatter`."""
    if group.size() == 1:
        return x
    return _linear(x, lambda t: _all_gather(t, dim % t.ndim, sizes, group), lambda g: reduce_scatter(g, dim, sizes, group))


def reduce_scatter(x: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over ranks, of which rank r keeps its `sizes[r]` rows of `dim`. The gradient is `all_gather`."""
    if group.size() == 1:
        return x
    return _linear(x, lambda t: _reduce_scatter(t, dim % t.ndim, sizes, group), lambda g: all_gather(g, dim, sizes, group))


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup, op: Op = "sum") -> torch.Tensor:
    """Combine over ranks; every rank gets the result.

    Gradients of "sum" and "avg" are `all_reduce` with the same op; of "max" and "min" the summed gradient goes to the largest
    (smallest) entries, in equal parts where several ranks tie. "product" has no gradient.
    """
    if group.size() == 1:
        return x
    if op in ("sum", "avg") or not (x.requires_grad and torch.is_grad_enabled()):
        return _linear(x, lambda t: _all_reduce(t, group, op), lambda g: all_reduce(g, group, op))
    if op == "product":
        raise NotImplementedError("all_reduce with op='product' has no gradient: detach its input, or reduce the logarithm with op='sum'")
    return _Extreme.apply(x, group, op)


def sum_forward(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over ranks; the gradient passes unchanged. For a sum whose result every rank uses alike (a replicated value)."""
    if group.size() == 1:
        return x
    return _linear(x, lambda t: _all_reduce(t, group, "sum"), lambda g: sum_gradient(g, group))


def sum_gradient(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The value unchanged; its gradient is summed over ranks. For a replicated value that every rank uses for a part of the work."""
    if group.size() == 1:
        return x
    return _linear(x, lambda t: t.view_as(t), lambda g: sum_forward(g, group))


def all_to_all(
    x: torch.Tensor,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
    recv_dim: int | None = None,
) -> torch.Tensor:
    """Send `send_sizes[r]` rows of `dim` to rank r, and concatenate along `recv_dim` (default `dim`) the `recv_sizes[s]` rows from rank s.

    With `recv_dim` other than `dim` the split moves from one dim to the other: x holds this rank's rows of `recv_dim` and all of
    `dim`; the result holds all rows of `recv_dim` and this rank's part of `dim`.
    """
    if group.size() == 1:
        return x
    into = dim if recv_dim is None else recv_dim
    return _linear(
        x,
        lambda t: _all_to_all(t, send_sizes, recv_sizes, dim % t.ndim, into % t.ndim, group),
        lambda g: all_to_all(g, recv_sizes, send_sizes, into, group, dim),
    )


def ring_shift(x: torch.Tensor, incoming_shape: Sequence[int], step: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Send x to the rank `step` places further on the ring; returns the tensor of `incoming_shape` from `step` places before."""
    if step % group.size() == 0:
        return x
    shape = tuple(x.shape)
    return _linear(x, lambda t: _ring_shift(t, incoming_shape, step, group), lambda g: ring_shift(g, shape, -step, group))


def broadcast(x: torch.Tensor, src: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor of group rank `src`; the others give one of the same shape and dtype. The gradients are summed at the source."""
    if group.size() == 1:
        return x
    return _linear(x, lambda t: _broadcast(t, src, group), lambda g: _reduce(g, src, group))


class PendingSum:
    """A sum over ranks under way; `wait()` returns its result."""

    def __init__(self, x: torch.Tensor, wait: Callable[[], torch.Tensor] | None) -> None:
        self._x, self._wait = x, wait

    def wait(self) -> torch.Tensor:
        if self._wait is not None:
            self._x, self._wait = self._wait(), None
        return self._x


def start_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> PendingSum:
    """Start summing x over ranks in place, without a gradient. x must be contiguous and stay untouched until `wait()`, which returns it."""
    if group.size() == 1 or x.numel() == 0:
        return PendingSum(x, None)
    _check_op(x, "sum")
    if not x.is_contiguous():
        raise ValueError(f"start_all_reduce works in place on contiguous tensors, got strides {x.stride()} for shape {tuple(x.shape)}")
    record("all_reduce", group, 2 * (group.size() - 1) * x.numel() * x.element_size() // group.size())
    wire = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    work = dist.all_reduce(wire, group=group, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return x

    return PendingSum(x, wait)


def start_reduce_scatter(x: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> PendingSum:
    """Start summing the real 1-D tensor x over ranks, without a gradient; `wait()` returns the `sizes[r]` elements that rank r keeps.

    x must be contiguous and stay untouched until then.
    """
    if group.size() == 1 or x.numel() == 0:
        return PendingSum(x, None)
    _check_op(x, "sum")
    _check_size("start_reduce_scatter", x, 0, sum(sizes))
    ranks, own, x = group.size(), sizes[group.rank()], x.detach()
    record("reduce_scatter", group, (x.numel() - own) * x.element_size())
    if any(size != own for size in sizes):
        parts = _c10d.all_to_all_single.default(x, [own] * ranks, list(sizes), group.group_name)
        return PendingSum(x, lambda: _c10d.wait_tensor.default(parts).view(ranks, own).sum(0, dtype=x.dtype))
    result = _c10d.reduce_scatter_tensor.default(x, "sum", ranks, group.group_name)
    return PendingSum(x, lambda: _c10d.wait_tensor.default(result))


# ------------------------------------------------------------------------------------------------------------- gradients


class _Linear(torch.autograd.Function):
    """A linear map `run` whose gradient is the differentiable function `transpose`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Callable, transpose: Callable) -> torch.Tensor:
        ctx.transpose = transpose
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return ctx.transpose(grad), None, None


def _linear(x: torch.Tensor, run: Callable, transpose: Callable) -> torch.Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return _Linear.apply(x, run, transpose)
    return run(x)


class _Extreme(torch.autograd.Function):
    """Maximum or minimum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, op: Op) -> torch.Tensor:
        result = _all_reduce(x, group, op)
        ctx.group = group
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        x, result = ctx.saved_tensors
        hit = (x == result).to(grad.dtype)
        total = all_reduce(torch.stack((grad, hit.detach())), ctx.group)
        return hit * total[0] / total[1], None, None


# ------------------------------------------------------------------------------------------------------------- local work


def exchange_pieces(
    name: str, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], x: torch.Tensor, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Send `pieces[r]` to rank r and receive a tensor of `shapes[s]` from rank s; one call, exact sizes, the own piece stays here.

    x tells dtype and device. The result of this rank's own place is its piece.
    """
    me = group.rank()
    sent = [0 if rank == me else piece.numel() for rank, piece in enumerate(pieces)]
    received = [0 if rank == me else math.prod(shape) for rank, shape in enumerate(shapes)]
    buffer = flat_exchange(name, [piece for rank, piece in enumerate(pieces) if sent[rank]], sent, received, x, group)
    parts = iter(buffer.split([size for rank, size in enumerate(received) if rank != me]))
    return [pieces[me] if rank == me else next(parts).view(shape) for rank, shape in enumerate(shapes)]


def flat_exchange(
    name: str, pieces: Sequence[torch.Tensor], sent: Sequence[int], received: Sequence[int], x: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """One all-to-all of elements: `pieces` in order make up what is sent, `sent[r]` elements for rank r. Returns what came, flat."""
    if not pieces:
        flat = x.new_empty(0)
    elif len(pieces) == 1:
        flat = pieces[0].reshape(-1)
    else:
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
    record(name, group, flat.numel() * x.element_size())
    wire, factor = _to_wire(flat)
    result = _c10d.wait_tensor.default(
        _c10d.all_to_all_single.default(
            wire.contiguous(), [size * factor for size in received], [size * factor for size in sent], group.group_name
        )
    )
    return _from_wire(result, x)


def _to_wire(flat: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A flat tensor as elements every backend carries, and how many of them make one."""
    if flat.is_complex():
        return torch.view_as_real(flat.resolve_conj()).reshape(-1), 2
    if flat.dtype == torch.bool or (flat.is_floating_point() and flat.element_size() == 1):
        return flat.view(torch.uint8), 1
    return flat, 1


def _from_wire(wire: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():
        return torch.view_as_complex(wire.view(-1, 2))
    return wire if wire.dtype == x.dtype else wire.view(x.dtype)


def _resized(x: torch.Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape


def _check_size(what: str, x: torch.Tensor, dim: int, expected: int) -> None:
    if x.shape[dim] != expected:
        raise ValueError(f"{what}: the sizes say {expected} rows on dim {dim} of this rank, its tensor has shape {tuple(x.shape)}")


def _all_gather(x: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    ranks, me = group.size(), group.rank()
    _check_size("all_gather", x, dim, sizes[me])
    if any(size != sizes[0] for size in sizes):
        shapes = [_resized(x, dim, size) for size in sizes]
        return torch.cat(exchange_pieces("all_gather", [x] * ranks, shapes, x, group), dim)
    if x.numel() == 0:
        return x.new_empty(_resized(x, dim, sum(sizes)))
    record("all_gather", group, (ranks - 1) * x.numel() * x.element_size())
    wire, _ = _to_wire(x.reshape(-1))
    gathered = _c10d.wait_tensor.default(_c10d.all_gather_into_tensor.default(wire.contiguous(), ranks, group.group_name))
    gathered = _from_wire(gathered, x)
    if math.prod(x.shape[:dim]) == 1:
        return gathered.view(_resized(x, dim, sum(sizes)))
    return torch.cat(gathered.view(ranks, *x.shape).unbind(0), dim)


def _reduce_scatter(x: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    ranks, me = group.size(), group.rank()
    _check_op(x, "sum")
    _check_size("reduce_scatter", x, dim, sum(sizes))
    if any(size != sizes[0] for size in sizes):
        own = _resized(x, dim, sizes[me])
        parts = exchange_pieces("reduce_scatter", x.split(list(sizes), dim), [own] * ranks, x, group)
        return torch.stack(parts).sum(0, dtype=x.dtype)
    if x.numel() == 0:
        return x.new_empty(_resized(x, dim, sizes[me]))
    record("reduce_scatter", group, (x.numel() - x.numel() // ranks) * x.element_size())
    stacked = x if math.prod(x.shape[:dim]) == 1 else torch.stack(x.split(list(sizes), dim))
    wire, _ = _to_wire(stacked.reshape(-1))
    own = _c10d.wait_tensor.default(_c10d.reduce_scatter_tensor.default(wire.contiguous(), "sum", ranks, group.group_name))
    return _from_wire(own, x).view(_resized(x, dim, sizes[me]))


def _check_op(x: torch.Tensor, op: Op) -> None:
    if op == "sum" and x.dtype == torch.bool:
        raise TypeError("a sum of bool over ranks has no bool result: convert to an integer dtype, or use op='max' for 'any'")
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"an average of {x.dtype} over ranks is not an integer: convert to a floating dtype, or use op='sum'")
    if op in ("max", "min", "product") and x.is_complex():
        raise TypeError(f"complex numbers have no {op} over ranks here: reduce real and imaginary parts, or the absolute value")


def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup, op: Op) -> torch.Tensor:
    _check_op(x, op)
    if x.numel() == 0:
        return x.clone()
    wire = x
    if x.is_complex():
        wire = torch.view_as_real(x.resolve_conj())
    elif x.dtype == torch.bool:
        wire = x.to(torch.uint8)
    elif op in ("max", "min") and x.is_floating_point():
        # backends drop NaN, torch keeps it: a second plane says where one is
        missing = x.isnan()
        wire = torch.stack((x.masked_fill(missing, 0), missing.to(x.dtype) * (1 if op == "max" else -1)))
    record("all_reduce", group, 2 * (group.size() - 1) * wire.numel() * wire.element_size() // group.size())
    # gloo has no average for every dtype: sum, then divide
    name = "sum" if op == "avg" else op
    result = _c10d.wait_tensor.default(_c10d.all_reduce.default(wire.contiguous(), name, group.group_name))
    if op == "avg":
        result = result / group.size()
    if x.is_complex():
        return torch.view_as_complex(result)
    if wire.ndim > x.ndim:  # the second plane
        return result[0].masked_fill(result[1] != 0, math.nan)
    return result.to(x.dtype)


def _all_to_all(
    x: torch.Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], dim: int, into: int, group: dist.ProcessGroup
) -> torch.Tensor:
    _check_size("all_to_all", x, dim, sum(send_sizes))
    if dim == into and math.prod(x.shape[:dim]) == 1:
        return _exchange_rows(x, send_sizes, recv_sizes, dim, group)
    own = _resized(x, dim, send_sizes[group.rank()])
    shapes = [[*own[:into], size, *own[into + 1 :]] for size in recv_sizes]
    return torch.cat(exchange_pieces("all_to_all", x.split(list(send_sizes), dim), shapes, x, group), into)


def _exchange_rows(
    x: torch.Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], dim: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Rows of the outermost dim: what is sent and what comes lie in memory as they travel."""
    width = math.prod(x.shape[dim + 1 :])
    record("all_to_all", group, (x.shape[dim] - send_sizes[group.rank()]) * width * x.element_size())
    wire, factor = _to_wire(x.reshape(-1))
    sent, received = ([size * width * factor for size in sizes] for sizes in (send_sizes, recv_sizes))
    result = _c10d.wait_tensor.default(_c10d.all_to_all_single.default(wire.contiguous(), received, sent, group.group_name))
    return _from_wire(result, x).view(_resized(x, dim, sum(recv_sizes)))


def _ring_shift(x: torch.Tensor, incoming_shape: Sequence[int], step: int, group: dist.ProcessGroup) -> torch.Tensor:
    ranks, me = group.size(), group.rank()
    sent, received = [0] * ranks, [0] * ranks
    sent[(me + step) % ranks] = x.numel()
    received[(me - step) % ranks] = math.prod(incoming_shape)
    return flat_exchange("ring_shift", [x], sent, received, x, group).view(tuple(incoming_shape))


def _broadcast(x: torch.Tensor, src: int, group: dist.ProcessGroup) -> torch.Tensor:
    if x.numel() == 0:
        return x.clone()
    record("broadcast", group, (group.size() - 1) * x.numel() * x.element_size() if group.rank() == src else 0)
    wire, _ = _to_wire(x.reshape(-1))
    result = _c10d.wait_tensor.default(_c10d.broadcast.default(wire.contiguous(), src, group.group_name))
    return _from_wire(result, x).view(x.shape)


def _reduce(x: torch.Tensor, root: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum at group rank `root`, zeros elsewhere: the transpose of `broadcast`."""
    return _linear(x, lambda t: _sum_at(t, root, group), lambda g: broadcast(g, root, group))


def _sum_at(x: torch.Tensor, root: int, group: dist.ProcessGroup) -> torch.Tensor:
    ranks, me = group.size(), group.rank()
    sent, received = [0] * ranks, [0] * ranks
    if me == root:
        received = [0 if rank == root else x.numel() for rank in range(ranks)]
    else:
        sent[root] = x.numel()
    others = flat_exchange("reduce", [] if me == root else [x], sent, received, x, group)
    if me != root:
        return torch.zeros_like(x)
    return torch.cat((x.unsqueeze(0), others.view(ranks - 1, *x.shape))).sum(0)

"""Products that sum over shared dims, in any layout, from one rule over letters.

Every dim of every operand has a letter, as in einsum. On each mesh axis one letter is split, or none. An operand that
has the letter uses its own rows of it, one that has not is used whole. If the letter survives, the result is split
along it; if it is summed, the result is a pending sum. Two operands that split different letters on one axis cannot
both stay: the smaller one is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardwise.shard_tensor.redistribute import redistribute_local
from shardwise.shard_tensor.spec import ShardTensorSpec, Sizes
from shardwise.shard_tensor.tensor import ShardTensor, redistribute, to_local

Letters = tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True)
class Contraction:
    """The layouts of one product: what each operand must have, how its gradient comes, and what results.

    operands: the spec of each operand; gradients: the layout of its gradient; result: placements and sizes by letter.
    pending: the mesh dims on which a whole operand's gradient is a pending sum.
    """

    operands: tuple[ShardTensorSpec, ...]
    gradients: tuple[ShardTensorSpec, ...]
    placements: tuple[str | None, ...]
    sizes: dict[str, Sizes]
    pending: tuple[int, ...]
    mesh: object

    def result(self, letters: Letters, shape: Sequence[int], dtype: torch.dtype) -> ShardTensorSpec:
        """The spec of a result whose dims have `letters`."""
        where = {letter: dim for dim, letter in enumerate(letters) if letter is not None}
        placements: list[Placement] = []
        for letter in self.placements:
            if letter is None:
                placements.append(Replicate())
            elif letter in where:
                placements.append(Shard(where[letter]))
            else:
                placements.append(Partial())
        sizes = tuple(self.sizes.get(letter) if letter is not None else None for letter in letters)
        return ShardTensorSpec(self.mesh, tuple(placements), tuple(shape), sizes, dtype)


_PENDING = "+"  # stands for the letter on an axis where one operand is itself a pending sum


def plan(operands: Sequence[Tensor], letters: Sequence[Letters]) -> Contraction:
    """Decide the layouts, from specs alone."""
    sharded = [x for x in operands if isinstance(x, ShardTensor)]
    mesh = sharded[0]._spec.mesh
    chosen: list[str | None] = [_choose(axis, operands, letters) for axis in range(mesh.ndim)]
    sizes: dict[str, Sizes] = {}
    for letter in {c for c in chosen if c not in (None, _PENDING)}:
        axes = tuple(axis for axis, c in enumerate(chosen) if c == letter)
        sizes[letter] = _sizes_of(letter, axes, operands, letters, mesh)
    targets, gradients = [], []
    for x, names in zip(operands, letters, strict=True):
        placements: list[Placement] = []
        grads: list[Placement] = []
        for axis, letter in enumerate(chosen):
            if letter == _PENDING:
                own = isinstance(x, ShardTensor) and isinstance(x._spec.placements[axis], Partial)
                placements.append(Partial() if own else Replicate())
                grads.append(Replicate() if own else Partial())
            elif letter is not None and letter in names:
                placements.append(Shard(names.index(letter)))
                grads.append(placements[-1])
            else:
                placements.append(Replicate())
                grads.append(Replicate() if letter is None else Partial())
        blocks = tuple(sizes.get(name) if name is not None else None for name in names)
        shape = tuple(x.shape)
        targets.append(ShardTensorSpec(mesh, tuple(placements), shape, blocks, x.dtype))
        gradients.append(ShardTensorSpec(mesh, tuple(grads), shape, blocks, x.dtype))
    return Contraction(
        operands=tuple(targets),
        gradients=tuple(gradients),
        placements=tuple(chosen),
        sizes=sizes,
        pending=tuple(axis for axis, letter in enumerate(chosen) if letter is not None),
        mesh=mesh,
    )


def _choose(axis: int, operands: Sequence[Tensor], letters: Sequence[Letters]) -> str | None:
    """The letter split on one mesh axis: that of the largest operand split there."""
    best: tuple[int, str] | None = None
    partial = whole = 0
    for x, names in zip(operands, letters, strict=True):
        if not isinstance(x, ShardTensor):
            continue
        placement = x._spec.placements[axis]
        if isinstance(placement, Shard):
            name = names[placement.dim]
            if name is not None and names.count(name) == 1 and (best is None or x._spec.numel > best[0]):
                best = (x._spec.numel, name)
        elif isinstance(placement, Partial):
            partial += placement.reduce_op == "sum"
        else:
            whole += 1
    if best is not None:
        return best[1]
    return _PENDING if partial == 1 else None


def _sizes_of(letter: str, axes: tuple[int, ...], operands, letters, mesh) -> Sizes:
    largest = None
    for x, names in zip(operands, letters, strict=True):
        if isinstance(x, ShardTensor) and letter in names:
            dim = names.index(letter)
            if x._spec.mesh_dims_of(dim) == axes and (largest is None or x._spec.numel > largest[0]):
                largest = (x._spec.numel, x._spec.sizes[dim])
    if largest is not None:
        return largest[1]
    x, names = next((x, n) for x, n in zip(operands, letters, strict=True) if letter in n)
    placements = [Shard(0) if axis in axes else Replicate() for axis in range(mesh.ndim)]
    return ShardTensorSpec.chunked(mesh, placements, (x.shape[names.index(letter)],), x.dtype).sizes[0]


def local_operands(contraction: Contraction, operands: Sequence[Tensor]) -> list[Tensor]:
    """The shard of each operand under its target layout; differentiable."""
    from shardwise.shard_tensor.promote import sum_gradient

    result = []
    for x, spec, grad_spec in zip(operands, contraction.operands, contraction.gradients, strict=True):
        if isinstance(x, ShardTensor):
            result.append(to_local(redistribute(x, spec), grad_spec))
            continue
        if x.requires_grad and torch.is_grad_enabled():
            x = sum_gradient(x, contraction.mesh, contraction.pending)
        for dim in spec.sharded_dims:
            start, stop = spec.box()[dim]
            x = x.narrow(dim, start, stop - start)
        result.append(x)
    return result


def local_values(contraction: Contraction, operands: Sequence[Tensor]) -> list[Tensor]:
    """The shard of each operand under its target layout; no gradient (for rules below autograd)."""
    result = []
    for x, spec in zip(operands, contraction.operands, strict=True):
        if isinstance(x, ShardTensor):
            result.append(redistribute_local(x._local_tensor, x._spec, spec))
        else:
            result.append(redistribute_local(x, spec.replicate(), spec) if spec.sharded_dims else x)
    return result

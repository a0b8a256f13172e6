"""Linear algebra of matrices in the last two dims, batch after batch: local where batch dims are sharded.

Where rows or columns of the matrices are sharded, the split moves to a batch dim; without one, the matrices are gathered.
"""

from __future__ import annotations

import string

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardwise.collectives import functional as comm
from shardwise.shard_tensor.adopt import sharded
from shardwise.shard_tensor.arguments import normal_dim, torch_names
from shardwise.shard_tensor.fallback import fallback_rule
from shardwise.shard_tensor.reduction_plan import spec_group
from shardwise.shard_tensor.registry import shard_function, shard_rule
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.shard_tensor.transposed import laid_as, whole_spec

aten = torch.ops.aten

# How many of the leading arguments are matrices. Those of ITERATIVE fail by themselves on input that is not finite.
ITERATIVE = {aten._linalg_svd.default: 1, aten._linalg_eigh.default: 1, aten.linalg_eig.default: 1, aten._linalg_eigvals.default: 1}
MATRICES = ITERATIVE | {
    aten._linalg_det.default: 1,
    aten._linalg_slogdet.default: 1,
    aten.linalg_inv_ex.default: 1,
    aten.linalg_cholesky_ex.default: 1,
    aten.linalg_qr.default: 1,
    aten.linalg_matrix_exp.default: 1,
    aten.linalg_lu_factor_ex.default: 1,
    aten.linalg_pinv.atol_rtol_tensor: 1,
    aten._linalg_solve_ex.default: 2,
    aten.linalg_solve_triangular.default: 2,
    aten.cholesky_solve.default: 2,
}


@shard_rule(*MATRICES)
def matrices(op, args, kwargs):
    """Communication: none if only batch dims are sharded, else an all-to-all. Ops that may fail on one rank's matrices agree on it."""
    operands, rest = args[: MATRICES[op]], args[MATRICES[op] :]
    options = [*rest, *kwargs.values()]
    if any(isinstance(o, ShardTensor) or (isinstance(o, Tensor) and o.ndim) for o in options) or any(x.ndim < 2 for x in operands):
        return fallback_rule(op, args, kwargs)
    vector = len(operands) == 2 and op is aten._linalg_solve_ex.default and operands[1].shape == operands[0].shape[:-1]
    with torch.no_grad():
        every = [x for x in operands if isinstance(x, ShardTensor)]
        operands = [sharded(x, every) for x in operands]
        if len(operands) == 2:
            tails = [tuple(operands[0].shape[-2:]), tuple(operands[1].shape[-1 if vector else -2 :])]
            batch = torch.broadcast_shapes(*(tuple(x.shape[: x.ndim - len(tail)]) for x, tail in zip(operands, tails, strict=True)))
            operands = [aten.expand.default(x, (*batch, *tail)) for x, tail in zip(operands, tails, strict=True)]
        count = operands[0].ndim - 2
        largest = max(operands, key=lambda x: (len(x._spec.sharded_dims), x._spec.numel))
        base = whole_spec(largest._spec, range(count, largest.ndim))
        parts = []
        for x in operands:
            source = [*range(count), *[None] * (x.ndim - count)]
            parts.append(redistribute(x, base.with_dims(tuple(x.shape), source, dtype=x.dtype))._local_tensor)
        result = _agreed(op, base, lambda: op(*parts, *rest, **kwargs)) if op in ITERATIVE else op(*parts, *rest, **kwargs)

    def laid(local: Tensor) -> ShardTensor:
        if local.ndim < count:  # not computed
            return ShardTensor(
                local, ShardTensorSpec(base.mesh, base.replicate().placements, tuple(local.shape), (None,) * local.ndim, local.dtype)
            )
        shape = (*base.shape[:count], *local.shape[count:])
        return ShardTensor(local, base.with_dims(shape, [*range(count), *[None] * (local.ndim - count)], dtype=local.dtype))

    return tree_map_only(Tensor, laid, tuple(result) if isinstance(result, tuple) else result)


def _agreed(op, spec: ShardTensorSpec, run):
    """`run()`, or its error on every rank if any rank has one. Communication: one all-reduce of a number."""
    axes = spec.sharded_mesh_dims
    result, error = None, None
    try:
        result = run()
    except RuntimeError as failure:
        error = failure
    if axes:
        failed = comm.all_reduce(torch.tensor(error is not None, device=spec.mesh.device_type), spec_group(spec, axes), op="max")
        if bool(failed) and error is None:
            raise torch.linalg.LinAlgError(f"{op} failed for the matrices of another rank: its message says why")
    if error is not None:
        raise error
    return result


# ---------------------------------------------------------------------- products of vectors


@shard_function(torch.cross, Tensor.cross)
@torch_names
def cross(input: Tensor, other: Tensor, dim: int | None = None):
    """Communication: none if `dim` is whole and the operands lie alike, else two all-to-alls."""
    if dim is None:
        dim = next((d for d, size in enumerate(input.shape) if size == 3), 0)
    return linalg_cross(input, other, dim=dim)


@shard_function(torch.linalg.cross)
@torch_names
def linalg_cross(input: Tensor, other: Tensor, *, dim: int = -1):
    """Communication: as `torch.cross`."""
    every = [x for x in (input, other) if isinstance(x, ShardTensor)]
    shape = torch.broadcast_shapes(tuple(input.shape), tuple(other.shape))
    dim = normal_dim(dim, len(shape))
    operands = [sharded(x, every).expand(shape) for x in (input, other)]
    largest = max(operands, key=lambda x: bool(x._spec.sharded_dims))
    base = whole_spec(largest._spec, [dim])
    local = torch.linalg.cross(*(to_local(redistribute(x, base)) for x in operands), dim=dim)
    return laid_as(from_local(local, base.with_dtype(local.dtype).contiguous()), largest._spec)


@shard_function(torch.tensordot)
def tensordot(a: Tensor, b: Tensor, dims=2, out: Tensor | None = None):
    """Communication: as `torch.einsum`."""
    if out is not None or isinstance(dims, Tensor):
        return NotImplemented
    if isinstance(dims, int):
        left, right = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    else:
        left, right = ([d] if isinstance(d, int) else list(d) for d in dims)
    left, right = [normal_dim(d, a.ndim) for d in left], [normal_dim(d, b.ndim) for d in right]
    names = iter(string.ascii_letters)
    first = [next(names) for _ in range(a.ndim)]
    second = [next(names) for _ in range(b.ndim)]
    for i, j in zip(left, right, strict=True):
        second[j] = first[i]
    kept = [n for d, n in enumerate(first) if d not in left] + [n for d, n in enumerate(second) if d not in right]
    return torch.einsum(f"{''.join(first)},{''.join(second)}->{''.join(kept)}", a, b)

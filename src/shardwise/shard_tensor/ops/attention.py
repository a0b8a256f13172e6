"""`scaled_dot_product_attention` on shards: which dims are split decides whether it is local or a ring.

Batch and head dims split alike need no communication. A split sequence goes through ring attention: keys and values
travel round the group, the scores never exist as a whole. One side may be whole on every rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardwise.attention import ring_attention
from shardwise.errors import MissingShardPatch
from shardwise.mesh.groups import axis_group, flat_group
from shardwise.random import draw_key
from shardwise.shard_tensor.empty import connected_empty
from shardwise.shard_tensor.ops.pointwise import operand_spec
from shardwise.shard_tensor.promote import sum_gradient, summed_dims
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.spec.spans import spans_of


@shard_function(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and is_causal:
        raise RuntimeError("scaled_dot_product_attention: give either attn_mask or is_causal=True, not both")
    inputs = [x for x in (query, key, value, attn_mask) if isinstance(x, ShardTensor)]
    mesh = inputs[0]._spec.mesh
    if any(x.ndim != query.ndim for x in (key, value)):
        raise MissingShardPatch(
            f"attention of query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}",
            "their numbers of dims differ",
            "expand them to the same number of dims",
        )
    q_spec, k_spec, v_spec = _layouts(query, key, value, mesh)
    score_shape = (*q_spec.shape[:-1], k_spec.shape[-2])
    scores = ShardTensorSpec(mesh, q_spec.placements, score_shape, q_spec.sizes, query.dtype)
    neighbours = [q_spec, k_spec]
    q, k, v = (_operand(x, spec, neighbours) for x, spec in ((query, q_spec), (key, k_spec), (value, v_spec)))
    mask = None if attn_mask is None else _operand(attn_mask, operand_spec(attn_mask, scores, scores.ndim), neighbours)
    out = ShardTensorSpec(mesh, q_spec.placements, (*q_spec.shape[:-1], v_spec.shape[-1]), q_spec.sizes, query.dtype)
    q_axes, k_axes = q_spec.mesh_dims_of(q_spec.ndim - 2), k_spec.mesh_dims_of(k_spec.ndim - 2)
    if not k_axes and not dropout_p and not (is_causal and q_axes):
        if not q.numel() or not v.numel():
            local = connected_empty((*q.shape[:-1], v.shape[-1]), q, k, v, mask)
        else:
            local = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        return from_local(local, out.with_dtype(local.dtype))
    heads = q_spec.ndim - 3
    if heads >= 0 and k.shape[heads] == 1 != q.shape[heads]:  # one key head for all: it broadcasts
        k, v = (x.expand(*x.shape[:heads], q.shape[heads], *x.shape[heads + 1 :]) for x in (k, v))
    axes = q_axes or k_axes
    group = None if not axes else axis_group(mesh, axes[0]) if len(axes) == 1 else flat_group(mesh, axes)
    shape = q.shape
    if mask is not None and q.ndim != 4:
        mask = mask.expand(*q.shape[:-2], *mask.shape[-2:]) if mask.ndim < q.ndim or q.ndim > 4 else mask
    local = ring_attention(
        *(_as_4d(x) for x in (q, k, v)),
        q_spans=spans_of(q_spec.sizes[-2]) if q_axes else None,
        kv_spans=spans_of(k_spec.sizes[-2]) if k_axes else None,
        group=group,
        causal=is_causal,
        scale=scale,
        mask=None if mask is None else _as_4d(mask) if q.ndim != 4 else mask,
        dropout_p=dropout_p,
        dropout_seed=draw_key(mesh) if dropout_p else None,
        dropout_offset=_dropout_offset(q_spec) if dropout_p else (0, 0),
        enable_gqa=enable_gqa,
    )
    return from_local(local.reshape(*shape[:-1], local.shape[-1]), out.with_dtype(local.dtype))


def _as_4d(x: Tensor) -> Tensor:
    """Batch, head, row, feature: missing dims are added, further batch dims joined."""
    if x.ndim < 4:
        return x.reshape((1,) * (4 - x.ndim) + tuple(x.shape)) if x.ndim < 3 else x.unsqueeze(0)
    return x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])


def _layouts(query: Tensor, key: Tensor, value: Tensor, mesh) -> tuple[ShardTensorSpec, ShardTensorSpec, ShardTensorSpec]:
    """The layouts that query, key and value must have: one split for each mesh axis, agreed by all three."""
    ndim = query.ndim
    q_placements: list[Placement] = []
    k_placements: list[Placement] = []
    for axis in range(mesh.ndim):
        q, k, v = (_split(x, axis) for x in (query, key, value))
        batch = next((d for d in (q, k, v) if d is not None and d < ndim - 2), None)
        if batch is not None and q != ndim - 2:
            q_placements.append(Shard(batch) if query.shape[batch] > 1 else Replicate())
            k_placements.append(Shard(batch) if key.shape[batch] > 1 else Replicate())
        elif q == ndim - 2:
            q_placements.append(Shard(ndim - 2))
            k_placements.append(Shard(ndim - 2) if k == ndim - 2 or v == ndim - 2 else Replicate())
        elif k == ndim - 2 or v == ndim - 2:
            q_placements.append(Replicate())
            k_placements.append(Shard(ndim - 2))
        else:
            q_placements.append(Replicate())
            k_placements.append(Replicate())
    q_seq = [i for i, p in enumerate(q_placements) if p == Shard(ndim - 2)]
    k_seq = [i for i, p in enumerate(k_placements) if p == Shard(ndim - 2)]
    if q_seq and k_seq and q_seq != k_seq:  # keys follow the queries
        k_placements = [q_placements[i] if i in q_seq else Replicate() if p == Shard(ndim - 2) else p for i, p in enumerate(k_placements)]
    q_spec = _spec(query, q_placements, mesh)
    k_spec = _spec(key, k_placements, mesh)
    heads = ndim - 3
    if heads >= 0 and q_spec.sizes[heads] is not None and key.shape[heads] > 1:
        ratio = query.shape[heads] // key.shape[heads]
        if ratio * key.shape[heads] == query.shape[heads]:
            wanted = _kv_heads(q_spec, k_spec, heads, ratio)
            q_spec, k_spec = _resized(q_spec, heads, tuple(ratio * n for n in wanted)), _resized(k_spec, heads, wanted)
    for dim in range(ndim - 2):
        if q_spec.sizes[dim] is not None and k_spec.sizes[dim] is not None and dim != heads:
            k_spec = _resized(k_spec, dim, q_spec.sizes[dim])
    v_spec = ShardTensorSpec(mesh, k_spec.placements, tuple(value.shape), k_spec.sizes, value.dtype)
    return q_spec, k_spec, v_spec


def _split(x: Tensor, axis: int) -> int | None:
    placement = x._spec.placements[axis] if isinstance(x, ShardTensor) else None
    return placement.dim if isinstance(placement, Shard) else None


def _spec(x: Tensor, placements: list[Placement], mesh) -> ShardTensorSpec:
    if isinstance(x, ShardTensor):
        return x._spec.with_placements(placements)
    return ShardTensorSpec.chunked(mesh, placements, tuple(x.shape), x.dtype)


def _kv_heads(q_spec: ShardTensorSpec, k_spec: ShardTensorSpec, heads: int, ratio: int) -> tuple[int, ...]:
    """Key heads of each rank when each query head must lie with the key head it reads."""
    if all(n % ratio == 0 for n in q_spec.sizes[heads]):
        return tuple(n // ratio for n in q_spec.sizes[heads])
    return k_spec.sizes[heads]


def _resized(spec: ShardTensorSpec, dim: int, sizes: tuple[int, ...]) -> ShardTensorSpec:
    if spec.sizes[dim] == sizes:
        return spec
    return ShardTensorSpec(spec.mesh, spec.placements, spec.shape, (*spec.sizes[:dim], sizes, *spec.sizes[dim + 1 :]), spec.dtype)


def _operand(x: Tensor, spec: ShardTensorSpec, neighbours: list[ShardTensorSpec]) -> Tensor:
    """This rank's part of `x` under `spec`; where it is whole beside split neighbours its gradient is a pending sum."""
    dims = summed_dims(neighbours)
    if isinstance(x, ShardTensor):
        pending = tuple(Partial() if i in dims and isinstance(p, Replicate) else p for i, p in enumerate(spec.placements))
        return to_local(redistribute(x, spec), ShardTensorSpec(spec.mesh, pending, spec.shape, spec.sizes, spec.dtype))
    if x.requires_grad and torch.is_grad_enabled():
        x = sum_gradient(x, spec.mesh, dims)
    for dim in spec.sharded_dims:
        start, stop = spec.box()[dim]
        x = x.narrow(dim, start, stop - start)
    return x


def _dropout_offset(spec: ShardTensorSpec) -> tuple[int, int]:
    """First batch row and first head of this rank's part."""
    box = spec.box()
    return (box[0][0] if spec.ndim == 4 else 0, box[spec.ndim - 3][0] if spec.ndim >= 3 else 0)

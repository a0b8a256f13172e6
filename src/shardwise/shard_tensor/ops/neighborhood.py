"""Neighbourhood attention: each rank fetches the keys and values that its queries reach, as a convolution fetches its halo."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardwise.errors import MissingShardPatch
from shardwise.functional.neighborhood import Window, attend, make_windows, neighborhood_attention
from shardwise.shard_tensor.adopt import sharded
from shardwise.shard_tensor.empty import connected_empty
from shardwise.shard_tensor.halo import Halo, fetch
from shardwise.shard_tensor.registry import shard_function
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor, from_local, redistribute, to_local
from shardwise.shard_tensor.third_party import third_party
from shardwise.spec.spans import spans_of


@shard_function(neighborhood_attention)
def sharded_neighborhood_attention(query, key, value, kernel_size, *, dilation=1, is_causal=False, scale=None):
    """Key and value take the layout of the query; batch and heads may be split too. Communication: for each sharded spatial dim one
    exchange of the rows of key and value that a rank's queries reach and it does not own, backward the same."""
    windows = make_windows(tuple(query.shape), tuple(key.shape), tuple(value.shape), kernel_size, dilation, is_causal)
    like = [x for x in (query, key, value) if isinstance(x, ShardTensor)]
    base = like[0]._spec
    keep = [p if isinstance(p, Shard) and p.dim < base.ndim - 1 else Replicate() for p in base.placements]
    base = base.gradient().with_placements(keep)
    q, k, v = (to_local(redistribute(sharded(x, like), _laid(x, base))) for x in (query, key, value))
    halos = base.cached(("neighborhood", windows), lambda: _halos(base, windows))
    width = k.shape[-1]
    k, v = fetch(torch.cat([k, v], -1), base, list(halos.values())).split([width, v.shape[-1]], -1)
    if not q.numel() or not v.numel():
        local = connected_empty((*q.shape[:-1], v.shape[-1]), q, k, v)
    else:
        sides = []
        for dim, window in enumerate(windows, 1):
            halo = halos.get(dim)
            first, last = window.bounds(*(halo.made if halo else (0, window.size)))
            start = halo.reads[halo.block][0] if halo else 0
            sides.append((first - start, last - start, window.dilation))
        local = attend(q, k, v, sides, scale)
    return from_local(local, _laid(value, base).with_dtype(local.dtype))


def _laid(x: Tensor, base: ShardTensorSpec) -> ShardTensorSpec:
    """The layout `base` for a tensor that may have another last dim."""
    return ShardTensorSpec(base.mesh, base.placements, tuple(x.shape), base.sizes, x.dtype)


def _halos(spec: ShardTensorSpec, windows: Sequence[Window]) -> dict[int, Halo]:
    halos = {}
    for dim, window in enumerate(windows, 1):
        if spec.sizes[dim] is not None:
            owned = spans_of(spec.sizes[dim])
            halos[dim] = Halo(
                dim=dim,
                axes=spec.mesh_dims_of(dim),
                block=spec.block_index(dim, spec.coordinate),
                size=window.size,
                owned=owned,
                reads=tuple(window.reads(*rows) for rows in owned),
                makes=owned,
            )
    return halos


@third_party(*(f"natten.functional.{name}" for name in ("na1d", "na2d", "na3d", "neighborhood_attention_generic")))
def natten_attention(query, key, value, kernel_size, stride=1, dilation=1, is_causal=False, scale=None, **options):
    """natten's functions. Choices of kernels and tiles are ignored. Communication: as `neighborhood_attention`."""
    names = ("additional_keys", "additional_values", "return_lse")
    asked = [name for name in names if options.get(name) is not None and options[name] is not False]
    if any(step != 1 for step in (stride if isinstance(stride, Sequence) else (stride,))):
        asked.append("stride")
    if asked:
        raise MissingShardPatch(
            f"natten attention with {', '.join(asked)}",
            "its sharded form has windows of stride 1 and the positions of the tensor alone",
            "leave these options out, or gather with full_tensor()",
        )
    return neighborhood_attention(query, key, value, kernel_size, dilation=dilation, is_causal=is_causal or False, scale=scale)

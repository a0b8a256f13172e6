"""What `torch.distributed.checkpoint` asks of a `ShardTensor`: which box of the whole it writes and reads on this rank.

A checkpoint then loads into any other split, on any number of ranks, into a DTensor or a plain tensor.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.shard_tensor.spec import ShardTensorSpec


def _chunk(spec: ShardTensorSpec) -> ChunkStorageMetadata:
    if spec.partial_mesh_dims:
        raise RuntimeError(f"a pending sum cannot be saved or loaded ({spec.describe()}): redistribute it to Replicate or Shard first")
    box = spec.box()
    return ChunkStorageMetadata(offsets=torch.Size(start for start, _ in box), sizes=torch.Size(stop - start for start, stop in box))


def _silent(spec: ShardTensorSpec) -> bool:
    """Whether this rank has nothing to save: an empty shard of a tensor that is not empty would share its place with another."""
    return 0 in spec.local_shape and 0 not in spec.shape


def write_items(fqn: str, tensor) -> list[WriteItem]:
    spec = tensor._spec
    chunk = _chunk(spec)
    if _silent(spec):
        return []
    data = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(tensor._local_tensor), size=torch.Size(spec.shape))
    return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]


def chunk_list(tensor) -> list[ChunkStorageMetadata]:
    chunk = _chunk(tensor._spec)
    return [] if _silent(tensor._spec) else [chunk]


def tensor_shard(tensor, index: MetadataIndex) -> torch.Tensor:
    offsets = _chunk(tensor._spec).offsets
    if index.offset is not None and torch.Size(index.offset) != offsets:
        raise ValueError(f"{index.fqn}: this rank holds the shard at {tuple(offsets)}, not the one at {tuple(index.offset)}")
    return tensor._local_tensor

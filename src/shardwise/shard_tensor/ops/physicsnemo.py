"""Sharded forms of the operators of physicsnemo for points and surfaces: those of `shardwise.functional`, with its results."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.functional import knn, radius_search, signed_distance
from shardwise.shard_tensor.third_party import third_party


@third_party("physicsnemo.knn_cuml.default", "physicsnemo.knn_scipy.default")
def physicsnemo_knn(points: Tensor, queries: Tensor, k: int = 3):
    """Communication: as `knn`."""
    return knn(points, queries, k)


@third_party("physicsnemo.radius_search_warp.default")
def physicsnemo_radius_search(points, queries, radius, max_points=None, return_dists=False, return_points=False):
    """Indices, points, distances and, with `max_points`, the number of neighbours of each query; what was not asked for is empty.
    Places without a point have index, coordinates and distance 0; only coordinates have gradients. Communication: as `radius_search`."""
    index, near, distances = radius_search(points, queries, radius, max_points, return_dists=True, return_points=True)
    if max_points is None:
        count = points.new_empty(0, dtype=torch.int32)
        empty = (0, 3), (0,)
    else:
        count = (index >= 0).sum(1, dtype=torch.int32)
        index, distances = index.clamp(min=0), torch.where(distances.isinf(), 0, distances)
        empty = (0, max_points, 3), (0,)
    distances = distances.detach()
    near = near if return_points else points.new_empty(empty[0])
    distances = distances if return_dists else points.new_empty(empty[1])
    return index.to(torch.int32), near, distances, count


@third_party("physicsnemo.signed_distance_field.default")
def physicsnemo_signed_distance_field(mesh_vertices, mesh_indices, input_points, max_dist=1e8, use_sign_winding_number=False):
    """Distances, closest points and faces; beyond `max_dist` NaN, NaN and -1. The sign is always that of the winding number, which is
    the other one's where the surface is closed. Communication: as `signed_distance`."""
    shape = tuple(input_points.shape[:-1])
    flat = input_points.reshape(-1, 3)
    distance, closest, face = signed_distance(mesh_vertices, mesh_indices.reshape(-1, 3).long(), flat)
    far = distance.detach().abs() > max_dist
    closest = torch.where(far.unsqueeze(-1), torch.nan, closest)
    distance, face = torch.where(far, torch.nan, distance), torch.where(far, -1, face)
    return distance.reshape(shape), closest.reshape(*shape, 3), face.reshape(shape)

"""Neighbours in point clouds: the nearest ones, and those within a radius."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.functional.overrides import overridable

PAIRS = 2**22  # distances held at a time

Blocks = Iterable[tuple[int, Tensor]]  # the points in parts: the index of the first point, and the part


class Neighbours(NamedTuple):
    """For each query (first dim): its neighbours' indices, distances (used to choose only) and coordinates."""

    index: Tensor
    distance: Tensor
    points: Tensor


@overridable
def knn(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` nearest points of each query, nearest first, of equally near ones the first. points: [N, D], queries: [Q, D].

    Returns indices [Q, k] and Euclidean distances [Q, k]; distances have gradients to points and queries (0 where a distance is 0).
    Features of the neighbours are `features[indices]`, with gradients to the features.

    Communication, where points are sharded: each rank's points go round the ring, (n - 1)/n of the points to each rank, and their
    gradients back likewise. Sharded queries alone: none. Errors: ValueError for shapes that do not fit, and for a `k` beyond N.
    """
    check_knn(points, queries, k)
    found = nearest(queries, [(0, points)], k)
    return found.index, lengths(queries, found.points)


@overridable
def radius_search(
    points: Tensor,
    queries: Tensor,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
):
    """The points within `radius` (inclusive) of each query. points: [N, D], queries: [Q, D].

    max_points given: indices [Q, max_points] of the nearest ones, nearest first; places without a point have index -1. None: all
    pairs, as indices [2, pairs] of queries (first row) and points, sorted.
    Returns the indices, or a tuple of them with, if asked for, the points' coordinates [Q, max_points, D] or [pairs, D] (0 where there
    is no point) and the distances [Q, max_points] or [pairs] (infinite where there is none), in this order. Coordinates and distances
    have gradients.

    Communication: as `knn`; with `max_points=None` also one gather of the number of pairs. Errors: ValueError for shapes that do not fit.
    """
    check_points("radius_search", points, queries)
    if max_points is None:
        query, index, near = within(queries, [(0, points)], radius)
        found = torch.stack([query, index]), near, lengths(queries[query], near)
    else:
        found = limited(queries, nearest(queries, [(0, points)], min(max_points, points.shape[0])), radius, max_points)
    return chosen(*found, return_dists, return_points)


def chosen(index, points, distances, return_dists: bool, return_points: bool):
    """What `radius_search` returns of what was found."""
    result = (index, *([points] if return_points else []), *([distances] if return_dists else []))
    return result if len(result) > 1 else index


def check_points(name: str, points: Tensor, queries: Tensor) -> None:
    """Raise unless both are [rows, D] with the same D."""
    if points.ndim != 2 or queries.ndim != 2 or points.shape[1] != queries.shape[1]:
        raise ValueError(
            f"{name} of points {tuple(points.shape)} and queries {tuple(queries.shape)}: give [N, D] and [Q, D] with the same D"
        )


def lengths(queries: Tensor, points: Tensor) -> Tensor:
    """Distances of `queries` [Q, D] to `points` [Q, D] or [Q, k, D]."""
    return torch.linalg.vector_norm((queries if points.ndim == queries.ndim else queries.unsqueeze(1)) - points, dim=-1)


def check_knn(points: Tensor, queries: Tensor, k: int) -> None:
    """Raise unless the shapes fit and there are `k` points."""
    check_points("knn", points, queries)
    if not 1 <= k <= points.shape[0]:
        raise ValueError(f"knn with k={k} among {points.shape[0]} points: give a k from 1 to {points.shape[0]}")


def nearest(queries: Tensor, blocks: Blocks, k: int) -> Neighbours:
    """The `k` nearest points of each query, or all if there are fewer; the order of the blocks does not matter."""
    best = None
    for start, block in blocks:
        index, distance = _nearest(queries.detach(), block.detach(), k)
        found = Neighbours(index + start, distance, block[index])
        best = found if best is None else _merged(best, found, k)
    return best


def _merged(a: Neighbours, b: Neighbours, k: int) -> Neighbours:
    index, distance, points = (torch.cat(parts, 1) for parts in zip(a, b, strict=True))
    order = index.argsort(1)
    order = order.gather(1, distance.gather(1, order).argsort(dim=1, stable=True))[:, :k]
    points = points.gather(1, order.unsqueeze(-1).expand(*order.shape, points.shape[-1]))
    return Neighbours(index.gather(1, order), distance.gather(1, order), points)


def _nearest(queries: Tensor, block: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Rows of `block` and distances, [Q, min(k, rows)], nearest first, of equally near ones the first."""
    k = min(k, block.shape[0])
    parts = [_nearest_of_few(few, block, k) for few in queries.split(rows_at_a_time(block.shape[0]))]
    return torch.cat([index for index, _ in parts]), torch.cat([distance for _, distance in parts])


def _nearest_of_few(queries: Tensor, block: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if not k or not len(queries):
        return queries.new_zeros((len(queries), k), dtype=torch.int64), queries.new_zeros((len(queries), k))
    distance = _distances(queries, block).nan_to_num(nan=torch.inf, posinf=torch.inf)
    furthest = distance.topk(k, largest=False).values[:, -1:]
    nearer, equal = distance < furthest, distance == furthest
    taken = nearer | (equal & (equal.cumsum(1) <= k - nearer.sum(1, keepdim=True)))
    index = taken.nonzero()[:, 1].view(-1, k)
    distance, order = distance.gather(1, index).sort(dim=1, stable=True)
    return index.gather(1, order), distance


def _distances(queries: Tensor, block: Tensor) -> Tensor:
    return torch.cdist(queries, block, compute_mode="donot_use_mm_for_euclid_dist")


def rows_at_a_time(others: int) -> int:
    """How many queries to hold against `others` points at a time."""
    return max(1, PAIRS // max(1, others))


def limited(queries: Tensor, found: Neighbours, radius: float, max_points: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, coordinates and distances of those of `found` within `radius`, in `max_points` places."""
    inside = found.distance <= radius
    index = torch.where(inside, found.index, -1)
    points = torch.where(inside.unsqueeze(-1), found.points, 0)
    distances = torch.where(inside, lengths(queries, found.points), torch.inf)
    missing = max_points - index.shape[1]
    pad = torch.nn.functional.pad
    return pad(index, (0, missing), value=-1), pad(points, (0, 0, 0, missing)), pad(distances, (0, missing), value=torch.inf)


def within(queries: Tensor, blocks: Blocks, radius: float) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs within `radius`: rows of `queries`, indices of points, and coordinates of points, sorted by query and point."""
    parts = []
    for start, block in blocks:
        at = 0
        for few in queries.detach().split(rows_at_a_time(block.shape[0])):
            query, index = (_distances(few, block.detach()) <= radius).nonzero().unbind(1)
            parts.append((query + at, index + start, block[index]))
            at += len(few)
    query, index, points = (torch.cat(part) for part in zip(*parts, strict=True))
    order = index.argsort(stable=True)
    order = order[query[order].argsort(stable=True)]
    return query[order], index[order], points[order]

"""Distances to triangulated surfaces."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.functional.overrides import overridable
from shardwise.functional.points import Blocks, rows_at_a_time


def signed_distance(vertices: Tensor, faces: Tensor, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distance of each point to a triangulated surface, negative inside; the closest point of the surface, and the face it lies on.

    vertices: [V, 3]; faces: [F, 3], indices of vertices, counterclockwise from outside; points: [P, 3]. Returns distances [P], with
    gradients to vertices and points, closest points [P, 3], without, and faces [P], the first of equally close ones. Inside is where
    the surface winds around a point more than half (its solid angle beyond 2 pi), which also decides for surfaces that are not quite
    closed.

    Communication: as `distance_to_triangles`, and where the vertices are sharded what `vertices[faces]` sends.
    """
    return distance_to_triangles(vertices[faces], points)


@overridable
def distance_to_triangles(triangles: Tensor, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `signed_distance`, with the corners of the triangles given: [F, 3, 3] (triangle, corner, coordinate).

    Solid angles: van Oosterom and Strackee, "The Solid Angle of a Plane Triangle" (1983). Memory: about 2**22 pairs of points and
    triangles are held at a time.

    Communication, where triangles are sharded: they go round the ring, (n - 1)/n of them to each rank, and their gradients back.
    Sharded points alone: none. Errors: ValueError for shapes that do not fit and for no triangle.
    """
    check_triangles(triangles, points)
    return signed(points, closest(points, [(0, triangles)]))


def check_triangles(triangles: Tensor, points: Tensor) -> None:
    """Raise unless the shapes are [F, 3, 3] and [P, 3], with a triangle at least."""
    if triangles.ndim != 3 or tuple(triangles.shape[1:]) != (3, 3) or points.ndim != 2 or points.shape[1] != 3 or not len(triangles):
        raise ValueError(
            f"distance of points {tuple(points.shape)} to triangles {tuple(triangles.shape)}: give points [P, 3] and at least one "
            "triangle, [F, 3, 3]"
        )


class Closest(NamedTuple):
    """For each point: squared distance and index of the closest triangle, its corners, the weights that make the closest point of
    them, and the solid angle of all triangles."""

    square: Tensor
    index: Tensor
    corners: Tensor
    weights: Tensor
    angle: Tensor


def signed(points: Tensor, found: Closest) -> tuple[Tensor, Tensor, Tensor]:
    """Signed distances, closest points and their triangles. The weights of the closest point are at an optimum: the distance has no
    gradient there."""
    near = torch.einsum("pc,pcd->pd", found.weights, found.corners)
    sign = torch.where(found.angle > 2 * math.pi, -1.0, 1.0).to(points.dtype)
    return torch.linalg.vector_norm(points - near, dim=-1) * sign, near.detach(), found.index


def closest(points: Tensor, blocks: Blocks) -> Closest:
    """The closest triangle of each point; of equally close ones the first, in whatever order the blocks come."""
    best, empty_blocks = None, 0
    for start, block in blocks:
        if not len(block):  # stays in the graph: its gradient, without elements, is awaited elsewhere
            empty_blocks = empty_blocks + block.sum()
            continue
        parts = [_closest(few, block.detach()) for few in points.detach().split(rows_at_a_time(8 * len(block)))]
        square, index, weights, angle = (torch.cat(part) for part in zip(*parts, strict=True))
        found = Closest(square, index + start, block[index], weights, angle)
        best = found if best is None else _merged(best, found)
    return best._replace(corners=best.corners + empty_blocks)


def _merged(a: Closest, b: Closest) -> Closest:
    nearer = (b.square < a.square) | ((b.square == a.square) & (b.index < a.index))
    kept = (torch.where(nearer.view(-1, *[1] * (x.ndim - 1)), y, x) for x, y in zip(a[:-1], b[:-1], strict=True))
    return Closest(*kept, a.angle + b.angle)


def _closest(points: Tensor, triangles: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Squared distance, index and weights of the closest of `triangles`, and the solid angle of all."""
    corners = triangles - points[:, None, None]  # as seen from each point: [P, F, 3, 3]
    candidates = [_on_face(corners), *(_on_edge(corners, i) for i in range(3))]
    weights = torch.stack(candidates, 2)  # [P, F, 4, 3]
    square = torch.einsum("pfkc,pfcd->pfkd", weights, corners).square().sum(-1).nan_to_num(nan=torch.inf, posinf=torch.inf)
    square, which = square.min(2)
    nearest, index = square.min(1)
    rows = torch.arange(len(points), device=points.device)
    return nearest, index, weights[rows, index, which[rows, index]], _solid_angle(corners).sum(1)


def _on_face(corners: Tensor) -> Tensor:
    """Weights of the corners at the foot of the perpendicular from the origin; NaN where it misses the triangle."""
    a = corners[..., 0, :]
    u, v = corners[..., 1, :] - a, corners[..., 2, :] - a
    normal = torch.linalg.cross(u, v)
    area = normal.square().sum(-1)
    second = (torch.linalg.cross(v, a) * normal).sum(-1) / area
    third = (torch.linalg.cross(a, u) * normal).sum(-1) / area
    weights = torch.stack([1 - second - third, second, third], -1)
    return torch.where((weights >= 0).all(-1, keepdim=True), weights, torch.nan)


def _on_edge(corners: Tensor, i: int) -> Tensor:
    """Weights of the corners at the point of the edge from corner `i` to the next that is closest to the origin."""
    start, end = corners[..., i, :], corners[..., (i + 1) % 3, :]
    edge = end - start
    length = edge.square().sum(-1)
    part = (-(start * edge).sum(-1) / torch.where(length > 0, length, 1)).clamp(0, 1)
    weights = [torch.zeros_like(part)] * 3
    weights[i], weights[(i + 1) % 3] = 1 - part, part
    return torch.stack(weights, -1)


def _solid_angle(corners: Tensor) -> Tensor:
    a, b, c = corners.unbind(-2)
    la, lb, lc = (torch.linalg.vector_norm(x, dim=-1) for x in (a, b, c))
    volume = (a * torch.linalg.cross(b, c)).sum(-1)
    ab, bc, ca = (a * b).sum(-1), (b * c).sum(-1), (c * a).sum(-1)
    return 2 * torch.atan2(volume, la * lb * lc + ab * lc + bc * la + ca * lb)

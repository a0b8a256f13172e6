"""Point clouds and surfaces: against definitions, one process against several, and what travels."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from shardwise.functional import knn, points, radius_search, signed_distance
from shardwise.testing import assert_same_as_unsharded, count_communication, ranks, shard

LAYOUTS = [((17, 16, 17), (7, 7, 6)), ((50, 0, 0), (0, 20, 0)), ((1, 48, 1), (9, 0, 11))]
SPLIT = pytest.mark.parametrize(("of_points", "of_queries"), LAYOUTS, ids=str)


def on_a_grid():
    """Points and queries with many equal distances, and all of them."""
    generator = torch.Generator().manual_seed(0)
    cloud, queries = (torch.randint(0, 4, (n, 3), generator=generator).double() for n in (50, 20))
    return cloud, queries, torch.linalg.vector_norm(queries[:, None] - cloud, dim=-1)


@pytest.mark.parametrize("pairs", [1, 200, points.PAIRS])
def test_neighbours_by_definition_the_first_of_equally_near_ones(pairs, monkeypatch):
    monkeypatch.setattr(points, "PAIRS", pairs)
    cloud, queries, distances = on_a_grid()
    expected, order = distances.sort(dim=1, stable=True)
    index, found = knn(cloud, queries, 7)
    torch.testing.assert_close(index, order[:, :7])
    torch.testing.assert_close(found, expected[:, :7])
    torch.testing.assert_close(radius_search(cloud, queries, 1.0), (distances <= 1.0).nonzero().T)
    index, near, found = radius_search(cloud, queries, 1.0, 60, return_dists=True, return_points=True)
    inside = torch.nn.functional.pad(expected <= 1.0, (0, 10))
    assert torch.equal(index, torch.where(inside, torch.nn.functional.pad(order, (0, 10)), -1))
    torch.testing.assert_close(near, torch.where(inside.unsqueeze(-1), cloud[index], 0.0))
    assert torch.equal(found[~inside], torch.full_like(found[~inside], torch.inf))


@SPLIT
@ranks(3)
def test_neighbours_and_their_gradients_equal_one_process(world, of_points, of_queries):
    cloud, queries, _ = on_a_grid()
    cloud = cloud + 0.01 * world.randn(50, 3)
    features = shard(world.randn(50, 4), world.mesh, dim=0, sizes=of_points)
    split_cloud, split_queries = shard(cloud, world.mesh, dim=0, sizes=of_points), shard(queries, world.mesh, dim=0, sizes=of_queries)
    for a, b in ((split_cloud, split_queries), (cloud, split_queries), (split_cloud, queries)):
        assert_same_as_unsharded(lambda p, q: knn(p, q, 5), a, b)
        assert_same_as_unsharded(lambda p, q, f: f[knn(p, q, 50)[0]], a, b, features)
        assert_same_as_unsharded(lambda p, q: radius_search(p, q, 1.0, return_dists=True, return_points=True), a, b)
        assert_same_as_unsharded(lambda p, q: radius_search(p, q, 1.0, 8, return_dists=True, return_points=True), a, b)
        assert_same_as_unsharded(lambda p, q, f: f[radius_search(p, q, 1.0)[1]], a, b, features)


@ranks(3)
def test_equally_near_points_are_chosen_alike(world):
    cloud, queries, _ = on_a_grid()
    parts = [shard(x, world.mesh, dim=0, sizes=sizes) for x, sizes in ((cloud, (1, 48, 1)), (queries, (9, 0, 11)))]
    assert_same_as_unsharded(lambda p, q: knn(p, q, 9), *parts, grads=False)


@ranks(4)
def test_axes_of_a_mesh_may_split_either(world):
    mesh = world.make_mesh((2, 2), ("a", "b"))
    cloud, queries = world.randn(13, 3), world.randn(6, 3)
    rows, coordinates, whole = Shard(0), Shard(1), Replicate()
    for placements in (
        (rows, rows, rows, rows),
        (rows, whole, whole, rows),
        (whole, rows, rows, rows),
        (rows, rows, whole, rows),
        (coordinates, rows, rows, coordinates),
        (whole, whole, rows, whole),
        (rows, whole, whole, whole),
    ):
        parts = shard(cloud, mesh, placements=placements[:2]), shard(queries, mesh, placements=placements[2:])
        assert_same_as_unsharded(lambda p, q: knn(p, q, 3), *parts)
        assert_same_as_unsharded(lambda p, q: radius_search(p, q, 1.0, return_dists=True), *parts)


@ranks(3)
def test_each_rank_sends_its_points_to_the_others_and_nothing_else(world):
    cloud = shard(world.randn(50, 3), world.mesh, dim=0, sizes=(1, 48, 1)).requires_grad_()
    queries = shard(world.randn(20, 3), world.mesh, dim=0)
    with count_communication() as sent:
        _, distances = knn(cloud, queries, 5)
    assert sent.bytes == 2 * cloud.to_local().numel() * 8
    with count_communication() as sent:
        distances.backward(torch.ones_like(distances))
    assert sent.bytes == (50 * 3 - cloud.to_local().numel()) * 8  # the gradients of the points that came
    with count_communication() as sent:
        knn(cloud.detach().full_tensor(), queries, 5)
    assert sent.calls == 1  # full_tensor


@ranks(2)
def test_what_does_not_fit_is_refused_together(world):
    cloud = shard(world.randn(5, 3), world.mesh, dim=0)
    with pytest.raises(ValueError, match="knn with k=6 among 5 points"):
        knn(cloud, cloud, 6)
    with pytest.raises(ValueError, match=r"radius_search of points \(5, 3\) and queries \(5, 2\)"):
        radius_search(cloud, cloud[:, :2], 1.0)


# ---------------------------------------------------------------------- surfaces


def cube():
    """Corners and faces of the unit cube, faces counterclockwise from outside."""
    corners = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3)), dtype=torch.float64)
    sides = (0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)
    return corners, torch.tensor([face for a, b, c, d in sides for face in ((a, b, c), (a, c, d))])


def test_distance_to_a_cube():
    corners, faces = cube()
    places = torch.rand(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 - 1
    places.requires_grad_()
    distance, closest, _ = signed_distance(corners, faces, places)
    out = (places - 0.5).abs() - 0.5
    expected = torch.linalg.vector_norm(out.clamp(min=0), dim=-1) + out.amax(1).clamp(max=0)
    torch.testing.assert_close(distance, expected)
    torch.testing.assert_close(torch.linalg.vector_norm(places - closest, dim=-1), distance.abs())
    torch.testing.assert_close(*(torch.autograd.grad(d.sum(), places)[0] for d in (distance, expected)))


@pytest.mark.parametrize("of_faces", [(4, 4, 4), (0, 12, 0)], ids=str)
@ranks(3)
def test_split_surfaces_and_points_equal_one_process(world, of_faces):
    corners, faces = cube()
    corners = corners + 0.1 * world.randn(8, 3)
    places = world.randn(20, 3)
    split = [shard(x, world.mesh, dim=0, sizes=sizes) for x, sizes in ((corners, (3, 0, 5)), (faces, of_faces), (places, (0, 6, 14)))]
    for chosen in itertools.product((False, True), repeat=3):
        if any(chosen):
            assert_same_as_unsharded(signed_distance, *(b if yes else a for a, b, yes in zip((corners, faces, places), split, chosen)))


@ranks(2)
def test_a_query_that_is_not_a_number_leaves_the_others_theirs(world):
    points, queries = world.randn(7, 3), world.randn(4, 3, seed=1)
    clean = knn(points, queries, 2)
    queries[1] = torch.nan
    for given in (points, shard(points, world.mesh, dim=0)):
        index, distance = knn(given, shard(queries, world.mesh, dim=0), 2)[:2]
        assert index.shape == (4, 2)
        others = torch.tensor([0, 2, 3])
        assert torch.equal(torch.as_tensor(index.full_tensor())[others], clean[0][others])
        torch.testing.assert_close(distance.full_tensor()[others], clean[1][others])

"""Handlers for functions and operators of packages that are imported later, or never."""

import importlib.util
import sys
import types

import pytest
import torch

from shardwise import ShardTensor
from shardwise.errors import MissingShardPatch
from shardwise.functional import knn, neighborhood_attention, signed_distance
from shardwise.shard_tensor import registry
from shardwise.shard_tensor.tensor import from_local, to_local
from shardwise.shard_tensor.third_party import connect, third_party
from shardwise.testing import assert_same_as_unsharded, count_communication, ranks, shard

SOURCE = """
import functools
import torch

def decorated(function):
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))

@decorated
def scaled(x, by=2.0):
    return x * by if type(x) is torch.Tensor else NotImplemented
"""
NATTEN = """
def na1d(query, key, value, kernel_size, stride=1, dilation=1, is_causal=False, scale=None, **options):
    raise AssertionError("the package's own function must not see a ShardTensor")
na2d = na3d = na1d
"""


@pytest.fixture
def package(monkeypatch):
    """Makes packages importable: `package(name, source)`."""
    before = dict(registry.named_functions)

    def make(name, source):
        module = types.ModuleType(name)
        exec(compile(source, name, "exec"), vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        return module

    yield make
    registry.named_functions.clear()
    registry.named_functions.update(before)


def local(x, by=2.0):
    return from_local(to_local(x) * by, x._spec)


@ranks(2)
def run_scaled(world, module):
    x = shard(world.randn(6, 2), world.mesh, dim=0, sizes=(5, 1))
    assert_same_as_unsharded(lambda t: module.scaled(t, by=3.0) if isinstance(t, ShardTensor) else t * 3.0, x)


def test_a_function_is_named_before_its_package_exists_and_connected_after(package):
    third_party("made_up.ops.scaled")(local)
    with pytest.raises(ImportError, match="import it first"):
        connect("made_up")
    package("made_up", "")
    module = package("made_up.ops", SOURCE)
    other = package("made_up.layers", "")
    other.scaled = module.scaled
    assert connect("made_up") == ("made_up.ops.scaled",)
    assert connect("made_up") == ("made_up.ops.scaled",)
    run_scaled(module)
    run_scaled(other)
    assert module.scaled(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_package_without_handlers_is_refused_with_the_ones_that_have(package):
    package("made_up", "")
    with pytest.raises(ValueError, match=r"none of its functions has a handler; packages with handlers: .*natten"):
        connect("made_up")


def test_an_operator_is_named_before_its_library_exists(package):
    ShardTensor.register_named_function_handler("made_up_ops.halve.default", lambda func, types, args, kwargs: local(*args, 0.5))
    library = torch.library.Library("made_up_ops", "DEF")
    library.define("halve(Tensor x) -> Tensor")
    library.impl("halve", lambda x: x / 2, "CompositeExplicitAutograd")
    run_halve()


@ranks(2)
def run_halve(world):
    x = shard(world.randn(6, 2), world.mesh, dim=0, sizes=(5, 1))
    for op in (torch.ops.made_up_ops.halve, torch.ops.made_up_ops.halve.default):
        with count_communication() as sent:
            y = op(x)
        assert sent.calls == 0
        torch.testing.assert_close(y.to_local(), x.to_local() / 2)


def test_natten_functions_take_the_sharded_form(package):
    package("natten", "")
    module = package("natten.functional", NATTEN)
    connect("natten")
    run_natten(module)


@ranks(2)
def run_natten(world, module):
    x = shard(world.randn(1, 8, 2, 3), world.mesh, dim=1, sizes=(5, 3))
    expected = neighborhood_attention(x, x, x, 4, dilation=2)
    torch.testing.assert_close(module.na1d(x, x, x, 4, dilation=2, backend="any").to_local(), expected.to_local())
    with pytest.raises(MissingShardPatch, match="natten attention with stride"):
        module.na1d(x, x, x, 4, stride=2)
    with pytest.raises(MissingShardPatch, match="natten attention with additional_keys"):
        module.na1d(x, x, x, 4, additional_keys=torch.ones(1, 2, 2, 3))


SCHEMAS = (
    "knn_scipy(Tensor points, Tensor queries, SymInt k=3) -> (Tensor, Tensor)",
    "radius_search_warp(Tensor points, Tensor queries, float radius, SymInt? max_points=None, bool return_dists=False, "
    "bool return_points=False) -> (Tensor, Tensor, Tensor, Tensor)",
    "signed_distance_field(Tensor mesh_vertices, Tensor mesh_indices, Tensor input_points, float max_dist=100000000., "
    "bool use_sign_winding_number=False) -> (Tensor, Tensor, Tensor)",
)


@pytest.fixture(scope="module")
def physicsnemo():
    """The operators of physicsnemo, without kernels."""
    if importlib.util.find_spec("physicsnemo") is not None:
        importlib.import_module("physicsnemo.nn.functional")
        yield
        return
    library = torch.library.Library("physicsnemo", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    yield
    library._destroy()


def test_operators_of_physicsnemo_take_the_sharded_forms(physicsnemo):
    run_physicsnemo()


@ranks(2)
def run_physicsnemo(world):
    ops = torch.ops.physicsnemo
    points, queries = world.randn(9, 3), world.randn(5, 3)
    split = shard(points, world.mesh, dim=0, sizes=(8, 1)), shard(queries, world.mesh, dim=0, sizes=(2, 3))
    for mine, other in zip(ops.knn_scipy(*split, 4), knn(points, queries, 4), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other)
    inside = torch.cdist(queries, points) <= 1.5
    index, near, distances, count = ops.radius_search_warp(*split, 1.5, 20, True, True)
    assert count.full_tensor().tolist() == inside.sum(1).tolist()
    assert index.dtype is torch.int32 and index.shape == (5, 20)
    there = torch.arange(20) < count.full_tensor().unsqueeze(1)
    torch.testing.assert_close(near.full_tensor(), torch.where(there.unsqueeze(-1), points[index.full_tensor()], 0.0))
    assert not distances.full_tensor()[~there].any()
    index, near, distances, count = ops.radius_search_warp(*split, 1.5)
    assert torch.equal(index.full_tensor(), inside.nonzero().T.int())
    assert [tuple(x.shape) for x in (near, distances, count)] == [(0, 3), (0,), (0,)]
    corners, faces = points[:3], torch.tensor([0, 1, 2], dtype=torch.int32)
    expected = signed_distance(corners, faces.view(1, 3).long(), queries)
    limit = float(expected[0].median())
    for mine, other in zip(ops.signed_distance_field(corners, faces, split[1], limit), expected, strict=True):
        far = expected[0].abs() > limit
        near = mine.full_tensor()
        torch.testing.assert_close(near[~far], other[~far])
        assert (near[far].isnan() if near.is_floating_point() else near[far] == -1).all()

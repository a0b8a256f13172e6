"""Inference mode splits like `no_grad`: ops made of others arrive whole there, and views must not turn ordinary tensors into others."""

import torch
from tests.samples import all_samples, rows, split_inputs, whole_inputs
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils._pytree import tree_leaves

from shardwise import ShardTensor
from shardwise.testing import count_communication, ranks, shard


def _results(sample, mode, mesh, letter):
    sizes = {other: sample.size(other) for other in sample.letters}
    tensors = whole_inputs(sample, sizes=sizes, dtype=sample.dtypes[0])
    inputs = split_inputs(sample, tensors, mesh, (letter,), {letter: rows("uneven", sample.size(letter), mesh.size())})
    with mode():
        return [leaf for leaf in tree_leaves(sample.function(*inputs)) if isinstance(leaf, ShardTensor)]


@ranks(2, timeout=120)
def test_every_sample_is_split_as_without_gradients(world):
    replicated = (Replicate(),)
    wrong = []
    for sample in all_samples():
        letter = sample.split[0]
        expected, found = (_results(sample, mode, world.mesh, letter) for mode in (torch.no_grad, torch.inference_mode))
        for mine, theirs in zip(found, expected, strict=True):
            if mine.placements == replicated != theirs.placements:
                wrong.append(f"{sample.name}: gathered")
            if not torch.equal(torch.isnan(mine.full_tensor()), torch.isnan(theirs.full_tensor())):
                wrong.append(f"{sample.name}: not a number")
            if not torch.allclose(mine.full_tensor(), theirs.full_tensor(), equal_nan=True):
                wrong.append(f"{sample.name}: other values")
    assert wrong == []


@ranks(4)
def test_composite_ops_and_views_of_tensors_made_before(world):
    before = shard(world.randn(2, 3, 10, 6), world.mesh, dim=2)
    with torch.inference_mode():
        for x in (before, shard(world.randn(2, 3, 10, 6, seed=1), world.mesh, dim=2)):
            with count_communication() as sent:
                y = x.flatten(2).transpose(1, 2)
                z = y.unflatten(-1, (3, 1)).permute(2, 0, 3, 1)[0]
            assert sent.calls == 0
            assert y.placements == (Shard(1),)
            torch.testing.assert_close(z.full_tensor(), x.full_tensor().flatten(2)[:, :1])


@ranks(4)
def test_a_distributed_table_meets_a_split_tensor_without_gradients(world):
    table = nn.Parameter(distribute_tensor(world.randn(10, 3), world.mesh, [Shard(0)]))
    x = shard(world.randn(10, 3), world.mesh, dim=0)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close((x + table).full_tensor(), x.full_tensor() + table.full_tensor())
            torch.testing.assert_close(torch.cat([x, table]).full_tensor(), torch.cat([x.full_tensor(), table.full_tensor()]))


@ranks(2)
def test_a_view_is_an_ordinary_tensor_where_that_of_plain_torch_is(world):
    views = {
        "view": lambda t: t.view(10, 3, 1), "transpose": lambda t: t.transpose(0, 1), "column": lambda t: t[:, 1],
        "rows": lambda t: t[1:], "narrow": lambda t: t.narrow(0, 1, 3), "flatten": lambda t: t.flatten(),
    }  # fmt: skip
    before = shard(world.randn(10, 3), world.mesh, dim=0)
    for name, view in views.items():
        with torch.inference_mode():
            made = view(before), view(shard(world.randn(10, 3), world.mesh, dim=0))
        with torch._C.DisableTorchFunctionSubclass():
            assert [x.is_inference() for x in made] == [False, True], name
        weight = shard(world.randn(10, 3, seed=1), world.mesh, dim=0).requires_grad_()
        (view(weight) * made[0]).sum().backward()


@ranks(2)
def test_a_dtensor_in_any_place_meets_a_shard(world):
    table = nn.Parameter(distribute_tensor(world.randn(10, 3), world.mesh, [Replicate()]))
    x = shard(world.randn(10, 3, seed=1), world.mesh, dim=0)
    for function in (
        lambda: torch.cat((x, table)),
        lambda: torch.stack([x, table]),
        lambda: torch.add(input=x, other=table),
        lambda: torch.hypot(x, other=table),
        lambda: torch.addcmul(x, tensor1=table, tensor2=table),
    ):
        with torch.no_grad():
            found = function()
        torch.testing.assert_close(found.full_tensor(), function().full_tensor().detach())

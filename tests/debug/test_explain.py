"""Who sends what: modules, ops, bytes, in forward and backward; stacks of a hang; the list of ops."""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.tensor.placement_types import Replicate

import shardwise
from shardwise.debug import count_by_module, explain, stacks_on_hang, supported_ops, wait_all
from shardwise.debug.ops import supported_ops_page
from shardwise.testing import count_communication, ranks, shard


@torch.library.custom_op("shardwise_tests::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    """An op nobody has a sharded form of."""
    return x / 2


class Gathers(nn.Module):
    def forward(self, x):
        return halve(x)


class Redistributes(nn.Module):
    def forward(self, x):
        return x.redistribute(placements=(Replicate(),)) + 1


@ranks(2)
def test_explain_names_module_op_and_line(world):
    model = world.same(lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Sequential(nn.GroupNorm(1, 2), nn.ReLU())).double())
    x = shard(world.randn(1, 1, 8, 4), world.mesh, dim=2)
    with count_communication() as sent, torch.no_grad():
        model(x)
    told = shardwise.explain(model, (x,))
    assert (told.calls, told.bytes) == (sent.calls, sent.bytes)
    halo = next(e for e in told.events if e.module == "0")
    assert halo.op.endswith("conv2d") and (halo.kind, halo.bytes, halo.direction) == ("exchanged", 1 * 4 * 8, "forward")
    assert {e.kind for e in told.events if e.module == "1.0"} == {"reduced"}
    assert told.gathers == []
    assert "0: torch.conv2d exchanged" in repr(told)


@ranks(2)
def test_backward_is_counted_by_module(world):
    model = world.same(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.Sequential(nn.GroupNorm(1, 2), nn.ReLU()), nn.Conv2d(2, 1, 5, padding=2)
        ).double()
    )
    x = shard(world.randn(1, 1, 8, 4), world.mesh, dim=2)
    with count_communication() as total, count_by_module(model) as sent:
        model(x).square().mean().backward()
    assert (sent.calls, sent.bytes) == (total.calls, total.bytes)
    backward = {}
    for event in sent.events:
        if event.direction == "backward":
            backward.setdefault(event.module, set()).add(event.collective)
    assert "exchange" in backward["2"] and "all_reduce" in backward["1.0"]
    assert sent.by_module["2"] == (2, 2 * (2 * 2 * 4 * 8))  # two rows of two channels, and their gradients


@ranks(2)
def test_gathers_are_found(world):
    x = shard(world.randn(3, 8, 4), world.mesh, dim=1)
    told = explain(nn.Sequential(nn.Identity(), Gathers()), (x,))
    (gather,) = [e for e in told.gathers if e.kind == "gathered"]
    assert gather.module == "1" and gather.op == "shardwise_tests.halve.default" and gather.bytes == 3 * 4 * 4 * 8
    assert "test_explain.py" in gather.where
    assert "gathered: shardwise_tests.halve.default" in repr(told)


@ranks(2)
def test_redistributions_are_found(world):
    told = explain(Redistributes(), (shard(world.randn(6, 2), world.mesh, dim=0),))
    assert [e.kind for e in told.gathers] == ["redistributed"]


def test_stack_of_a_slow_block_is_written(tmp_path):
    with stacks_on_hang(0.2, tmp_path) as path:
        time.sleep(0.8)
    assert "test_stack_of_a_slow_block_is_written" in path.read_text()
    with stacks_on_hang(60, tmp_path) as path:
        pass
    assert path.read_text() == ""


@ranks(2, processes=True)
def test_unwaited_results_are_completed(world):
    pending = all_reduce(torch.ones(3), "sum", world.mesh.get_group())
    assert isinstance(pending, AsyncCollectiveTensor)
    done = wait_all({"x": [pending, torch.zeros(1)]})
    assert not isinstance(done["x"][0], AsyncCollectiveTensor) and done["x"][0].tolist() == [2.0, 2.0, 2.0]


def test_supported_ops_are_listed_with_their_communication():
    ops = {op.name: op for op in supported_ops()}
    assert ops["torch.nn.functional.embedding"].communication.startswith("none forward.")
    assert ops["aten.mm.default"].level == "dispatch" if "aten.mm.default" in ops else True
    assert F.linear.__name__ in {name.rpartition(".")[2] for name in ops}
    page = supported_ops_page()
    assert all(f"| `{name}` |" in page for name in ops)

"""`ranks(n)`: what passes, and how each kind of failure ends the test and names the rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardwise.testing import RankFailure, RankHang, ranks

BOTH = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


@pytest.mark.parametrize("factor", [1, 2])
@ranks(4)
def test_threads_reduce_over_all_ranks(world, factor):
    x = torch.full((2,), float(world.rank * factor))
    dist.all_reduce(x)
    assert x.tolist() == [6.0 * factor] * 2
    assert (world.size, world.mesh.size(), world.mesh.mesh_dim_names) == (4, 4, ("domain",))


@pytest.mark.parametrize("factor", [1, 2])
@ranks(3, processes=True)
def test_processes_reduce_over_all_ranks(world, factor, tmp_path):
    (tmp_path / f"{os.getpid()}").touch()
    x = torch.full((2,), float(world.rank * factor))
    dist.all_reduce(x)
    assert x.tolist() == [3.0 * factor] * 2
    assert len(list(tmp_path.iterdir())) == 3


@given(shift=st.integers(0, 5))
@ranks(3)
def test_threads_send_and_receive(world, shift):
    sent, received = torch.full((2,), float(world.rank)), torch.empty(2)
    to, source = (world.rank + shift) % 3, (world.rank - shift) % 3
    if to != world.rank:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)])
        for work in works:
            work.wait()
        assert received.tolist() == [float(source)] * 2


@ranks(4, mesh={"ddp": 2, "domain": 2})
def test_threads_use_the_axes_of_a_mesh(world):
    x = torch.tensor([float(world.rank)])
    dist.all_reduce(x, group=world.mesh.get_group("domain"))
    assert x.item() == (1.0 if world.rank < 2 else 5.0)


@ranks(4, mesh={"ddp": 2, "domain": 2}, processes=True)
def test_processes_use_the_axes_of_a_mesh_and_backward(world):
    x = torch.tensor([float(world.rank)], requires_grad=True)
    (x * x).sum().backward()
    dist.all_reduce(x.grad, group=world.mesh.get_group("ddp"))
    assert x.grad.item() == (4.0 if world.rank % 2 == 0 else 8.0)


@ranks(3)
def test_ranks_get_the_same_numbers_and_modules(world):
    first, second = world.randn(4), world.randn(4)
    weight = world.same(lambda: torch.nn.Linear(3, 3)).weight
    assert not torch.equal(first, second)
    assert torch.equal(world.randn(4, seed=1), first)
    for value in (first, second, weight.detach()):
        values = [torch.empty_like(value) for _ in range(3)]
        dist.all_gather(values, value)
        assert all(torch.equal(other, value) for other in values)


def raise_on_one(world):
    if world.rank == 1:
        raise ValueError("this rank has had enough")
    dist.barrier()


def raise_on_all(world):
    raise ValueError(f"not on {world.rank}")


def die(world):
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def loop(world):
    while world.rank == 1:
        time.sleep(0.01)
    dist.barrier()


def leave_early(world):
    if world.rank != 1:
        dist.barrier()


def stop(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


FUNCTIONS = (raise_on_one, raise_on_all, die, loop, leave_early, stop)
RUN = {(function, processes): ranks(3, processes=processes, timeout=2)(function) for function in FUNCTIONS for processes in (False, True)}


def failure(function, processes, error):
    """The message and notes of the error that a run ends with."""
    with pytest.raises(error) as caught:
        RUN[function, processes]()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_threads_raise_what_the_rank_raised_and_name_it():
    text = failure(raise_on_one, False, ValueError)
    assert text.splitlines() == ["this rank has had enough", "raised by rank 1 of 3"]


def test_processes_show_the_traceback_of_the_rank_and_name_it():
    text = failure(raise_on_one, True, RankFailure)
    assert text.startswith("rank 1 of 3 failed: ValueError: this rank has had enough")
    assert 'in raise_on_one\n    raise ValueError("this rank has had enough")' in text


def test_threads_that_all_raise_are_all_named():
    text = failure(raise_on_all, False, ValueError)
    assert all(f"not on {rank}" in text for rank in range(3))


def test_processes_that_all_raise_are_all_named():
    text = failure(raise_on_all, True, RankFailure)
    assert all(f"--- rank {rank} of 3 ---" in text and f"ValueError: not on {rank}" in text for rank in range(3))


def test_killed_process_is_named():
    assert failure(die, True, RankFailure).startswith("rank 2 of 3 failed: the process was killed by SIGKILL")


def test_stopped_process_is_named():
    text = failure(stop, True, RankHang)
    assert "rank 1 is not waiting for another rank: gave no stack" in text


@BOTH
def test_looping_rank_is_named_with_the_stacks_of_all(processes):
    text = failure(loop, processes, RankHang)
    assert text.startswith("rank 0, 1, 2 of 3 not done after 2 s\nrank 1 is not waiting for another rank: ")
    assert "in loop: " in text.splitlines()[1]
    assert [line for line in text.splitlines() if line.startswith("rank ")][2:] == []
    assert all(f"--- rank {rank} of 3 ---" in text for rank in range(3))
    assert text.count("dist.barrier()") == (0 if processes else 2)  # faulthandler writes no source lines


@BOTH
def test_rank_that_leaves_early_is_named(processes):
    text = failure(leave_early, processes, RankHang)
    assert text.splitlines()[:2] == ["rank 0, 2 of 3 not done after 2 s", "rank 1 finished without the others"]


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("order", ["before", "after"])
def test_processes_work_after_every_failure(size, order):
    if order == "after":
        failure(die, True, RankFailure)
    COUNT[size]()


def count(world):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == world.size


COUNT = {size: ranks(size, processes=True)(count) for size in (2, 8)}


def test_arguments_of_processes_must_pickle():
    with pytest.raises(TypeError, match=r"processes=True pickles its arguments, given \{'x'"):
        takes_anything(x=lambda: None)


@ranks(2, processes=True)
def takes_anything(world, x):
    pass


def test_wrong_uses_are_refused():
    with pytest.raises(ValueError, match=r"mesh \{'a': 2, 'b': 2\} has 4 ranks, not 3"):
        ranks(3, mesh={"a": 2, "b": 2})
    with pytest.raises(TypeError, match="first parameter is the world"):
        ranks(3)(lambda: None)

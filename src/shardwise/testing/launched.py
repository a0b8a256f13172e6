"""Rank tests on a world that a launcher started: `torchrun --nproc-per-node 4 -m pytest --multigpu-static -m multigpu_static`."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.testing.rank_tests import RankTest

_state: dict[str, Any] = {"active": False, "tests": 0}


class LauncherError(RuntimeError):
    """The ranks of a launched world no longer run the same test; the run cannot go on."""


def active() -> bool:
    """Whether this process is one rank of a launched world."""
    return bool(_state["active"])


def start(timeout: float) -> None:
    """Join the launched world: NCCL where there are GPUs, else gloo."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise LauncherError("--multigpu-static needs a launcher: torchrun --nproc-per-node 4 -m pytest --multigpu-static")
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(_device())
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout))
    _state["active"] = True


def stop() -> None:
    import torch.distributed as dist

    if _state["active"] and dist.is_initialized():
        dist.destroy_process_group()
    _state["active"] = False


def _device() -> Any:
    import torch

    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")


def run(test: RankTest, arguments: Mapping[str, Any]) -> None:
    """Run one rank test on this rank, then agree with the others that it is over.

    Raises what this rank raised. When another rank failed, or does not arrive within the test's timeout, says which.
    Communication: one key per rank and test in the launcher's store, no collective, so that a broken group does not matter.
    """
    __tracebackhide__ = True
    import torch
    import torch.distributed as dist

    from shardwise.testing.world import World

    _state["tests"] += 1
    store = torch._C._distributed_c10d.PrefixStore(f"shardwise-test-{_state['tests']}", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    error: BaseException | None = None
    try:
        test(World(device=_device(), axes=test.axes), arguments)
    except BaseException as raised:
        error = raised
    report = "" if error is None else "".join(traceback.format_exception(error))
    store.set(str(rank), report or "ok")
    late, reports = [], {}
    for other in range(size):
        try:
            store.wait([str(other)], timedelta(seconds=test.timeout))
        except dist.DistStoreError:
            late.append(other)
            continue
        text = store.get(str(other)).decode()
        if text != "ok":
            reports[other] = text
    if error is not None:
        error.add_note(f"raised by rank {rank} of {size}")
    if late:
        message = f"rank {', '.join(map(str, late))} of {size} did not end the test within {test.timeout:g} s; the run stops"
        raise LauncherError("\n".join([message, *(f"--- rank {r} ---\n{t}" for r, t in reports.items())])) from error
    if error is not None:
        raise error
    if reports:
        from shardwise.testing.failures import RankFailure

        raise RankFailure(size=size, reports=reports)

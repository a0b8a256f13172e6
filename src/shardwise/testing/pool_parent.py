"""The process that forks, feeds and watches the ranks of the pool, and what a rank does. Runs no torch code outside the ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NoReturn, cast

from shardwise.testing.rank_tests import REGISTRY

GRACE_S = 1.5  # for the other ranks to end after one has failed
STACK_S = 2.0  # for a stuck rank to write its stack


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank test: its key in the registry, its pickled arguments, the number of ranks, seconds until it counts as hung."""

    key: tuple[str, str]
    arguments: bytes
    size: int
    timeout: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended: a traceback or cause of death per failed rank, else a stack per unfinished rank, else nothing."""

    reports: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    pid: int
    connection: Connection
    stack_file: Path


class _ClientGone(Exception):
    pass


def serve(control: Connection) -> NoReturn:
    """Run the jobs that come over `control` until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides what an interrupt means
    folder = Path(tempfile.mkdtemp(prefix="shardwise-ranks-"))
    ranks: list[_Rank] = []

    def end(*_: object) -> NoReturn:
        _kill(ranks)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    with contextlib.suppress(EOFError, OSError, _ClientGone):
        for number in range(10**9):
            job: Job = control.recv()
            while len(ranks) < job.size:
                ranks.append(_fork_rank(folder / f"rank{len(ranks)}-{number}.stack", [control, *(rank.connection for rank in ranks)]))
            outcome = _run(job, ranks[: job.size], folder / f"rendezvous-{number}", control)
            if outcome.reports or outcome.stacks:
                _kill(ranks)
            control.send(outcome)
    end()


def _run(job: Job, ranks: list[_Rank], rendezvous: Path, control: Connection) -> Outcome:
    for number, rank in enumerate(ranks):
        with contextlib.suppress(BrokenPipeError):
            rank.connection.send((job, number, str(rendezvous)))
    pending = {rank.connection: number for number, rank in enumerate(ranks)}
    deaths: dict[int, str] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + job.timeout
    while pending and (ready := wait([*pending, control], max(0.0, deadline - time.monotonic()))):
        if control in ready:
            raise _ClientGone
        for connection in ready:
            assert isinstance(connection, Connection)
            number = pending.pop(connection)
            try:
                text = connection.recv()
            except (EOFError, ConnectionResetError):
                _, status = os.waitpid(ranks[number].pid, 0)
                deaths[number] = f"the process {how_it_ended(status)}"
                text = ""
            if text:
                errors[number] = text
            if deaths or errors:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    rendezvous.unlink(missing_ok=True)
    if deaths or errors:
        return Outcome(reports={**deaths, **errors})
    return Outcome(stacks=_stacks({number: ranks[number] for number in pending.values()}))


def how_it_ended(status: int) -> str:
    """`was killed by SIGKILL` or `ended with exit code 3`, from a wait status."""
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit code {os.WEXITSTATUS(status)}"


def _stacks(ranks: dict[int, _Rank]) -> dict[int, str]:
    for rank in ranks.values():
        os.kill(rank.pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACK_S
    while time.monotonic() < deadline and not all(rank.stack_file.stat().st_size for rank in ranks.values()):
        time.sleep(0.02)
    time.sleep(0.1)  # let the last one finish writing
    return {number: rank.stack_file.read_text() or "gave no stack: stopped, or stuck outside Python" for number, rank in ranks.items()}


def _kill(ranks: list[_Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGKILL)
    for rank in ranks:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(rank.pid, 0)
        rank.connection.close()
        rank.stack_file.unlink(missing_ok=True)
    ranks.clear()


def _fork_rank(stack_file: Path, foreign: list[Connection]) -> _Rank:
    ours, theirs = Pipe()
    stack_file.touch()
    pid = os.fork()
    if pid == 0:
        try:
            for connection in (ours, *foreign):
                connection.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _rank_loop(theirs, stack_file)
        finally:
            os._exit(0)
    theirs.close()
    return _Rank(pid=pid, connection=ours, stack_file=stack_file)


def _rank_loop(connection: Connection, stack_file: Path) -> None:
    import torch
    import torch.distributed as dist

    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    torch.set_num_threads(1)
    with stack_file.open("w") as stacks, contextlib.suppress(EOFError):
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        while True:
            job, rank, rendezvous = connection.recv()
            if dist.is_initialized():  # only now: every rank has finished the previous test
                dist.destroy_process_group()
                _forget_layouts()
            connection.send(_run_test(job, rank, rendezvous))


def _forget_layouts() -> None:
    """DTensor keeps the layouts of past results, with meshes whose groups are gone; a mesh of the next test may equal one of them."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        cast("Callable[[], None]", _clear_sharding_prop_cache)()


def _run_test(job: Job, rank: int, rendezvous: str) -> str:
    import torch
    import torch.distributed as dist

    from shardwise.testing.world import World

    try:
        if job.key not in REGISTRY:
            importlib.import_module(job.key[0])
        test = REGISTRY[job.key]
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=job.size,
            timeout=timedelta(seconds=job.timeout + 60),  # the watching parent is to speak first
        )
        test(World(device=torch.device("cpu"), axes=test.axes), pickle.loads(job.arguments))
    except BaseException as error:
        return _traceback(error)
    return ""


def _traceback(error: BaseException) -> str:
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and "shardwise/testing" in frames.tb_frame.f_code.co_filename:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))

"""Ranks as real processes with gloo, kept for a whole test session.

`start` forks one parent process while this one is clean: torch and the test modules are imported, nothing has run. That parent forks the
ranks, so a rank costs milliseconds and already holds every rank test; it watches them, and after any failure it ends them all and forks
new ones for the next test. Each test gets a fresh process group over a rendezvous file.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

from shardwise.testing import pool_parent
from shardwise.testing.failures import RankFailure, RankHang

if TYPE_CHECKING:
    from shardwise.testing.rank_tests import RankTest


@dataclass(frozen=True, kw_only=True)
class _Pool:
    pid: int
    control: Connection


_pools: list[_Pool] = []  # none or one


def start() -> None:
    """Fork the parent of the ranks, unless it is there."""
    if _pools:
        return
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        pool_parent.serve(theirs)
    theirs.close()
    _pools.append(_Pool(pid=pid, control=ours))


def stop() -> None:
    """End the ranks and their parent."""
    while _pools:
        pool = _pools.pop()
        pool.control.close()  # the parent sees the end of the pipe, kills its ranks and exits
        os.waitpid(pool.pid, 0)


def run(test: RankTest, arguments: Mapping[str, Any]) -> None:
    """Run one rank test on `test.size` processes. Raises `RankFailure` or `RankHang`, naming the ranks."""
    __tracebackhide__ = True
    job = pool_parent.Job(key=test.key, arguments=_pickle(arguments), size=test.size, timeout=test.timeout)
    start()
    (pool,) = _pools
    try:
        pool.control.send(job)
        outcome: pool_parent.Outcome = pool.control.recv()
    except (EOFError, BrokenPipeError):
        _pools.clear()
        _, status = os.waitpid(pool.pid, 0)
        raise RuntimeError(f"the parent of the rank processes {pool_parent.how_it_ended(status)}") from None
    except KeyboardInterrupt:
        os.kill(pool.pid, signal.SIGTERM)
        stop()
        raise
    if outcome.reports:
        raise RankFailure(size=test.size, reports=outcome.reports)
    if outcome.stacks:
        raise RankHang(size=test.size, timeout=test.timeout, stacks=outcome.stacks)


def _pickle(arguments: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps(dict(arguments))
    except Exception as error:
        raise TypeError(f"a rank test with processes=True pickles its arguments, given {dict(arguments)}: {error}") from None

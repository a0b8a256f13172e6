"""Ranks as threads of one process: a distributed test in a tenth of a second.

The only file that imports torch's threaded process group, which lives in `torch.testing._internal`. It adds point-to-point
messages to that group, and an end for every run: a rank that raises, or that does not come back in time, wakes all others.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.testing._internal.distributed import multi_threaded_pg

from shardwise.random import use_generator
from shardwise.testing.failures import RankHang

T = TypeVar("T")
threaded: Any = multi_threaded_pg  # not typed
c10d: Any = torch._C._distributed_c10d
GRACE_S = 1.5  # for the other ranks to end after one has failed


def run_in_threads(size: int, function: Callable[[int], T], timeout: float) -> list[T]:
    """Call `function(rank)` on `size` ranks, each with its own default process group; return their results by rank.

    Raises what the first failing rank raised, with notes that name it and what the other ranks raised;
    `RankHang` with the stack of every unfinished rank when they are not done after `timeout` seconds.
    """
    __tracebackhide__ = True
    run = _Run(size, function, timeout)
    with _threaded_backend():
        for thread in run.threads:
            thread.start()
        run.wait()
    return run.results


class _Run:
    def __init__(self, size: int, function: Callable[[int], Any], timeout: float) -> None:
        self.size, self.function, self.timeout = size, function, timeout
        self.store = c10d.HashStore()
        self.results: list[Any] = [None] * size
        self.errors: list[tuple[int, BaseException]] = []  # in order of time
        self.ended = False
        self.failed = threading.Event()
        self.threads = [threading.Thread(target=self._rank, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]

    def _rank(self, rank: int) -> None:
        try:
            torch.set_num_threads(1)
            dist.init_process_group("threaded", rank=rank, world_size=self.size, store=self.store, timeout=timedelta(seconds=self.timeout))
            # threads share torch's default generator: each rank draws the keys of its random ops from one of its own, all alike
            with use_generator(torch.Generator().manual_seed(torch.initial_seed())):
                self.results[rank] = self.function(rank)
        except SystemExit:  # woken because another rank failed
            pass
        except BaseException as error:
            if not self.ended:
                self.errors.append((rank, error))
                self.failed.set()
                _wake_all()
        finally:
            if not self.ended:
                dist.destroy_process_group()

    def wait(self) -> None:
        __tracebackhide__ = True
        deadline = time.monotonic() + self.timeout
        for thread in self.threads:
            while thread.is_alive() and time.monotonic() < deadline and not self.failed.is_set():
                thread.join(0.05 if thread.is_alive() else 0)
        if self.failed.is_set():
            deadline = time.monotonic() + GRACE_S
            for thread in self.threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, thread in enumerate(self.threads) if thread.is_alive()]
        stacks = self._stacks(stuck)
        self.ended = True
        for rank in stuck:
            _interrupt(self.threads[rank])
        _wake_all()
        if self.errors:
            rank, error = self.errors[0]
            error.add_note(f"raised by rank {rank} of {self.size}")
            for other, other_error in self.errors[1:]:
                error.add_note(f"rank {other} raised {type(other_error).__name__}: {other_error}")
            raise error
        if stuck:
            raise RankHang(size=self.size, timeout=self.timeout, stacks=stacks)

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        frames = sys._current_frames()
        idents = {rank: self.threads[rank].ident for rank in ranks}
        return {
            rank: "".join(traceback.format_stack(frames[ident])) for rank, ident in idents.items() if ident is not None and ident in frames
        }


@contextlib.contextmanager
def _threaded_backend() -> Any:
    threaded._install_threaded_pg()
    c10d._set_thread_isolation_mode(True)
    setattr(threaded.ProcessLocalGroup, "send", _send)  # noqa: B010
    setattr(threaded.ProcessLocalGroup, "recv", _receive)  # noqa: B010
    try:
        yield
    finally:
        threaded.ProcessLocalGroup.reset()
        _mail.clear()
        threaded._uninstall_threaded_pg()
        c10d._set_thread_isolation_mode(False)


def _wake_all() -> None:
    threaded.ProcessLocalGroup._terminate.set()
    for collective in list(threaded.ProcessLocalGroup._cur_coll_on_pgs.values()):
        for condition in (collective._start_cond, collective._done_cond):
            with condition:
                condition.notify_all()
    _mail.fail_all()


def _interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread at its next Python instruction, so that a rank that loops does not run on for ever."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


class _Mail:
    """Messages between ranks, in order per (group, sender, receiver, tag): sent ones, or receivers that wait for one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._waiting: dict[tuple[Any, ...], list[tuple[torch.Tensor, Future[Any]]]] = {}

    def send(self, key: tuple[Any, ...], message: torch.Tensor) -> None:
        with self._lock:
            if self._waiting.get(key):
                _deliver(message, *self._waiting[key].pop(0))
            else:
                self._sent.setdefault(key, []).append(message)

    def receive(self, key: tuple[Any, ...], into: torch.Tensor) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._sent.get(key):
                _deliver(self._sent[key].pop(0), into, future)
            else:
                self._waiting.setdefault(key, []).append((into, future))
        return future

    def fail_all(self) -> None:
        with self._lock:
            for queue in self._waiting.values():
                while queue:
                    queue.pop()[1].set_exception(RuntimeError("another rank failed before it sent this message"))

    def clear(self) -> None:
        self.fail_all()
        self._sent.clear()
        self._waiting.clear()


_mail = _Mail()


def _deliver(message: torch.Tensor, into: torch.Tensor, future: Future[Any]) -> None:
    if message.shape != into.shape or message.dtype != into.dtype:
        sent, wanted = (f"{tuple(t.shape)} {t.dtype}" for t in (message, into))
        future.set_exception(RuntimeError(f"received a tensor of {sent} into a buffer of {wanted}"))
        return
    with torch.no_grad():
        into.detach().copy_(message)
    future.set_result(None)


def _send(group: Any, tensors: list[torch.Tensor], destination: int, tag: int) -> Any:
    for tensor in tensors:
        _mail.send((group.pg_name, group._rank, destination, tag), tensor.detach().clone())
    return threaded.ret_work(None)


def _receive(group: Any, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
    (tensor,) = tensors
    future = _mail.receive((group.pg_name, source, group._rank, tag), tensor)
    return c10d._create_work_from_future(future)

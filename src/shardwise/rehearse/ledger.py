"""Which storages live when, and what they are: an account of every op of a step on fake tensors."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.rehearse.known import UNREAD, Value, grouped_product, outcome, spread, tensors, unknown

Phase = Literal["forward", "backward", "update"]
Category = Literal["weights", "gradients", "optimizer", "activations", "loss", "temporaries"]
CATEGORIES: tuple[Category, ...] = ("weights", "gradients", "optimizer", "activations", "loss", "temporaries")
_aten = torch.ops.aten


@dataclass(kw_only=True)
class _Storage:
    """born, died: numbers of events. value: what all its elements are, where that is known."""

    size: int
    born: int
    phase: Phase
    died: float = float("inf")
    category: Category | None = None
    value: Value = None
    alive: weakref.ref[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes by category when most are live."""

    phase: Phase
    categories: dict[Category, int]

    @property
    def total(self) -> int:
        return sum(self.categories.values())


class Ledger(TorchDispatchMode):
    """Accounts the storages of all tensors that ops make inside the `with` block.

    Bytes are those that tensors ask for: no rounding of an allocator, no workspace inside a kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, _Storage] = {}
        self._all: list[_Storage] = []
        self._events = self._bytes = 0
        self._inside: Phase = "update"
        self._last: Phase = "update"
        self._backwards: list[int] = []  # events at which a backward begins
        self._peaks: dict[Phase, tuple[int, int]] = {}

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """Ops inside are forward work, those under autograd's backward backward work; all others belong to the update."""
        self._inside = "forward"
        try:
            yield
        finally:
            self._inside = "update"

    @contextmanager
    def loss(self) -> Iterator[None]:
        """What ops inside make and a backward finds belongs to the loss."""
        first = len(self._all)
        yield
        for storage in self._all[first:]:
            if storage.died == float("inf"):
                storage.category = "loss"

    def hold(self, made: Iterable[Tensor], category: Category) -> None:
        """These tensors are of this category, whenever they were made."""
        for tensor in made:
            self._record(tensor).category = category

    def forget_peaks(self) -> None:
        """Highest points from here on."""
        self._peaks.clear()

    def peak(self, phase: Phase | None = None) -> Peak:
        """The highest point of a phase, or of all."""
        chosen = phase or max(self._peaks, key=lambda each: self._peaks[each][0])
        event = self._peaks.get(chosen, (0, 0))[1]
        categories: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        for storage in self._all:
            if storage.born <= event < storage.died:
                categories[self._category(storage)] += storage.size
        return Peak(phase=chosen, categories=categories)

    def _category(self, storage: _Storage) -> Category:
        """What a forward makes and a backward finds is an activation."""
        if storage.category is not None:
            return storage.category
        after = bisect_right(self._backwards, storage.born)
        kept = storage.phase == "forward" and after < len(self._backwards) and storage.died > self._backwards[after]
        return "activations" if kept else "temporaries"

    def _record(self, tensor: Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._live.get(key)
        if found is None:
            phase = self._phase()
            self._events += 1
            found = self._live[key] = _Storage(size=storage.nbytes(), born=self._events, phase=phase)
            found.alive = weakref.ref(storage, lambda _: self._died(key, found))
            self._all.append(found)
            self._bytes += found.size
            if self._bytes > self._peaks.get(phase, (0, 0))[0]:
                self._peaks[phase] = (self._bytes, self._events)
        return found

    def _died(self, key: int, storage: _Storage) -> None:
        self._events += 1
        storage.died = self._events
        self._bytes -= storage.size
        if self._live.get(key) is storage:
            del self._live[key]

    def _phase(self) -> Phase:
        phase: Phase = self._inside if torch._C._current_graph_task_id() == -1 else "backward"
        if phase == "backward" and self._last != "backward":
            self._events += 1
            self._backwards.append(self._events)
        self._last = phase
        return phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            return self._read(args[0])
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is torch.ops._c10d_functional.wait_tensor.default and isinstance(args[0], FakeTensor):
            func(*args)
            return args[0]  # as it does on real tensors; its fake makes a copy
        if func is _aten._fused_adamw_.default and isinstance(args[0][0], FakeTensor):
            return None  # in place, and without a fake of its own
        if func is _aten.bincount.default:
            bins = args[2] if len(args) > 2 else kwargs["minlength"]
            out, value = args[0].new_empty(bins), spread(args[0], bins)
        elif func is _aten._grouped_mm.default:
            out, value = grouped_product(args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"]), None
        else:
            try:
                out = func(*args, **kwargs)
            except (DynamicOutputShapeException, DataDependentOutputException):
                raise unknown(f"the op {func}") from None
            value = outcome(func, args, kwargs, out, lambda tensor: self._record(tensor).value)
        results = [out] if isinstance(out, Tensor) else list(tensors(out))
        if func._schema.is_mutable:
            for tensor in tensors((args, kwargs)):
                self._record(tensor).value = value
        elif value is not None or not _is_view(func):
            for tensor in results:
                self._record(tensor).value = value
        if func is torch.ops.c10d.send.default:
            return _arrived()
        return out

    def _read(self, tensor: Tensor) -> Value:
        value = self._record(tensor).value
        if tensor.dtype.is_floating_point:
            return UNREAD if value is None else float(value)
        if value is None:
            raise unknown(f"a number of {tensor.dtype} read from a tensor")
        return bool(value) if tensor.dtype == torch.bool else int(value)


def _arrived() -> Any:
    """Work that is done: a message has left when its send returns, so that its buffer can go."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([])
    return _create_work_from_future(future).boxed()


@cache
def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)

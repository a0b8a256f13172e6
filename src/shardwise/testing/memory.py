"""Bytes that autograd keeps for backward, on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SavedBytes:
    """`bytes`: held for backward now. `peak`: the most there were at once. Each storage counts once and whole."""

    def __init__(self) -> None:
        self.bytes = 0
        self.peak = 0
        self._uses: dict[int, int] = {}

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        self._uses[address] = self._uses.get(address, 0) + 1
        if self._uses[address] == 1:
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def _remove(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        self._uses[address] -= 1
        if self._uses[address] == 0:
            del self._uses[address]
            self.bytes -= storage.nbytes()


class _Saved:
    """A tensor in the autograd graph; counted until the graph lets it go."""

    def __init__(self, tensor: torch.Tensor, counter: SavedBytes, uncounted: set[int]) -> None:
        self.tensor = tensor
        self._counter = counter
        self._storage: torch.UntypedStorage | None = None
        storage = local(tensor).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in uncounted:
            self._storage = storage
            counter._add(storage)

    def __del__(self) -> None:
        if self._storage is not None:
            self._counter._remove(self._storage)


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a `ShardTensor` or DTensor; a plain tensor as it is."""
    result: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return result


@contextmanager
def measure_saved_bytes(exclude: Iterable[torch.Tensor] = ()) -> Iterator[SavedBytes]:
    """Count what autograd saves inside the block: `with measure_saved_bytes(model.parameters()) as saved: loss = model(x)`.

    A saved view counts the whole storage it keeps alive. exclude: tensors whose storage does not count, such as weights.
    """
    counter = SavedBytes()
    uncounted = {local(tensor).untyped_storage().data_ptr() for tensor in exclude}
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(tensor, counter, uncounted), lambda saved: saved.tensor):
        yield counter

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
        self._sizes: dict[int, int] = {}

    # Storages are told apart by what they are, not by where their memory is: FSDP2 frees and gathers weights again in the same storage.

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] == 1:
            self._sizes[key] = storage.nbytes()
            self.bytes += self._sizes[key]
            self.peak = max(self.peak, self.bytes)

    def _remove(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._uses[key] -= 1
        if self._uses[key] == 0:
            del self._uses[key]
            self.bytes -= self._sizes.pop(key)


class _Saved:
    """A tensor in the autograd graph; counted until the graph lets it go."""

    def __init__(self, tensor: torch.Tensor, counter: SavedBytes, uncounted: set[int]) -> None:
        self.tensor = tensor
        self._counter = counter
        self._storage: torch.UntypedStorage | None = None
        storage = local(tensor).untyped_storage()
        if storage.nbytes() and storage._cdata not in uncounted:
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

    A saved view counts the whole storage it keeps alive, at its size when it was saved. exclude: tensors whose storage does not count,
    such as weights.
    """
    counter = SavedBytes()
    uncounted = {local(tensor).untyped_storage()._cdata for tensor in exclude}
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(tensor, counter, uncounted), lambda saved: saved.tensor):
        yield counter

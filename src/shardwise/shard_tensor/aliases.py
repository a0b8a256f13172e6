"""Views, and what a write into one of them means for the others.

Most views share the memory of what they view, and torch does the rest. Where a shard had to be copied (its rows moved for the view), the
view is a `CopiedView`: what is written into it is handed on to the tensor it views, and what is written there arrives when the view is
next used. Both are decided by counting writes, which all ranks do alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.errors import MissingShardPatch
from shardwise.shard_tensor.redistribute import redistribute_local
from shardwise.shard_tensor.spec import ShardTensorSpec
from shardwise.shard_tensor.tensor import ShardTensor

Gather = Callable[[ShardTensor], Tensor]
Push = Callable[[ShardTensor, Tensor], None]


class CopiedView(ShardTensor):
    """A view whose shard lies in memory of its own, or in that of another such view.

    Communication: that of the op that made it, at its first use after a write into the tensor it views.
    """

    @property
    def _local_tensor(self) -> Tensor:
        self._copy.refresh()
        return self.__dict__["_local_tensor"]

    @_local_tensor.setter
    def _local_tensor(self, local: Tensor) -> None:
        self.__dict__["_local_tensor"] = local

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """One rank alone may print: a shard that must be copied again is shown as it was. Communication: none."""
        text = super().__repr__()
        return f"{text[:-1]}, before a write into what it views)" if self._copy.old else text

    __str__ = __repr__


class _Copy:
    """The memory of a copied view, shared by the views of it.

    source: the tensor it views, without its graph. gather(source): the shard anew, or None if that is not possible. push(source, shard):
    carries a write on, or None. writes: a count of writes into this memory; seen: that of the source's memory when it was last copied.
    """

    def __init__(self, view: ShardTensor, source: ShardTensor, gather: Gather | None, push: Push | None) -> None:
        self.source, self.gather, self.push = source, gather, push
        self.shard, self.writes = view._local_tensor, _writes(view)
        self.seen = _writes(source)[0]

    @property
    def old(self) -> bool:
        """Whether the next use copies anew."""
        further = self.source.__dict__.get("_copy")
        return _writes(self.source)[0] != self.seen or (further is not None and further.old)

    def refresh(self) -> None:
        writes = _writes(self.source)
        if self.source.__dict__.get("_copy"):
            self.source._copy.refresh()
        if writes[0] == self.seen:
            return
        if self.gather is None:
            raise MissingShardPatch(
                f"a view ({self.source._spec.describe()} is what it views) that is used after a write into what it views",
                "the view had to be copied to be sharded, and its gradient would be that of the values before the write",
                "take the view after the write",
            )
        self.seen = writes[0]
        with torch.inference_mode(self.shard.is_inference()), torch.no_grad():
            self.shard.copy_(self.gather(self.source))
        self.writes[0] += 1
        _count(self.shard)

    def hand_on(self) -> None:
        if self.push is not None:
            self.push(self.source, self.shard)
            after_write(self.source)
            self.seen = _writes(self.source)[0]


def _writes(x: ShardTensor) -> list[int]:
    """The count of writes into the memory of `x`, shared by all that show it."""
    here = x.__dict__
    writes = here.get("_writes")
    if writes is None:
        writes = here["_writes"] = [0]
    return writes


def _count(local: Tensor) -> None:
    if not local.is_inference() and not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(local)


def same_memory(view: ShardTensor, x: ShardTensor) -> ShardTensor:
    """`view`, which shares the memory of `x`. A view of a pending sum cannot be written into: that would complete the view alone."""
    view._writes = _writes(x)
    if x._spec.partial_mesh_dims:
        note_view(view, x)
    elif "_copy" in x.__dict__:
        _become_copied(view, x._copy)
    return view


def copied(view: ShardTensor, x: ShardTensor, gather: Gather | None, push: Push | None = None) -> ShardTensor:
    """`view`, which stands for a view of `x` in memory of its own. See `_Copy` for `gather` and `push`."""
    if torch.compiler.is_compiling():  # there are no writes in a traced graph
        return view
    source = ShardTensor(x._local_tensor, x._spec)  # outlives `x`, whose graph need not
    source._writes = _writes(x)
    if "_copy" in x.__dict__:
        _become_copied(source, x._copy)
    copy = _Copy(view, source, gather, push)
    if x._spec.partial_mesh_dims:
        note_view(view, x)
        copy.push = None
    return _become_copied(view, copy)


def _become_copied(view: ShardTensor, copy: _Copy) -> ShardTensor:
    view._copy = copy
    view.__class__ = CopiedView
    return view


def note_view(view: ShardTensor, x: ShardTensor) -> None:
    """Remember that `view` shows the summands of `x`, or of what `x` views."""
    views = x.__dict__.setdefault("_views", [])
    views[:] = [each for each in views if each() is not None]
    views.append(weakref.ref(view))
    view._views = views
    view._shows_summands = True


def _reaches(x: ShardTensor) -> bool:
    """Whether a write into `x` reaches all that it views."""
    here = x.__dict__
    if "_copy" in here:
        return x._copy.push is not None and _reaches(x._copy.source)
    return "_shows_summands" not in here


def check_writable(x: ShardTensor) -> None:
    """Raise before an in-place write into a view that cannot reach the tensor it views."""
    if not _reaches(x):
        raise MissingShardPatch(
            f"an in-place write into a view ({x._spec.describe()})",
            "the view had to be copied to be sharded, so the write would not reach the tensor it views",
            "write with an op that returns a new tensor, or into the tensor itself",
        )


def after_write(x: ShardTensor) -> None:
    """Count a write into `x`: a backward that saved the shard refuses, copied views take it. Carry it on to what `x` views."""
    _count(x.__dict__["_local_tensor"])
    here = x.__dict__
    if "_writes" in here:
        here["_writes"][0] += 1
    if "_copy" in here:
        x._copy.hand_on()


def replace_shard(x: ShardTensor, local: Tensor, spec: ShardTensorSpec) -> None:
    """Give `x`, a pending sum that is written into, another shard and layout.

    Raises MissingShardPatch if a view of `x` is alive: it would go on showing the summands.
    """
    if any(view() is not None for view in x.__dict__.get("_views", ())):
        raise MissingShardPatch(
            f"an in-place write into a pending sum ({x._spec.describe()}) of which a view exists",
            "the write completes the sum, and the view would go on showing its summands",
            "take the view after the write, or complete the sum first: x = x.redistribute(placements=...)",
        )
    x._local_tensor, x._spec = local, spec


def complete_in_place(x: ShardTensor) -> None:
    """Resolve the pending sums of `x` before it is written into. Communication: an all-reduce for each. Raises as `replace_shard`."""
    target = x._spec.gradient()
    if target is not x._spec:
        replace_shard(x, x._local_tensor, x._spec)  # refuses before it communicates
        replace_shard(x, redistribute_local(x._local_tensor, x._spec, target), target)

"""Blocks on their way between ranks of a ring, while this rank computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.counter import record

_c10d = torch.ops._c10d_functional


class Shift:
    """Tensors of one dtype under way to the rank `step` places further, and others coming from `step` places before.

    The message goes straight from its owner to where it is needed: the same bytes as passing it along the ring, less what a rank in
    between would have carried without using it. It is an all-to-all with one partner, which `torch.compile` can trace.
    """

    def __init__(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], step: int, group: dist.ProcessGroup) -> None:
        ranks, me = group.size(), group.rank()
        self._shapes = [tuple(shape) for shape in shapes]
        self._sizes = [math.prod(shape) for shape in shapes]
        sent, received = [0] * ranks, [0] * ranks
        buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sent[(me + step) % ranks] = buffer.numel()
        received[(me - step) % ranks] = sum(self._sizes)
        record("ring_shift", group, buffer.numel() * buffer.element_size())
        self._buffer = buffer
        self._coming = _c10d.all_to_all_single.default(buffer, received, sent, group.group_name)

    def wait(self) -> list[Tensor]:
        """What came, once it is here."""
        parts = _c10d.wait_tensor.default(self._coming).split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

"""Dropout of attention weights that is the same however queries, keys, heads and batch are split.

Whether a weight is kept is a hash of the seed and of the weight's global (batch, head, query, key) index, so no generator state and no
communication is involved. The mixer is the 32-bit one with multipliers 0x21f0aaad and 0x735a2d97 of C. Wellons' "hash-prospector"
(public domain): both fit 31 bits, so the products fit int64 and nothing overflows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """p: probability of dropping a weight. seed: a number, or an int64 tensor of one element.

    batch, head: the global index of the first local batch row and of the first local query head.
    """

    p: float
    seed: int | Tensor
    batch: int = 0
    head: int = 0

    def multipliers(self, shape: tuple[int, int], queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """[batch, heads, queries, keys]: 0 where a weight is dropped, `1 / (1 - p)` where it is kept.

        shape: local batch and query heads. queries, keys: global positions.
        """
        if self.p == 1.0:
            return torch.zeros(*shape, len(queries), len(keys), dtype=dtype, device=queries.device)
        seed = torch.as_tensor(self.seed, dtype=torch.int64, device=queries.device).reshape(())
        state = _mix(_mix(seed & _WORD) ^ ((seed >> 32) & _WORD))
        batch = torch.arange(self.batch, self.batch + shape[0], device=queries.device)
        heads = torch.arange(self.head, self.head + shape[1], device=queries.device)
        state = _mix(state ^ batch)[:, None]
        state = _mix(state ^ heads)[:, :, None]
        state = _mix(state ^ queries)[:, :, :, None]
        keep = _mix(state ^ keys) >= int(self.p * (_WORD + 1))
        return keep.to(dtype) / (1.0 - self.p)


def _mix(word: Tensor) -> Tensor:
    word = word ^ (word >> 16)
    word = (word * 0x21F0AAAD) & _WORD
    word = word ^ (word >> 15)
    word = (word * 0x735A2D97) & _WORD
    return word ^ (word >> 15)

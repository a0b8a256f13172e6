"""Work of the kernels of a transformer layer, and the rates that turn work into seconds.

Work is counted once per shape (and cached by the callers); rates are a handful of numbers per GPU type and software
profile.  Seconds are work divided by rate, so a layout is priced with a few multiplications.

Shapes are what one rank sees after tensor, context and expert sharding.  Matrix products are charged the floating point
operations of the full tiles they occupy (tile and wave quantisation), not the useful ones alone.
Sources: NVIDIA, "Matrix Multiplication Background" (tile and wave quantisation); FlashAttention-2, arXiv:2307.08691
(backward is 2.5 times forward).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import ceil
from operator import add
from typing import NamedTuple

# (rows, columns, share of the peak a kernel with this output tile reaches); larger tiles reuse operands more.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.52))
K_RAMP = 192.0  # elements of the inner dimension spent filling and draining the multiply pipeline
FLASH_BACKWARD = 2.5  # flash attention recomputes the scores in backward


class Work(NamedTuple):
    """Work of a set of kernels on one rank.

    ``matmul`` and ``grouped`` are tile-padded FLOPs of dense and of per-expert (grouped) products that may run in the
    low precision of the run; ``wide`` those that stay in bf16 (output head, router); ``attention`` useful FLOPs of
    fused attention. Bytes read and written: ``stream`` by elementwise kernels and norms, ``permute`` by expert token
    shuffles, ``quantise`` by casts to low precision, ``scan`` by state-space and delta-rule scans, ``accumulate`` by
    reading weights and adding their gradients to what earlier micro batches left. ``launches`` counts kernels
    that a CUDA graph can hold, ``eager`` those of the experts, whose shapes follow the routing.
    """

    matmul: float = 0.0
    grouped: float = 0.0
    wide: float = 0.0
    attention: float = 0.0
    stream: float = 0.0
    permute: float = 0.0
    quantise: float = 0.0
    scan: float = 0.0
    accumulate: float = 0.0
    launches: float = 0.0
    eager: float = 0.0

    def plus(self, other: Work, times: float = 1.0) -> Work:
        return Work(*(a + b * times for a, b in zip(self, other)))


def total(works: Iterable[Work]) -> Work:
    """Sum of works."""
    several = tuple(works)
    if not several:
        return Work()
    first = several[0]
    for work in several[1:]:
        first = Work._make(map(add, first, work))
    return first


@lru_cache(maxsize=1 << 16)
def matmul_utilisation(m: int, n: int, k: int, processors: int) -> float:
    """Share of the arithmetic of the occupied waves that an ``m x n x k`` product uses, at best over tile shapes."""
    best = 0.0
    for rows, columns, reach in TILES:
        tiles = ceil(m / rows) * ceil(n / columns)
        splits = max(1, min(processors // tiles, k // 1024)) if tiles < processors else 1
        waves = ceil(tiles * splits / processors)
        share = (m * n * splits) / (waves * processors * rows * columns) * reach
        best = max(best, share)
    misaligned = 0.5 if (n % 8 or k % 8) else 1.0  # tensor cores want 16-byte rows
    return best * misaligned * k / (k + K_RAMP)


def matmul_flops(m: int, n: int, k: int, processors: int) -> float:
    """FLOPs charged to one ``m x n x k`` product: ``2mnk`` over its utilisation."""
    if min(m, n, k) <= 0:
        return 0.0
    return 2.0 * m * n * k / matmul_utilisation(m, n, k, processors)


def linear_work(tokens: int, inputs: int, outputs: int, processors: int) -> tuple[float, float]:
    """Charged FLOPs (forward, backward) of a linear layer; backward is the input and the weight gradient."""
    forward = matmul_flops(tokens, outputs, inputs, processors)
    backward = matmul_flops(tokens, inputs, outputs, processors) + matmul_flops(inputs, outputs, tokens, processors)
    return forward, backward


def grouped_flops(tokens: int, inputs: int, outputs: int, groups: int, processors: int) -> tuple[float, float]:
    """Charged FLOPs (forward, backward) of ``groups`` equal products run as one kernel (experts of one rank).

    ``tokens`` counts all groups together.  Tiles of all groups share the waves, rows are padded per group.
    """
    if min(tokens, inputs, outputs, groups) <= 0:
        return 0.0, 0.0
    rows = max(1, tokens // groups)
    padded = ceil(rows / 128) * 128 if rows > 64 else 64
    forward = matmul_flops(padded * groups, outputs, inputs, processors)
    dgrad = matmul_flops(padded * groups, inputs, outputs, processors)
    wgrad = groups * 2.0 * inputs * outputs * rows * (1 + K_RAMP / rows)
    return forward, dgrad + wgrad

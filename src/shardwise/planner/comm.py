"""Communication time of the groups of a layout on the links they really land on.

Groups are laid out in the order tp, cp, ep, dp, pp (tensor parallel ranks adjacent).  A group of ``size`` ranks that are
``stride`` apart occupies some ranks of each fast domain (a node, or an NVL72 rack) and some domains.  Every GPU runs
the collective of its own group at the same time, so a GPU has its own share of the network cards and no more.

Volumes are those of ring collectives: all-gather and reduce-scatter move ``(n-1)/n`` of the full buffer, all-reduce
twice that, all-to-all ``(n-1)/n`` of the local buffer.  Hierarchical execution (inside the domain, then across) is what
NCCL does for large buffers.  Source: NCCL tests, PERFORMANCE.md; Thakur et al. 2005.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2


@dataclass(frozen=True, kw_only=True)
class Links:
    """Usable bandwidth (bytes/s per GPU, one direction) and start-up time (s) of the two tiers."""

    near: float
    far: float
    near_latency: float
    far_latency: float


@lru_cache(maxsize=1 << 14)
def placement(size: int, stride: int, domain: int) -> tuple[int, int]:
    """(ranks of the group inside one fast domain, number of domains the group spans)."""
    if size == 1:
        return 1, 1
    inside = max(1, min(size, domain // stride))
    while size % inside:
        inside -= 1
    return inside, size // inside


def gather_seconds(volume: float, size: int, stride: int, domain: int, links: Links) -> float:
    """All-gather or reduce-scatter of a buffer of ``volume`` bytes (full size) over the group."""
    if size == 1 or volume <= 0:
        return 0.0
    inside, across = placement(size, stride, domain)
    seconds = volume * (inside - 1) / inside / links.near + links.near_latency * (1 + log2(inside))
    if across > 1:
        seconds = max(seconds, volume * (across - 1) / across / (links.far * inside)) + links.far_latency * (1 + log2(across))
    return seconds


def reduce_seconds(volume: float, size: int, stride: int, domain: int, links: Links) -> float:
    """All-reduce of ``volume`` bytes: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(volume, size, stride, domain, links)


def exchange_seconds(volume: float, size: int, stride: int, domain: int, links: Links, *, reached: float | None = None) -> float:
    """All-to-all of ``volume`` bytes per rank, evenly over the group.

    ``reached`` is the number of domains a token's copies go to when copies to one domain are sent once and fanned out
    inside it (DeepEP, HybridEP), relative to the number of copies: traffic across domains shrinks by that factor.
    """
    if size == 1 or volume <= 0:
        return 0.0
    inside, across = placement(size, stride, domain)
    near = volume * (inside - 1) / size / links.near + links.near_latency * (1 + log2(size))
    if across == 1:
        return near
    far = volume * (size - inside) / size * (1.0 if reached is None else reached) / links.far + links.far_latency * (1 + log2(across))
    if reached is not None:
        near = volume * (size - 1) / size / links.near + links.near_latency * (1 + log2(size))
    return max(near, far)


def send_seconds(volume: float, stride: int, domain: int, links: Links) -> float:
    """Point-to-point message between neighbours of a group whose ranks are ``stride`` apart."""
    if volume <= 0:
        return 0.0
    if stride < domain:
        return volume / links.near + links.near_latency
    return volume / links.far + links.far_latency

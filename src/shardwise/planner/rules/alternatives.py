"""Legal values near an illegal one, computed from what the value must divide or be divided by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import gcd, isqrt, lcm

from shardwise.spec.blocks import Attention, CompressedAttention, DeltaNet, Mamba2, Mla
from shardwise.spec.layout import CpComm
from shardwise.spec.model import ModelSpec

MOST_TP = 4096  # beyond any domain of GPUs
MOST_DIVISOR = 10**6


def divisors(number: int) -> list[int]:
    """Divisors of `number`; of numbers beyond 10**12 those up to `MOST_DIVISOR` and what they leave."""
    small = [d for d in range(1, min(isqrt(number), MOST_DIVISOR) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(values: Iterable[int], to: int, count: int = 4) -> list[int]:
    """The `count` values closest to `to`, in ascending order."""
    return sorted(sorted(values, key=lambda value: (abs(value - to), value))[:count])


def closest(legal: Callable[[int], bool], low: int, high: int, to: int, count: int) -> list[int]:
    """The `count` legal values of `low` to `high` closest to `to`, in ascending order, without asking about all others."""
    start, found = min(max(to, low), high), []
    for distance in range(high - low + 1):
        found += [value for value in sorted({start - distance, start + distance}) if low <= value <= high and legal(value)]
        if len(found) >= count:
            break
    return sorted(found[:count])


def listed(name: str, values: Iterable[int]) -> str:
    """`tp=2, 4 or 8`."""
    words = [str(value) for value in values]
    if not words:
        return ""
    return f"{name}=" + (words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}")


def multiples(step: int, near: int) -> list[int]:
    """The multiples of `step` just below (if positive) and just above `near`."""
    below = near // step * step
    return [value for value in (below, below + step) if value > 0]


def splits_heads(heads: int, kv_heads: int, tp: int) -> bool:
    """Query heads split over tp; key heads split over it or are replicated a whole number of times."""
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def legal_tp(model: ModelSpec, most: int = 64, replicate_kv: bool = True) -> list[int]:
    """Tensor parallel sizes that split every head, state, group and feed-forward width of the model."""

    def legal(tp: int) -> bool:
        for layer in model.kinds:
            mixer, mlp = layer.mixer, layer.mlp
            if isinstance(mixer, (Attention, Mla)):
                kv = mixer.kv_heads
                if not splits_heads(mixer.heads, kv, tp) or (not replicate_kv and kv % tp):
                    return False
            elif isinstance(mixer, Mamba2):
                if gcd(mixer.heads, mixer.groups) % tp:
                    return False
            elif isinstance(mixer, DeltaNet) and gcd(mixer.key_heads, mixer.value_heads) % tp:
                return False
            width = getattr(mlp, "shared_ffn", None) if layer.is_moe else getattr(mlp, "ffn", None)
            if width and width % tp:
                return False
        return True

    return [tp for tp in range(1, min(most, MOST_TP) + 1) if legal(tp)]


def legal_pp(layers: int, vpp: int, account: int, most: int) -> list[int]:
    """Pipeline sizes that cut the layers (and what counts as a layer) evenly with this many virtual stages."""
    return [pp for pp in range(1, min(layers, most) + 1) if (layers + account) % (pp * vpp) == 0 and (pp > 1 or vpp == 1)]


def sequence_step(tp: int, cp: int, sp: bool) -> int:
    """A sequence length must be a multiple of this: 2 * cp chunks for the balanced split, tp shards of each rank's tokens with SP."""
    step = 2 * cp if cp > 1 else 1
    return lcm(step, cp * tp) if sp else step


def natural_cp_comm(model: ModelSpec) -> CpComm:
    """Context parallel communication every attention block of the model allows: sinks need the exchange, indexers all keys."""
    if any(isinstance(each, (Mla, CompressedAttention)) and each.indexer for each in model.attentions):
        return "all_gather"
    if any(isinstance(each, Attention) and each.sinks for each in model.attentions):
        return "a2a"
    if any(isinstance(each, Attention) and each.window for each in model.attentions):
        return "all_gather"
    return "p2p"

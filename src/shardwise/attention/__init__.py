"""Attention over a split sequence: plain tensors in, plain tensors out."""

from shardwise.attention.ring import alibi, ring_attention
from shardwise.attention.ulysses import ring_ulysses_attention, ulysses_attention

__all__ = ["alibi", "ring_attention", "ring_ulysses_attention", "ulysses_attention"]

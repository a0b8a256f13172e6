"""Attention over a split sequence: plain tensors in, plain tensors out."""

from shardwise.attention.order import gather_rows, local_rows
from shardwise.attention.ring import alibi, ring_attention
from shardwise.attention.ulysses import ring_ulysses_attention, ulysses_attention

__all__ = ["alibi", "gather_rows", "local_rows", "ring_attention", "ring_ulysses_attention", "ulysses_attention"]

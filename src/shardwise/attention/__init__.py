"""Attention over a split sequence: plain tensors in, plain tensors out."""

from shardwise.attention.ring import alibi, ring_attention

__all__ = ["alibi", "ring_attention"]

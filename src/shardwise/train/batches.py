"""Micro batches of a step, as one rank of a layout sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.parallel.attention import SequenceSplit, split_order
from shardwise.parallel.pipeline import MicroBatch
from shardwise.parallel.token_loss import IGNORED
from shardwise.parallel.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Whole sequences. tokens, labels: [B, S], labels already shifted, `IGNORED` where no loss is taken. positions: [B, S], from 0 in
    every document. segments: [B, S], ids of documents that must not see each other, or None."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    segments: Tensor | None = None

    @property
    def size(self) -> int:
        return self.tokens.shape[0]

    def rows(self, start: int, stop: int) -> Samples:
        segments = None if self.segments is None else self.segments[start:stop]
        return Samples(
            tokens=self.tokens[start:stop], labels=self.labels[start:stop], positions=self.positions[start:stop], segments=segments
        )


def simple_samples(tokens: Tensor) -> Samples:
    """Samples of [B, S + 1] tokens without document borders."""
    length = tokens.shape[1] - 1
    positions = torch.arange(length, device=tokens.device).expand(tokens.shape[0], length)
    return Samples(tokens=tokens[:, :-1], labels=tokens[:, 1:].clone(), positions=positions)


def packed_samples(tokens: Tensor, end: int) -> Samples:
    """Samples of [B, S + 1] tokens in which each document ends with the token `end`: positions restart and attention stays inside."""
    plain = simple_samples(tokens)
    ended = torch.zeros_like(plain.tokens)
    ended[:, 1:] = (plain.tokens[:, :-1] == end).to(ended.dtype)
    segments = ended.cumsum(1)
    starts = torch.where(ended.bool(), plain.positions, 0).cummax(1).values
    return Samples(tokens=plain.tokens, labels=plain.labels, positions=plain.positions - starts, segments=segments)


def micro_batches(samples: Samples, topology: Topology, size: int) -> list[MicroBatch]:
    """The samples of this replica, cut into micro batches of `size` and to the rows of this context parallel rank."""
    samples = _at_least(samples, 2 * topology.layout.cp if topology.layout.cp > 1 else 1)
    order = split_order(topology, samples.tokens.shape[1])
    spans = order[topology["cp"].rank]
    whole = len(order) == 1

    def here(x: Tensor) -> Tensor:
        return x if whole else torch.cat([x[:, start:stop] for start, stop in spans], 1)

    result = []
    for start in range(0, samples.size, size):
        rows = samples.rows(start, start + size)
        split = SequenceSplit(topology=topology, order=order, segments=None if rows.segments is None else here(rows.segments))
        result.append(MicroBatch(tokens=here(rows.tokens), labels=here(rows.labels), positions=here(rows.positions), split=split))
    return result


def _at_least(samples: Samples, length: int) -> Samples:
    """Samples of at least `length` rows, so that every rank has one: what is added comes last, unseen by what is there, without a loss."""
    missing = length - samples.tokens.shape[1]
    if missing <= 0:
        return samples
    segments = samples.segments
    return Samples(
        tokens=F.pad(samples.tokens, (0, missing)),
        labels=F.pad(samples.labels, (0, missing), value=IGNORED),
        positions=F.pad(samples.positions, (0, missing)),
        segments=None if segments is None else F.pad(segments, (0, missing), value=-1),
    )


def counted_tokens(batches: Sequence[MicroBatch]) -> int:
    """Tokens with a loss on this rank's rows."""
    return sum(int((batch.labels != IGNORED).sum()) for batch in batches)

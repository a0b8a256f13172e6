"""Who owns which rows, and who needs which rows: integer arithmetic over half-open spans.

A span is `(start, stop)`, the rows `start, start + 1, ..., stop - 1` of one dimension of a global tensor. Spans may reach outside
`[0, size)`: a convolution window at the border reads rows that nobody owns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[int, int]
Spans = tuple[Span, ...]


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` shards of `size` rows, as `torch.chunk` cuts them, empty shards at the end included.

    10 rows in 4 parts are 3, 3, 3, 1; 9 are 3, 3, 3, 0; 5 are 2, 2, 1, 0.
    """
    if size < 0 or parts < 1:
        raise ValueError(f"cannot cut {size} rows into {parts} parts: give a size of at least 0 and at least 1 part")
    step = -(-size // parts)
    return tuple(max(0, min(step, size - step * part)) for part in range(parts))


def spans_of(sizes: Iterable[int]) -> Spans:
    """The spans of consecutive shards with these sizes: 3, 0, 2 become (0, 3), (3, 3), (3, 5)."""
    spans = []
    start = 0
    for size in sizes:
        spans.append((start, start + size))
        start += size
    return tuple(spans)


def intersect(a: Span, b: Span) -> Span:
    """The rows that both spans have; an empty span `(start, start)` if there are none."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


@dataclass(frozen=True, kw_only=True)
class Window:
    """A sliding window along one dimension: convolution, pooling, unfold.

    Output row `o` reads the `size` input rows `o * stride - pad_before + i * dilation` for `i` in `range(size)`.
    """

    size: int
    stride: int = 1
    dilation: int = 1
    pad_before: int = 0
    pad_after: int = 0

    def __post_init__(self) -> None:
        if min(self.size, self.stride, self.dilation) < 1:
            raise ValueError(f"a window needs size, stride and dilation of at least 1, got {self}")

    @property
    def reach(self) -> int:
        """Rows from the first to the last row of the window, both included."""
        return self.dilation * (self.size - 1) + 1

    def output_size(self, n: int) -> int:
        """Rows of the output for `n` rows of input; 0 if the window does not fit into the padded input."""
        return max(0, (n + self.pad_before + self.pad_after - self.reach) // self.stride + 1)

    def input_span(self, output_span: Span) -> Span:
        """The input rows that the output rows read, borders included: the span may begin below 0 and end beyond the input."""
        start = output_span[0] * self.stride - self.pad_before
        if output_span[1] <= output_span[0]:
            return start, start
        return start, (output_span[1] - 1) * self.stride - self.pad_before + self.reach

    def output_spans(self, owned_sizes: Sequence[int]) -> Spans:
        """Which rank makes which output rows, when the ranks own consecutive input shards of these sizes.

        Output `o` belongs to the rank that owns input row `o * stride + (reach - 1 - pad_before - pad_after) // 2`, clamped to the
        input: about the middle of its window, so that both neighbours lend rows. With stride 1 and an output as long as the
        input ("same", causal or not) the output has exactly the shard sizes of the input.
        """
        n = sum(owned_sizes)
        outputs = self.output_size(n)
        shift = (self.reach - 1 - self.pad_before - self.pad_after) // 2

        def first_output(row: int) -> int:
            if row <= 0:
                return 0
            if row >= n:
                return outputs
            return min(outputs, max(0, -((shift - row) // self.stride)))

        bounds = [first_output(start) for start, _ in spans_of(owned_sizes)]
        return tuple(zip(bounds, [*bounds[1:], outputs], strict=True))


def as_spans(wanted: Span | Spans) -> Spans:
    """One span, or several, as a tuple of spans."""
    if wanted and isinstance(wanted[0], int):
        return (wanted,)
    return wanted


def transfers(owned: Sequence[Span], wanted: Sequence[Span | Spans]) -> dict[tuple[int, int], Spans]:
    """What travels when rank r owns the rows `owned[r]` and wants the rows `wanted[r]`.

    Returns for every pair (source, destination) with rows in common, the pair of a rank with itself included, those rows as spans
    in the order in which the destination wants them. Rows that nobody owns appear nowhere.
    """
    spans, ranks = _sorted_owners(owned)
    table: dict[tuple[int, int], list[Span]] = {}
    for destination, pieces in enumerate(wanted):
        for piece in as_spans(pieces):
            for source, rows in _owners_of(piece, spans, ranks):
                table.setdefault((source, destination), []).append(rows)
    return {pair: tuple(rows) for pair, rows in table.items()}


def segments(owned: Sequence[Span], wanted: Span | Spans) -> tuple[tuple[int | None, Span], ...]:
    """The wanted rows in order, cut where the owner changes: `(owner, span)`, with owner None for rows that nobody owns."""
    spans, ranks = _sorted_owners(owned)
    result: list[tuple[int | None, Span]] = []
    for start, stop in as_spans(wanted):
        at = start
        for rank, rows in _owners_of((start, stop), spans, ranks):
            if rows[0] > at:
                result.append((None, (at, rows[0])))
            result.append((rank, rows))
            at = rows[1]
        if stop > at:
            result.append((None, (at, stop)))
    return tuple(result)


def _sorted_owners(owned: Sequence[Span]) -> tuple[list[Span], list[int]]:
    ranks = sorted((rank for rank, span in enumerate(owned) if span[1] > span[0]), key=lambda rank: owned[rank])
    spans = [owned[rank] for rank in ranks]
    for before, after in pairwise(spans):
        if after[0] < before[1]:
            raise ValueError(
                f"rows {after[0]}:{min(before[1], after[1])} have two owners in {tuple(owned)}: every row may have one owner at most"
            )
    return spans, ranks


def _owners_of(piece: Span, spans: list[Span], ranks: list[int]) -> Iterable[tuple[int, Span]]:
    at = max(0, bisect_right(spans, (piece[0], piece[0])) - 1)
    while at < len(spans) and spans[at][0] < piece[1]:
        rows = intersect(spans[at], piece)
        if rows[1] > rows[0]:
            yield ranks[at], rows
        at += 1

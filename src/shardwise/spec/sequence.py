"""The order of tokens over ranks, and the step table of ring attention: which rank works on whose keys at which step.

Positions are global token numbers. A rank's rows are the positions of its spans, in the order of the spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shardwise.spec.spans import Span, Spans, spans_of

TileKind = Literal["full", "causal", "masked"]
BlockKind = Literal["full", "causal", "masked", "skip"]


# --- order of tokens over ranks ---------------------------------------------------------------------------------------


def contiguous_order(sizes: Iterable[int]) -> tuple[Spans, ...]:
    """Rank r holds the next `sizes[r]` positions: the order of a plain shard."""
    return tuple((span,) for span in spans_of(sizes))


def even_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` consecutive parts of `size` that differ by at most one: 10 in 4 are 2, 3, 2, 3."""
    return tuple(size * (part + 1) // parts - size * part // parts for part in range(parts))


def zigzag_order(documents: int | Sequence[int], ranks: int) -> tuple[Spans, ...]:
    """The balanced order for causal attention: a document is cut into `2 * ranks` pieces, rank r holds pieces r and `2 * ranks - 1 - r`.

    `documents` is the sequence length, or the lengths of the documents packed into the sequence: each one is cut by itself, so that
    every rank attends about as many (query, key) pairs in each. Rows that do not divide go one each to a rank after the other, on from
    one document to the next: pieces of a document differ by at most one row, and so do the ranks. A rank's spans ascend.
    """
    if ranks < 1:
        raise ValueError(f"zigzag order over {ranks} ranks: give at least 1")
    lengths = (documents,) if isinstance(documents, int) else tuple(documents)
    order: list[list[Span]] = [[] for _ in range(ranks)]
    parts = 2 * ranks
    turn = 0
    for first, stop in spans_of(lengths):
        each, left = divmod(stop - first, parts)
        sizes = [each] * parts
        for more in range(left):
            rank = (turn + more) % ranks
            sizes[rank if more < ranks else parts - 1 - rank] += 1
        turn += left
        pieces = spans_of(sizes)
        for rank in range(ranks):
            order[rank] += [(first + a, first + b) for a, b in (pieces[rank], pieces[parts - 1 - rank])]
    return tuple(_joined(spans) for spans in order)


def _joined(spans: Iterable[Span]) -> Spans:
    """The same rows in the same order, without empty spans and with neighbours made one span."""
    result: list[Span] = []
    for start, stop in spans:
        if start == stop:
            continue
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result) or ((0, 0),)


def rows_in(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def order_indices(order: Sequence[Spans]) -> tuple[int, ...]:
    """The global position of every row of all ranks' rows laid end to end: `full[order_indices(order)]` is the gathered sequence."""
    return tuple(position for spans in order for start, stop in spans for position in range(start, stop))


# --- which pairs attend -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Band:
    """Query i sees key j if `i - left <= j <= i + right`; None is no bound. Causal attention is `right=0`."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        if (self.left or 0) < 0 or (self.right or 0) < 0:
            raise ValueError(f"an attention window reaches back and ahead by 0 or more positions, got ({self.left}, {self.right})")

    @classmethod
    def of(cls, *, causal: bool = False, window: tuple[int | None, int | None] | None = None) -> Band:
        """The band of `is_causal` (aligned to the first position, as in `scaled_dot_product_attention`) and a sliding window."""
        left, right = window or (None, None)
        return cls(left=left, right=0 if causal else right)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A rectangle of local query rows and local key rows that one kernel call handles.

    kind: `"full"` (every pair attends), `"causal"` (a square at equal positions: its lower triangle attends) or `"masked"` (the band
    cuts through it: a mask from positions is needed).
    """

    queries: Span
    keys: Span
    kind: TileKind

    @property
    def pairs(self) -> int:
        """Pairs of query and key that are computed; a causal kernel computes the lower triangle."""
        rows, columns = self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]
        return rows * (rows + 1) // 2 if self.kind == "causal" else rows * columns


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one rank does with the keys of one rank: its tiles, and the local key rows (one span of them) that it needs for that."""

    tiles: tuple[Tile, ...]
    kind: BlockKind

    @property
    def keys(self) -> Span:
        if not self.tiles:
            return 0, 0
        return min(tile.keys[0] for tile in self.tiles), max(tile.keys[1] for tile in self.tiles)

    @property
    def pairs(self) -> int:
        return sum(tile.pairs for tile in self.tiles)


@lru_cache(maxsize=4096)
def block(queries: Spans, keys: Spans, band: Band) -> Block:
    """The block of the rank that holds the positions `queries` against the keys of the rank that holds `keys`."""
    tiles: list[Tile] = []
    at_query = 0
    for query in queries:
        at_key = 0
        for key in keys:
            for rows, columns, kind in _rectangles(query, key, band):
                tiles.append(Tile(queries=_moved(rows, at_query - query[0]), keys=_moved(columns, at_key - key[0]), kind=kind))
            at_key += key[1] - key[0]
        at_query += query[1] - query[0]
    merged = _merged(tiles)
    kinds = {tile.kind for tile in merged}
    if not merged:
        kind_of_block: BlockKind = "skip"
    elif "masked" in kinds:
        kind_of_block = "masked"
    elif "causal" in kinds:
        kind_of_block = "causal"
    else:
        kind_of_block = "full"
    return Block(tiles=merged, kind=kind_of_block)


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by


def _rectangles(query: Span, key: Span, band: Band) -> Iterator[tuple[Span, Span, TileKind]]:
    """The pairs of two spans that attend, as rectangles of positions."""
    left, right = band.left, band.right
    first_key = key[0] if left is None else max(key[0], query[0] - left)
    stop_key = key[1] if right is None else min(key[1], query[1] + right)
    first_row = query[0] if right is None else max(query[0], first_key - right)
    stop_row = query[1] if left is None else min(query[1], stop_key + left)
    if first_key >= stop_key or first_row >= stop_row:
        return
    rows, columns = (first_row, stop_row), (first_key, stop_key)
    if (right is None or stop_key - 1 <= first_row + right) and (left is None or first_key >= stop_row - 1 - left):
        yield rows, columns, "full"
    elif left is None and right == 0:
        # keys before the first row, then the square on the diagonal, then the rows after the last key
        if first_key < first_row:
            yield rows, (first_key, first_row), "full"
        yield (first_row, stop_key), (first_row, stop_key), "causal"
        if stop_key < stop_row:
            yield (stop_key, stop_row), (first_row, stop_key), "full"
    else:
        reach = None if left is None or right is None else left + right + 1
        height = stop_row - first_row if reach is None else max(reach, 128)
        if height >= stop_row - first_row:
            yield rows, columns, "masked"
            return
        for start in range(first_row, stop_row, height):
            yield from _rectangles((start, min(start + height, stop_row)), columns, band)


def _merged(tiles: list[Tile]) -> tuple[Tile, ...]:
    """Neighbouring full tiles with the same rows made one, then those with the same keys: fewer kernel calls for the same pairs."""
    wide: list[Tile] = []
    for tile in tiles:
        last = wide[-1] if wide else None
        if last and last.kind == tile.kind == "full" and last.queries == tile.queries and last.keys[1] == tile.keys[0]:
            wide[-1] = Tile(queries=last.queries, keys=(last.keys[0], tile.keys[1]), kind="full")
        else:
            wide.append(tile)
    tall: list[Tile] = []
    for tile in wide:
        last = tall[-1] if tall else None
        if last and last.kind == tile.kind == "full" and last.keys == tile.keys and last.queries[1] == tile.queries[0]:
            tall[-1] = Tile(queries=(last.queries[0], tile.queries[1]), keys=last.keys, kind="full")
        else:
            tall.append(tile)
    return tuple(tall)


def key_owner(rank: int, step: int, ranks: int) -> int:
    """The rank whose keys `rank` works on at this ring step: its own at step 0, then those of the ranks before it."""
    return (rank - step) % ranks


def attention_step_table(queries: Sequence[Spans], keys: Sequence[Spans], band: Band) -> tuple[tuple[Block, ...], ...]:
    """`table[step][rank]`: the block that the rank computes at that ring step, with the keys of `key_owner(rank, step, ranks)`."""
    ranks = len(queries)
    return tuple(tuple(block(queries[rank], keys[key_owner(rank, step, ranks)], band) for rank in range(ranks)) for step in range(ranks))


@dataclass(frozen=True, kw_only=True)
class RingStep:
    """What one rank does at one ring step.

    offset: the keys are those of the rank `offset` places before; at 0 nothing travels. rows: which of that rank's key rows are used,
    keys: their positions. block: the work, its key rows counted from the first of them. send: the local key rows that the rank `offset`
    places further uses.
    """

    offset: int
    rows: Span
    keys: Spans
    block: Block
    send: Span


@lru_cache(maxsize=4096)
def ring_steps(queries: tuple[Spans, ...], keys: tuple[Spans, ...], band: Band, rank: int) -> tuple[RingStep, ...]:
    """One rank's column of the step table, without the steps at which no rank has work. Every rank gets the same offsets."""
    steps = []
    for offset, row in enumerate(attention_step_table(queries, keys, band)):
        if offset and not any(block.tiles for block in row):
            continue
        ranks = len(row)
        work = row[rank]
        first = work.keys[0]
        tiles = tuple(Tile(queries=tile.queries, keys=_moved(tile.keys, -first), kind=tile.kind) for tile in work.tiles)
        steps.append(
            RingStep(
                offset=offset,
                rows=work.keys,
                keys=positions_at(keys[key_owner(rank, offset, ranks)], work.keys),
                block=Block(tiles=tiles, kind=work.kind),
                send=row[(rank + offset) % ranks].keys,
            )
        )
    return tuple(steps)


def positions_at(spans: Spans, rows: Span) -> Spans:
    """The positions of the local rows `rows` of a rank that holds `spans`."""
    result = []
    at = 0
    for start, stop in spans:
        first, last = max(rows[0] - at, 0), min(rows[1] - at, stop - start)
        if first < last:
            result.append((start + first, start + last))
        at += stop - start
    return tuple(result)

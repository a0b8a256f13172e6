"""Integer arithmetic of ops that read a window of rows for each output row: which rank makes which outputs, and what they read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from shardwise.spec.spans import Span, Spans, Window, as_spans, spans_of


def output_spans(sizes: Sequence[int], outputs: int, row_of: Callable[[int], int]) -> Spans:
    """Which rank makes which of `outputs` rows, when the ranks own consecutive input shards of these sizes.

    Output `o` belongs to the owner of input row `row_of(o)`, which never falls as `o` grows; rows before the first and after the
    last belong to the first and last rank that own any.
    """
    n = sum(sizes)

    def first_output(start: int) -> int:
        if start <= 0:
            return 0
        return outputs if start >= n else bisect_left(range(outputs), start, key=row_of)

    borders = [first_output(start) for start, _ in spans_of(sizes)]
    return tuple(zip(borders, [*borders[1:], outputs], strict=True))


@lru_cache(maxsize=4096)
def anchor(window: Window, sizes: tuple[int, ...], outputs: int) -> int:
    """The number `a` such that output `o` is best made by the owner of input row `o * stride + a`: about the middle of its window.

    With padding that keeps the size the outputs are then split as the input is. Without padding the rows at one end may have been
    padded before (a causal convolution: all of them at the start), so the row of the window that gives the most even split is taken.
    """
    middle = (window.reach - 1 - window.pad_before - window.pad_after) // 2
    if window.pad_before or window.pad_after:
        return middle

    def longest(a: int) -> int:
        return max(stop - start for start, stop in output_spans(sizes, outputs, lambda o: o * window.stride + a))

    return min(sorted(range(window.reach), key=lambda a: abs(a - middle)), key=longest)


def split_border(reads: Span | Spans, size: int) -> tuple[int, Spans, int]:
    """What is read of a dim of `size` rows: rows before the tensor, spans, rows after it. Rows beyond it between spans stay spans."""
    spans = list(as_spans(reads))
    before = after = 0
    while spans and spans[0][0] < 0:
        start, stop = spans.pop(0)
        before += min(stop, 0) - start
        if stop > 0:
            spans.insert(0, (0, stop))
    while spans and spans[-1][1] > size:
        start, stop = spans.pop()
        after += stop - max(start, size)
        if start < size:
            spans.append((start, size))
    return before, tuple(spans), after


def aligned_sizes(sizes: Sequence[int], unit: int) -> tuple[int, ...]:
    """Shard sizes near `sizes`, all borders multiples of `unit` (which divides their sum): 5, 4, 3 by 2 become 6, 4, 2."""
    total = sum(sizes)
    if total % unit:
        raise ValueError(f"{total} rows cannot be cut into pieces of {unit}")
    borders = [0, *(min(total, (row + unit // 2) // unit * unit) for row in accumulate(sizes))]
    return tuple(stop - start for start, stop in pairwise(borders))


def runs(rows: Iterable[int]) -> Spans:
    """The set of these rows as ascending spans: 4, 2, 3, 7, 3 become (2, 5), (7, 8)."""
    result: list[Span] = []
    for row in sorted(set(rows)):
        if result and result[-1][1] == row:
            result[-1] = (result[-1][0], row + 1)
        else:
            result.append((row, row + 1))
    return tuple(result)


def transposed_span(output_span: Span, *, size: int, stride: int, dilation: int, pad: int) -> Span:
    """The input rows that reach these output rows of a transposed window: input `i` adds to outputs `i * stride - pad + j * dilation`
    for `j` in `range(size)`. The span may begin below 0 and end beyond the input."""
    start, stop = output_span
    if stop <= start:
        return 0, 0
    reach = dilation * (size - 1)
    return -((reach - start - pad) // stride), (stop - 1 + pad) // stride + 1


@lru_cache(maxsize=4096)
def window_reads(window: Window, owned: Span, makes: Span, size: int, repeat: bool = False) -> Span | Spans:
    """The input rows from the first to the last that outputs `makes` read, for the owner of rows `owned`.

    Rows of others that lie between but that no window reads (dilation, strides longer than the window) are replaced by rows beyond
    the tensor of `size` rows, which nobody owns and nobody sends. With `repeat`, rows before and after the tensor are replaced by
    the first and last row of the same window that exist.
    """
    start, stop = window.input_span(makes)
    dense = window.dilation == 1 and window.stride <= window.reach
    if stop <= start or (dense and not (repeat and (start < 0 or stop > size))):
        return start, stop

    def placed(row: int) -> Span:
        places = (row + window.pad_before - j * window.dilation for j in range(window.size))
        if not any(place % window.stride == 0 and makes[0] <= place // window.stride < makes[1] for place in places):
            row = row if not 0 <= row < size else size + row - start
        elif repeat and not 0 <= row < size:
            row = nearest_inside(row, size, window.dilation)
        return row, row + 1

    mine = min(max(owned[0], start), stop), min(max(owned[1], start), stop)
    spans: list[Span] = []
    for span in (*map(placed, range(start, mine[0])), mine, *map(placed, range(mine[1], stop))):
        if spans and spans[-1][1] == span[0]:
            spans[-1] = (spans[-1][0], span[1])
        elif span[0] < span[1]:
            spans.append(span)
    return spans[0] if len(spans) == 1 else tuple(spans)


def nearest_inside(row: int, size: int, step: int) -> int:
    """The row of `[0, size)` nearest to `row` at a distance that is a multiple of `step`; `row` itself if there is none."""
    inside = row % step if row < 0 else size - 1 - (size - 1 - row) % step
    return inside if 0 <= inside < size else row


def has_empty_window(window: Window, size: int, outputs: int) -> bool:
    """Whether some output reads no row of `[0, size)` at all: its window steps over a tensor shorter than the dilation."""
    starts = (o * window.stride - window.pad_before for o in range(outputs))
    last = window.dilation * (window.size - 1)
    return any(start < 0 and start % window.dilation >= min(size, start + last + 1) for start in starts)

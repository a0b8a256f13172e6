"""Spans: integer arithmetic, held against the plain definition row by row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.spans import Window, as_spans, chunk_sizes, intersect, segments, spans_of, transfers

sizes = st.lists(st.integers(0, 9), min_size=1, max_size=5)
windows = st.builds(
    Window,
    size=st.integers(1, 6),
    stride=st.integers(1, 5),
    dilation=st.integers(1, 3),
    pad_before=st.integers(0, 6),
    pad_after=st.integers(0, 6),
)
span = st.tuples(st.integers(-6, 30), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@pytest.mark.parametrize(
    ("size", "parts", "expected"),
    [
        (10, 4, (3, 3, 3, 1)),
        (9, 4, (3, 3, 3, 0)),
        (5, 4, (2, 2, 1, 0)),
        (0, 3, (0, 0, 0)),
        (8, 4, (2, 2, 2, 2)),
        (1, 1, (1,)),
        (2, 4, (1, 1, 0, 0)),
    ],
)
def test_chunk_sizes_are_those_of_torch_chunk(size, parts, expected):
    assert chunk_sizes(size, parts) == expected


@given(st.integers(1, 200), st.integers(1, 12))
def test_chunk_sizes_equal_torch_chunk_for_every_size(size, parts):
    cut = tuple(len(chunk) for chunk in torch.arange(size).chunk(parts))
    assert chunk_sizes(size, parts) == cut + (0,) * (parts - len(cut))


def test_chunk_sizes_refuses_nonsense():
    with pytest.raises(ValueError, match="10 rows into 0 parts"):
        chunk_sizes(10, 0)


def test_spans_of_and_intersect():
    assert spans_of((3, 0, 2)) == ((0, 3), (3, 3), (3, 5))
    assert intersect((0, 5), (3, 9)) == (3, 5)
    assert intersect((0, 2), (5, 9)) == (5, 5)


@given(windows, st.integers(0, 40))
def test_window_output_size_counts_the_positions(window, n):
    padded = n + window.pad_before + window.pad_after
    positions = [start for start in range(0, padded, window.stride) if start + window.dilation * (window.size - 1) < padded]
    assert window.output_size(n) == len(positions)


@given(windows, span)
def test_window_input_span_is_what_the_outputs_read(window, outputs):
    rows = {o * window.stride - window.pad_before + i * window.dilation for o in range(*outputs) for i in range(window.size)}
    start, stop = window.input_span(outputs)
    assert (stop - start == 0) if not rows else ((start, stop) == (min(rows), max(rows) + 1))


@given(windows, sizes)
def test_every_output_has_one_owner_in_order(window, owned):
    spans = window.output_spans(owned)
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(window.output_size(sum(owned))))


@given(sizes, st.integers(1, 7), st.integers(1, 3), st.integers(0, 18))
def test_stride_one_same_keeps_the_sizes(owned, size, dilation, before):
    total = dilation * (size - 1)
    window = Window(size=size, dilation=dilation, pad_before=min(before, total), pad_after=total - min(before, total))
    assert [stop - start for start, stop in window.output_spans(owned)] == list(owned)


@given(windows, sizes)
def test_halos_are_half_a_window_on_either_side(window, owned):
    before = max(0, (window.reach - 1 + window.pad_before - window.pad_after) // 2)
    after = max(0, window.reach - 1 - (window.reach - 1 + window.pad_before - window.pad_after) // 2)
    for rows, outputs in zip(spans_of(owned), window.output_spans(owned)):
        start, stop = intersect(window.input_span(outputs), (0, sum(owned)))
        if stop > start:
            assert rows[0] - start <= before
            assert stop - rows[1] <= after


@pytest.mark.parametrize(
    ("window", "owned", "expected"),
    [
        (Window(size=3, pad_before=1, pad_after=1), (5, 3), ((0, 5), (5, 8))),
        (Window(size=3), (5, 5), ((0, 4), (4, 8))),
        (Window(size=2, stride=2), (5, 3), ((0, 3), (3, 4))),
        (Window(size=4, stride=4), (5, 6, 5), ((0, 1), (1, 3), (3, 4))),
        (Window(size=3, stride=2, pad_before=1, pad_after=1), (5, 3, 0, 4), ((0, 3), (3, 4), (4, 4), (4, 6))),
        (Window(size=9), (2, 1), ((0, 0), (0, 0))),
    ],
)
def test_output_spans_by_hand(window, owned, expected):
    assert window.output_spans(owned) == expected


def test_window_refuses_stride_zero():
    with pytest.raises(ValueError, match="at least 1"):
        Window(size=3, stride=0)


@st.composite
def owned_and_wanted(draw):
    shards = draw(sizes)
    order = draw(st.permutations(range(len(shards))))
    spans = spans_of(shards)
    owned = tuple(spans[place] for place in order)
    wanted = tuple(draw(st.one_of(span, st.lists(span, max_size=3).map(tuple))) for _ in owned)
    return owned, wanted


@given(owned_and_wanted())
def test_transfers_move_exactly_the_wanted_rows(case):
    owned, wanted = case
    table = transfers(owned, wanted)
    assert all(stop > start for pieces in table.values() for start, stop in pieces)
    for destination, pieces in enumerate(wanted):
        for source, rows in enumerate(owned):
            expected = [row for start, stop in as_spans(pieces) for row in range(start, stop) if rows[0] <= row < rows[1]]
            assert [row for start, stop in table.get((source, destination), ()) for row in range(start, stop)] == expected


@given(owned_and_wanted())
def test_segments_are_the_wanted_rows_with_their_owners(case):
    owned, wanted = case
    for pieces in wanted:
        cut = segments(owned, pieces)
        assert [row for _, (start, stop) in cut for row in range(start, stop)] == [
            row for start, stop in as_spans(pieces) for row in range(start, stop)
        ]
        for owner, (start, stop) in cut:
            assert stop > start
            owners = {rank for rank, rows in enumerate(owned) for row in range(start, stop) if rows[0] <= row < rows[1]}
            assert owners == (set() if owner is None else {owner})


def test_two_owners_are_refused_with_the_rows():
    with pytest.raises(ValueError, match="rows 2:3 have two owners"):
        transfers(((0, 3), (2, 5)), ((0, 1), (0, 1)))

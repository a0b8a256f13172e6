"""Windows on shards: integer arithmetic, held against the plain definition row by row."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.spans import Window, as_spans, spans_of
from shardwise.spec.windows import aligned_sizes, anchor, has_empty_window, output_spans, runs, split_border, transposed_span, window_reads

sizes = st.lists(st.integers(0, 9), min_size=1, max_size=5)
windows = st.builds(
    Window,
    size=st.integers(1, 6),
    stride=st.integers(1, 5),
    dilation=st.integers(1, 3),
    pad_before=st.integers(0, 6),
    pad_after=st.integers(0, 6),
)


@given(sizes, st.integers(0, 40), st.integers(1, 4), st.integers(1, 4), st.integers(-5, 5))
def test_output_spans_give_each_output_to_the_owner_of_its_row(sizes, outputs, up, down, shift):
    def row_of(o):
        return (o * down + shift) // up

    spans = output_spans(sizes, outputs, row_of)
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(outputs))
    total = sum(sizes)
    for (start, stop), made in zip(spans_of(sizes), spans, strict=True):
        for o in range(*made):
            if total:
                assert start <= min(max(row_of(o), 0), total - 1) < stop


@given(windows, sizes)
def test_anchor_splits_no_less_evenly_than_the_middle_of_the_window(window, sizes):
    outputs = window.output_size(sum(sizes))
    at = anchor(window, tuple(sizes), outputs)
    middle = (window.reach - 1 - window.pad_before - window.pad_after) // 2
    longest = [
        max(stop - start for start, stop in output_spans(sizes, outputs, lambda o, a=a: o * window.stride + a)) for a in (at, middle)
    ]
    assert longest[0] <= longest[1]
    if window.stride == 1 and outputs == sum(sizes):
        assert [stop - start for start, stop in output_spans(sizes, outputs, lambda o: o + at)] == sizes


@given(windows, sizes)
def test_window_reads_places_every_row_and_asks_only_for_rows_that_are_read(window, sizes):
    total = sum(sizes)
    for owned, makes in zip(spans_of(sizes), window.output_spans(sizes), strict=True):
        reads = [row for span in as_spans(window_reads(window, owned, makes, total)) for row in range(*span)]
        start, stop = window.input_span(makes)
        assert len(reads) == stop - start
        by_definition = {o * window.stride - window.pad_before + j * window.dilation for o in range(*makes) for j in range(window.size)}
        for row, have in zip(range(start, stop), reads, strict=True):
            if row in by_definition or (owned[0] <= row < owned[1]):
                assert have == row
            else:
                assert have == row or have >= total
                assert not (have == row and 0 <= row < total), "a row that no output reads would travel"


@given(st.lists(st.tuples(st.integers(-4, 14), st.integers(0, 5)), max_size=3), st.integers(0, 10))
def test_split_border_keeps_the_order_and_number_of_rows(pairs, size):
    spans, at = [], -5
    for gap, length in pairs:
        start = max(at, gap)
        spans.append((start, start + length))
        at = start + length
    before, inside, after = split_border(tuple(spans), size)
    rows = [row for span in spans for row in range(*span)]
    assert before + sum(stop - start for start, stop in inside) + after == len(rows)
    assert [row for span in inside for row in range(*span)] == rows[before : len(rows) - after]
    assert all(0 <= row < size for row in rows[before : len(rows) - after])


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.integers(0, 6), st.integers(0, 8), st.integers(0, 12))
def test_transposed_span_is_the_rows_that_reach_the_outputs(size, stride, dilation, pad, start, length):
    first, last = transposed_span((start, start + length), size=size, stride=stride, dilation=dilation, pad=pad)
    outputs = range(start, start + length)
    reaching = [i for i in range(-60, 60) if any(i * stride - pad + j * dilation in outputs for j in range(size))]
    if reaching:
        assert first <= reaching[0]
        assert reaching[-1] < last
    else:
        assert last - first <= size * dilation


@given(sizes, st.integers(1, 4))
def test_aligned_sizes_lie_on_borders_of_the_unit_and_near_the_old_ones(sizes, unit):
    sizes = [size * 2 for size in sizes]
    if sum(sizes) % unit:
        with pytest.raises(ValueError, match="cannot be cut"):
            aligned_sizes(sizes, unit)
        return
    new = aligned_sizes(sizes, unit)
    assert sum(new) == sum(sizes)
    for old_span, new_span in zip(spans_of(sizes), spans_of(new), strict=True):
        assert new_span[0] % unit == 0
        assert abs(new_span[0] - old_span[0]) <= unit // 2


@given(st.lists(st.integers(0, 20), max_size=12))
def test_runs_are_the_set_of_rows(rows):
    spans = runs(rows)
    assert [row for span in spans for row in range(*span)] == sorted(set(rows))
    assert all(a[1] < b[0] for a, b in pairwise(spans))


@given(windows, st.integers(1, 12))
def test_empty_windows_are_those_without_a_row(window, size):
    outputs = window.output_size(size)
    taps = {o: [o * window.stride - window.pad_before + j * window.dilation for j in range(window.size)] for o in range(outputs)}
    empty = [o for o, rows in taps.items() if not any(0 <= row < size for row in rows)]
    at_the_start = [o for o in empty if o * window.stride < window.pad_before]
    assert has_empty_window(window, size, outputs) == bool(at_the_start)

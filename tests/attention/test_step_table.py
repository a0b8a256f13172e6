"""Token orders and the step table, against brute force."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.sequence import (
    Band,
    attention_step_table,
    block,
    contiguous_order,
    even_sizes,
    order_indices,
    ring_steps,
    rows_in,
    zigzag_order,
)

CAUSAL = Band(right=0)


def positions(spans):
    return [at for start, stop in spans for at in range(start, stop)]


def sees(band, query, key):
    return (band.left is None or key >= query - band.left) and (band.right is None or key <= query + band.right)


@st.composite
def spans(draw):
    cuts = draw(st.lists(st.integers(0, 40), min_size=2, max_size=6).map(sorted))
    pieces = list(pairwise(cuts))
    return tuple(draw(st.permutations(pieces)))[: draw(st.integers(1, 3))]


reach = st.one_of(st.none(), st.integers(0, 45))


@given(queries=spans(), keys=spans(), left=reach, right=reach)
def test_the_tiles_of_a_block_hold_every_pair_that_attends_exactly_once(queries, keys, left, right):
    band = Band(left=left, right=right)
    query_at, key_at = positions(queries), positions(keys)
    work = block(queries, keys, band)
    covered = set()
    for tile in work.tiles:
        for i in range(*tile.queries):
            for j in range(*tile.keys):
                pair = (i, j)
                visible = sees(band, query_at[i], key_at[j])
                if tile.kind == "causal":
                    assert visible == (j - tile.keys[0] <= i - tile.queries[0])
                if tile.kind == "full":
                    assert visible
                if visible:
                    assert pair not in covered
                    covered.add(pair)
        if tile.kind == "causal":
            assert tile.queries[1] - tile.queries[0] == tile.keys[1] - tile.keys[0]
    assert covered == {(i, j) for i, a in enumerate(query_at) for j, b in enumerate(key_at) if sees(band, a, b)}
    assert (work.kind == "skip") == (not covered)


def test_a_window_costs_about_its_width_not_the_square_of_the_sequence():
    work = block(((0, 4096),), ((0, 4096),), Band(left=127, right=0))
    assert work.pairs <= 4096 * 256


def test_zigzag_holds_pieces_from_both_ends():
    assert zigzag_order(16, 4) == (((0, 2), (14, 16)), ((2, 4), (12, 14)), ((4, 6), (10, 12)), ((6, 10),))


@given(length=st.integers(0, 60), ranks=st.integers(1, 8))
def test_zigzag_holds_every_position_once(length, ranks):
    order = zigzag_order(length, ranks)
    assert sorted(order_indices(order)) == list(range(length))
    assert all(list(spans) == sorted(spans) for spans in order)


@given(pieces=st.integers(1, 20), ranks=st.integers(1, 8))
def test_in_balanced_causal_order_all_ranks_have_the_same_work_at_every_step(pieces, ranks):
    order = zigzag_order(2 * ranks * pieces, ranks)
    for row in attention_step_table(order, order, CAUSAL):
        assert len({work.pairs for work in row}) == 1


@given(ranks=st.integers(2, 8), length=st.integers(0, 300))
def test_in_balanced_causal_order_of_any_length_no_rank_is_a_block_ahead(ranks, length):
    order = zigzag_order(length, ranks)
    rows = [rows_in(spans) for spans in order]
    assert max(rows) - min(rows) <= 1
    for row in attention_step_table(order, order, CAUSAL):
        pairs = [work.pairs for work in row]
        assert max(pairs) - min(pairs) <= 1.5 * max(rows)
        if length >= 2 * ranks:
            assert max(pairs) - min(pairs) <= min(rows) ** 2
            assert all(work.kind != "skip" for work in row)


@given(lengths=st.lists(st.integers(0, 30), max_size=12), ranks=st.integers(1, 8))
def test_ranks_hold_as_many_rows_of_packed_documents(lengths, ranks):
    rows = [rows_in(spans) for spans in zigzag_order(lengths, ranks)]
    assert sum(rows) == sum(lengths) and max(rows) - min(rows) <= 1


def test_balanced_causal_order_halves_the_work():
    order = zigzag_order(64, 4)
    full = sum(work.pairs for row in attention_step_table(order, order, Band()) for work in row)
    half = sum(work.pairs for row in attention_step_table(order, order, CAUSAL) for work in row)
    assert (full, half) == (64 * 64, 64 * 65 // 2)


def test_a_contiguous_causal_table_reads_like_a_triangle():
    order = contiguous_order((4, 4, 4))
    kinds = [[work.kind for work in row] for row in attention_step_table(order, order, CAUSAL)]
    assert kinds == [["causal", "causal", "causal"], ["skip", "full", "full"], ["skip", "skip", "full"]]


def test_documents_packed_into_one_sequence_are_balanced_one_by_one():
    order = zigzag_order((4, 12), 2)
    assert [rows_in(spans) for spans in order] == [8, 8]
    document = [0] * 4 + [1] * 12

    def attended(spans):
        return sum(document[i] == document[j] for i in positions(spans) for j in range(i + 1))

    first, second = map(attended, order)
    assert (first, second) == (44, 44)


def test_steps_that_no_rank_needs_are_left_out():
    order = contiguous_order((8, 8, 8, 8))
    for rank in range(4):
        assert [step.offset for step in ring_steps(order, order, Band(left=3, right=0), rank)] == [0, 1]
    step = ring_steps(order, order, Band(left=3, right=0), 2)[1]
    assert (step.rows, step.keys, step.send) == ((5, 8), ((13, 16),), (5, 8))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_a_rank_sends_is_what_the_other_receives(ranks):
    queries, keys = zigzag_order(23, ranks), contiguous_order(even_sizes(17, ranks))
    plans = [{step.offset: step for step in ring_steps(queries, keys, CAUSAL, rank)} for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        for offset, step in plan.items():
            assert step.rows == plans[(rank - offset) % ranks][offset].send


def test_a_negative_reach_is_refused():
    with pytest.raises(ValueError, match="0 or more"):
        Band(left=-1)

"""Rank arithmetic against groups printed by megatron-core 0.16.1 (`initialize_model_parallel`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec import ranks
from shardwise.spec.layout import Layout


def layout(world: int, **degrees: int) -> Layout:
    return Layout(**degrees).with_world(world)  # type: ignore[arg-type]


def span(*starts: int, size: int, step: int) -> list[tuple[int, ...]]:
    return [tuple(range(start, start + size * step, step)) for start in starts]


A = layout(16, tp=2, pp=2, ep=4)
B = layout(16, tp=2, cp=2, pp=2, ep=4)
C = layout(16, tp=2, ep=4, etp=2)
D = layout(16, tp=4, ep=8)
E = layout(64, tp=2, cp=2, pp=2, ep=8)
F = layout(64, tp=4, pp=4, ep=4)
G = layout(64, tp=2, pp=2, ep=8, etp=2)


@pytest.mark.parametrize(
    ("layout", "name", "expected"),
    [
        (A, "tp", span(*range(0, 16, 2), size=2, step=1)),
        (A, "dp", [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]),
        (A, "dp_cp", [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]),
        (A, "pp", span(*range(8), size=2, step=8)),
        (A, "embd", span(*range(8), size=2, step=8)),
        (A, "pos_embd", [(rank,) for rank in range(8)]),
        (A, "mp", [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]),
        (A, "ep", span(0, 4, 8, 12, size=4, step=1)),
        (A, "tp_ep", span(0, 4, 8, 12, size=4, step=1)),
        (A, "expt_dp", [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]),
        (A, "tp_ep_pp", [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        (B, "cp", [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]),
        (B, "dp", [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]),
        (B, "dp_cp", [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]),
        (B, "tp_cp", span(0, 4, 8, 12, size=4, step=1)),
        (C, "expt_tp", span(*range(0, 16, 2), size=2, step=1)),
        (C, "ep", [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]),
        (C, "tp_ep", span(0, 8, size=8, step=1)),
        (C, "expt_dp", span(*range(8), size=2, step=8)),
        (D, "dp", span(0, 1, 2, 3, size=4, step=4)),
        (D, "ep", span(0, 8, size=8, step=1)),
        (D, "expt_dp", span(*range(8), size=2, step=8)),
        (E, "pp", span(*range(32), size=2, step=32)),
        (E, "dp", span(0, 1, 2, 3, 32, 33, 34, 35, size=8, step=4)),
        (E, "dp_cp", span(0, 1, 32, 33, size=16, step=2)),
        (E, "ep", span(*range(0, 64, 8), size=8, step=1)),
        (E, "expt_dp", span(*range(8), *range(32, 40), size=4, step=8)),
        (F, "pp", span(*range(16), size=4, step=16)),
        (F, "embd", span(*range(16), size=2, step=48)),
        (F, "dp", span(*(base + t for base in (0, 16, 32, 48) for t in range(4)), size=4, step=4)),
        (F, "ep", span(*range(0, 64, 4), size=4, step=1)),
        (G, "ep", span(*(base + t for base in (0, 16, 32, 48) for t in range(2)), size=8, step=2)),
        (G, "tp_ep", span(0, 16, 32, 48, size=16, step=1)),
        (G, "expt_dp", span(*range(16), *range(32, 48), size=2, step=16)),
    ],
)
def test_groups(layout: Layout, name: str, expected: list[tuple[int, ...]]) -> None:
    assert ranks.groups(layout, name) == expected


def test_data_parallel_sizes() -> None:
    assert [(each.dp, each.edp) for each in (A, B, C, D, E, F, G)] == [(4, 2), (2, 2), (8, 2), (4, 2), (8, 4), (4, 4), (16, 2)]


def test_hierarchical_context_groups() -> None:
    assert ranks.hierarchical_groups(range(8), (4, 2)) == [[(0, 1, 2, 3), (4, 5, 6, 7)], [(0, 4), (1, 5), (2, 6), (3, 7)]]
    with pytest.raises(ValueError, match="multiply to 6"):
        ranks.hierarchical_groups(range(8), (3, 2))


def test_experts_of_a_rank() -> None:
    assert [list(ranks.experts_of(C, rank, 8)) for rank in (0, 1, 2, 7, 8)] == [[0, 1], [0, 1], [2, 3], [6, 7], [0, 1]]


@pytest.mark.parametrize(
    ("degrees", "world", "wrong"),
    [  # the table of Megatron Bridge's guide
        ({"pp": 1, "tp": 2, "cp": 1, "ep": 8, "etp": 1}, 8, 16),
        ({"pp": 1, "tp": 4, "cp": 1, "ep": 8, "etp": 1}, 8, 32),
        ({"pp": 1, "tp": 2, "cp": 2, "ep": 8, "etp": 1}, 8, 32),
        ({"pp": 1, "tp": 2, "cp": 4, "ep": 8, "etp": 1}, 8, 64),
        ({"pp": 2, "tp": 2, "cp": 1, "ep": 8, "etp": 1}, 16, 32),
        ({"pp": 1, "tp": 2, "cp": 1, "ep": 4, "etp": 2}, 8, 16),
        # public reports: NeMo#14838, Megatron-Bridge#546 and #4007, torchtitan#2087
        ({"tp": 4, "ep": 4, "etp": 1}, 4, 16),
        ({"tp": 2, "ep": 4, "etp": 2}, 8, 16),
        ({"tp": 2, "ep": 4, "etp": 1}, 4, 8),
        ({"tp": 2, "cp": 2, "ep": 8}, 8, 32),
        ({"tp": 2, "pp": 2, "ep": 32}, 64, 128),
        ({"tp": 8, "cp": 2, "pp": 15, "ep": 16}, 240, 3840),
        ({"tp": 4, "cp": 3, "pp": 2, "ep": 8}, 48, 192),
    ],
)
def test_smallest_world(degrees: dict[str, int], world: int, wrong: int) -> None:
    layout = Layout(**degrees)  # type: ignore[arg-type]
    assert ranks.min_world(layout) == world
    assert ranks.product_world(layout) == wrong


def test_max_formula_is_too_small() -> None:
    layout = Layout(tp=4, cp=3, pp=2, ep=8)
    assert (ranks.max_world(layout), ranks.min_world(layout)) == (24, 48)
    assert ranks.min_world(Layout(tp=6, ep=4)) == 12


@pytest.mark.parametrize(("world", "dp", "edp"), [(8, 4, 1), (16, 8, 2), (32, 16, 4)])
def test_scaling_above_the_minimum(world: int, dp: int, edp: int) -> None:
    scaled = layout(world, tp=2, ep=8)
    assert (scaled.dp, scaled.edp) == (dp, edp)


def test_folded_sizes_on_eight_ranks() -> None:
    folded = layout(8, tp=2, cp=2, ep=4)
    assert (folded.dp, folded.edp) == (2, 2)


degree = st.sampled_from([1, 2, 3, 4, 6, 8])


@given(
    tp=degree,
    cp=st.sampled_from([1, 2, 3]),
    pp=st.sampled_from([1, 2, 3]),
    ep=degree,
    etp=st.sampled_from([1, 2, 3]),
    times=st.integers(1, 3),
)
def test_every_group_family_partitions_the_world(tp: int, cp: int, pp: int, ep: int, etp: int, times: int) -> None:
    base = Layout(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    full = base.with_world(ranks.min_world(base) * times)
    everyone = list(range(full.world))
    for name, (view, axes) in ranks.GROUPS.items():
        found = ranks.groups(full, name)
        assert sorted(rank for group in found for rank in group) == everyone
        grid = ranks.dense_grid(full) if view == "dense" else ranks.expert_grid(full)
        for group in found[:4]:
            assert grid.group_of(group[-1], axes) == group
    # a stage is one set of ranks in both views
    assert ranks.dense_grid(full).groups(("pp",)) == ranks.expert_grid(full).groups(("pp",))
    for rank in everyone[:: max(1, len(everyone) // 7)]:
        assert ranks.dense_grid(full).rank(ranks.dense_grid(full).coordinates(rank)) == rank

"""Stage search: exact against brute force, literal worked cases, pins that cannot hold."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import InputError
from shardwise.planner.stage_advice import stage_advice, stage_load
from shardwise.planner.stage_search import StageCosts, best_split, cheapest, split_costs
from shardwise.spec import pipeline_layout
from shardwise.spec.catalog import model
from shardwise.spec.layout import Layout


def every_split(count: int, stages: int, lows: int) -> list[tuple[int, ...]]:
    return [sizes for sizes in product(range(lows, count + 1), repeat=stages) if sum(sizes) == count]


@settings(max_examples=300, deadline=None)
@given(
    layers=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=2, max_size=9),
    extra=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    budget=st.one_of(st.none(), st.integers(5, 40)),
    lows=st.integers(0, 1),
)
def test_split_is_the_best_of_all(layers: list[tuple[int, int]], extra: list[int], budget: int | None, lows: int) -> None:
    extra = extra[: len(layers)]
    stages = len(extra)
    own, kept = zip(*layers)
    costs = StageCosts(own, extra, kept=kept, factors=range(stages, 0, -1))
    loads = StageCosts(kept, [1] * stages)
    legal = [costs.split(split) for split in every_split(len(layers), stages, lows)]
    if budget is not None:
        legal = [split for split in legal if max(loads.split(split.layers).costs) <= budget]
    found = cheapest(costs, lows=[lows] * stages, loads=None if budget is None else loads, budget=budget or 0)
    if not legal:
        assert found is None
        return
    assert found is not None
    best = min((split.heaviest, sum(cost**2 for cost in split.costs)) for split in legal)
    assert (found.heaviest, sum(cost**2 for cost in found.costs)) == best
    assert found.bounds[0][0] == 0 and found.bounds[-1][1] == len(layers)


def test_a_stage_stops_early_for_a_heavy_layer() -> None:
    split = cheapest(StageCosts([1, 1, 9, 1], [0, 8, 0]), lows=[1, 1, 1])
    assert split is not None and split.layers == (1, 1, 2)  # filling the first stage would put 9 on top of 8


def test_thirty_layers_on_four_stages() -> None:
    plain = best_split([1] * 30, 4)
    assert sum(plain.layers) == 30 and max(plain.layers) - min(plain.layers) <= 1
    counted = best_split([1] * 30, 4, first=1, last=1)
    assert counted.layers == (7, 8, 8, 7)


def test_ten_layers_on_three_stages() -> None:
    split = best_split([1] * 10, 3)
    assert sorted(split.layers) == [3, 3, 4]


def test_pinned_last_stage() -> None:
    split = best_split([1] * 61, 4, pins={-1: 13})
    assert split.layers == (16, 16, 16, 13)


def test_llama3_8b_on_four_stages() -> None:
    layer, embedding = 218.112, 525.337  # millions of parameters
    even = split_costs([layer] * 32, [8, 8, 8, 8], first=embedding, last=embedding)
    best = best_split([layer] * 32, 4, first=embedding, last=embedding)
    assert best.layers == (7, 9, 9, 7)
    assert round(even.heaviest, 1) == 2270.2 and round(even.average, 1) == 2007.6
    assert round(best.heaviest, 1) == 2052.1


def test_advice_for_llama3_8b_prefers_the_uneven_cut_and_says_why() -> None:
    spec = model("llama-3-8b")
    even = Layout(pp=4, gbs=8)
    load = stage_load(spec, even)
    assert load.layers == (8, 8, 8, 8) and round(load.heaviest / 1e6, 1) == 2270.2 and round(load.average / 1e6, 1) == 2007.6
    (advice,) = stage_advice(spec, even)
    assert "2,270.2" in advice.given and "13%" in advice.why and "30%" in advice.why and "2.41 layers" in advice.why
    assert "[7, 9, 9, 7]" in advice.try_ and "2,052.1" in advice.try_
    better = even.replace(pipeline_layout=pipeline_layout.parse("Et*7|t*9|t*9|t*7L"))
    assert stage_advice(spec, better) == () and round(stage_load(spec, better).heaviest / 1e6, 1) == 2052.1


@pytest.mark.parametrize(
    ("pins", "total"), [({0: 70}, "70"), ({0: 10, 1: 10, 2: 10, 3: 10}, "40"), ({-1: 60}, "60"), ({7: 3}, "4 stages"), ({1: 0}, "0")]
)
def test_impossible_pins_are_refused_with_the_sum(pins: dict[int, int], total: str) -> None:
    with pytest.raises(InputError) as caught:
        best_split([1] * 61, 4, pins=pins)
    assert total in str(caught.value) and caught.value.try_


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(InputError, match="1 to 3 stages"):
        best_split([1] * 3, 4)

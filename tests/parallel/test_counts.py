"""What a rank holds is what the planner counts."""

from __future__ import annotations

import pytest
import torch
from tests.parallel import cases

from shardwise.parallel.build import parallelize_model
from shardwise.parallel.topology import connect
from shardwise.spec import hf
from shardwise.spec.ranks import dense_grid, experts_of
from shardwise.spec.stages import rank_params
from shardwise.testing import ranks

WIDE = {"vocab_size": 1024}  # splits without padding, which the planner adds


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("llama", "tp=2 pp=2 sp=true"),
        ("llama", "pp=2 vpp=2"),
        ("llama", "pp=4"),
        ("qwen3", "tp=4"),
        ("qwen3_moe", "tp=2 ep=4 sp=true"),
        ("mixtral", "ep=2 etp=2"),
        ("deepseek_v3", "tp=2 pp=2 ep=2 sp=true"),
    ],
)
@ranks(4, processes=True)
def test_parameters_of_a_rank(world, family, words):
    layout = cases.layout(4, words)
    model = parallelize_model(cases.config(family, **WIDE), connect(layout), seed=1, device=torch.device("cpu"))
    spec = hf.from_config({**cases.FAMILIES[family], **WIDE}, family)
    counted = rank_params(spec, layout)[model.topology.pp_rank]
    held = {False: 0, True: 0}
    for parameter, info in model.parameters:
        held[info.expert] += parameter.numel()
    assert (held[False], held[True]) == (counted.dense, counted.expert)


@ranks(4)
def test_ranks_are_placed_as_megatron_places_them(world):
    layout = cases.layout(4, "tp=2 ep=4 sp=true")
    topology = connect(layout)
    place = dense_grid(layout).coordinates(world.rank)
    assert (topology["tp"].rank, topology["dp"].rank) == (place["tp"], place["dp"])
    assert topology["tp"].ranks == ((0, 1) if world.rank < 2 else (2, 3)) and topology["ep"].ranks == (0, 1, 2, 3)
    assert experts_of(layout, world.rank, 8) == range(2 * world.rank, 2 * world.rank + 2)

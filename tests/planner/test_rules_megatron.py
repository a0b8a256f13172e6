"""Smallest worlds against megatron-core's own group initialisation, on torch's fake backend in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from shardwise.spec import ranks
from shardwise.spec.layout import Layout

parallel_state = pytest.importorskip("megatron.core.parallel_state", reason="megatron-core is not installed")
torch = pytest.importorskip("torch")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")


@pytest.fixture(autouse=True)
def clean_groups() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def accepts(layout: Layout, world: int) -> bool:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
    except RuntimeError:
        return False
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    return True


# TP 1-8, CP 1-4, PP 1-2, EP 1-8, ETP 1-3
COMBINATIONS = list(itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3), (1, 2), (1, 2, 4, 6, 8), (1, 2, 3)))


def test_smallest_world_in_540_combinations() -> None:
    assert len(COMBINATIONS) == 540
    for tp, cp, pp, ep, etp in COMBINATIONS:
        layout = Layout(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
        least = ranks.min_world(layout)
        assert accepts(layout, least), layout
        # every world a dense mesh could tile below it, the max formula's answer among them
        smaller = {world for world in (*range(pp * tp * cp, least, pp * tp * cp), ranks.max_world(layout)) if world < least}
        assert not any(accepts(layout, world) for world in smaller), layout


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, ep=4, dp=4), Layout(tp=2, cp=2, pp=2, ep=8, dp=8), Layout(tp=2, ep=4, etp=2, dp=8)])
def test_groups_of_rank_zero(layout: Layout) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in (0, layout.world - 1):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        theirs = {
            "tp": parallel_state.get_tensor_model_parallel_group(),
            "cp": parallel_state.get_context_parallel_group(),
            "dp": parallel_state.get_data_parallel_group(),
            "dp_cp": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "pp": parallel_state.get_pipeline_model_parallel_group(),
            "ep": parallel_state.get_expert_model_parallel_group(),
            "expt_tp": parallel_state.get_expert_tensor_parallel_group(),
            "expt_dp": parallel_state.get_expert_data_parallel_group(),
        }
        for name, group in theirs.items():
            view, axes = ranks.GROUPS[name]
            grid = ranks.dense_grid(layout) if view == "dense" else ranks.expert_grid(layout)
            assert tuple(torch.distributed.get_process_group_ranks(group)) == grid.group_of(rank, axes), name
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()

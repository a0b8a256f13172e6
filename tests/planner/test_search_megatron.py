"""The smallest world against Megatron Core's own group initialisation, where megatron-core is installed."""

from __future__ import annotations

import itertools

import pytest

from shardwise.spec.layout import Layout
from shardwise.spec.ranks import groups, min_world

parallel_state = pytest.importorskip(
    "megatron.core.parallel_state", reason="megatron-core is not installed; it is the oracle (pip install --no-deps megatron-core==0.16.1)"
)

COMBINATIONS = list(itertools.product((1, 2, 4, 6, 8), (1, 2, 4), (1, 2), (1, 2, 4, 6, 8, 3), (1, 2, 3)))


def accepts(layout: Layout, world: int) -> bool:
    """Whether Megatron Core makes its groups on this many ranks (no process is started: torch's fake backend)."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        assert parallel_state.get_data_parallel_world_size() == layout.with_world(world).dp
        assert parallel_state.get_expert_data_parallel_world_size() == layout.with_world(world).edp
        return True
    except RuntimeError as error:
        assert "not divisible" in str(error) or "divisible" in str(error)
        return False
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def test_540_combinations_have_the_smallest_world_megatron_accepts() -> None:
    assert len(COMBINATIONS) == 540
    wrong_by_max = 0
    for tp, cp, pp, ep, etp in COMBINATIONS:
        layout = Layout(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
        least = min_world(layout)
        smaller = [world for world in range(pp, least, pp) if world % (pp * tp * cp) == 0 or world % (pp * ep * etp) == 0]
        assert accepts(layout, least) and not any(accepts(layout, world) for world in smaller), layout
        wrong_by_max += max(tp * cp, ep * etp) * pp < least
    assert wrong_by_max > 100  # PP * max(TP*CP, EP*ETP) is too small for these


@pytest.mark.parametrize("degrees", [(2, 1, 2, 4, 1, 16), (2, 2, 2, 4, 1, 16), (4, 1, 1, 8, 1, 16), (2, 1, 2, 8, 2, 64)])
def test_groups_are_megatrons(degrees: tuple[int, ...]) -> None:
    tp, cp, pp, ep, etp, world = degrees
    layout = Layout(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp).with_world(world)
    dense = parallel_state.RankGenerator(tp=tp, ep=1, dp=layout.dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    expert = parallel_state.RankGenerator(tp=etp, ep=ep, dp=layout.edp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    for name, generator, token in (
        ("tp", dense, "tp"),
        ("cp", dense, "cp"),
        ("dp", dense, "dp"),
        ("pp", dense, "pp"),
        ("ep", expert, "ep"),
    ):
        assert [list(group) for group in groups(layout, name)] == generator.get_ranks(token)

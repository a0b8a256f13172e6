"""ddp x domain: the wrapper table, the smallest domain, uneven rows."""

from __future__ import annotations

import pytest

from shardwise.errors import InputError
from shardwise.planner.domain_plan import GIB, plan_domain, smallest_domain
from shardwise.spec.catalog import cluster
from shardwise.spec.model import GridModel

UNET = GridModel(name="unet", grid=(2048, 2048), params=31_000_000, saved_bytes_per_sample=200 * 2**30, flops_per_sample=5e13)


def test_smallest_domain_that_fits() -> None:
    found = smallest_domain(UNET, cluster("h100-sxm", 8))
    assert found is not None and found.domain == 3  # 200 GiB / 3 = 66.7 GiB of 79
    assert found.rows == (683, 683, 682) and found.wrapper == "none"
    assert found.allocated_gib == pytest.approx(200 * 683 / 2048 + 31e6 * 16 / GIB, rel=1e-6)


@pytest.mark.parametrize(
    ("gpus", "gbs", "saved_gib", "params", "spatial", "ddp", "domain", "wrapper"),
    [
        (4, 1, 200, 31_000_000, False, 1, 4, "none"),  # domain only
        (8, 8, 20, 31_000_000, False, 8, 1, "ddp"),  # ddp only
        (8, 2, 200, 31_000_000, False, 2, 4, "ddp"),  # both, plain parameters
        (8, 2, 200, 31_000_000, True, 2, 4, "fsdp2"),  # spatial parameters are DTensors
        (8, 2, 100, 4_000_000_000, False, 2, 4, "fsdp2"),  # 64 GB of state per rank: parameters are sharded
    ],
)
def test_wrapper_follows_the_table(
    gpus: int, gbs: int, saved_gib: int, params: int, spatial: bool, ddp: int, domain: int, wrapper: str
) -> None:
    model = GridModel(name="m", grid=(1024, 1024), params=params, saved_bytes_per_sample=saved_gib * 2**30, flops_per_sample=1e13)
    best = plan_domain(model, cluster("h100-sxm", gpus), gbs=gbs, spatial_params=spatial)[0]
    assert (best.ddp, best.domain, best.wrapper, best.fits) == (ddp, domain, wrapper, True)


def test_every_split_uses_all_gpus_and_covers_the_rows() -> None:
    for plan in plan_domain(UNET, cluster("h100-sxm", 12), gbs=12):
        assert plan.ddp * plan.domain == 12 and sum(plan.rows) == 2048 and plan.accumulate == 12 // plan.ddp


def test_a_batch_no_split_can_carry_is_refused() -> None:
    thin = GridModel(name="thin", grid=(2, 2), params=10, saved_bytes_per_sample=10, flops_per_sample=1.0)
    with pytest.raises(InputError, match="global batch"):
        plan_domain(thin, cluster("h100-sxm", 8), gbs=3)
    with pytest.raises(InputError, match="at least 1"):
        plan_domain(thin, cluster("h100-sxm", 8), gbs=0)

"""Split attention equals attention over the whole sequence, output and gradients, in float64 to 1e-10: over 500 random cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.attention.cases import Whole, random_case, unsplit_attention
from tests.attention.compare import check_case
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.attention import block, ring_attention, ring_ulysses_attention, ulysses_attention
from shardwise.testing import World, ranks


@pytest.mark.parametrize("mask", ["bool rows", "bool one row", "bool heads", "additive", "additive one row", "lowest"])
def test_the_oracle_is_what_torch_computes(mask: str) -> None:
    plain = {"causal": False, "window": None, "bias": "none", "segments": False, "dropout_p": 0.0}
    case = dataclasses.replace(random_case(3, 2), mask=mask, **plain)
    whole = Whole.of(case)
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(whole.q, whole.k, whole.v, attn_mask=whole.mask, scale=case.scale, enable_gqa=True)
    torch.testing.assert_close(unsplit_attention(case, whole), want, rtol=0, atol=1e-12)


def _check_ring(world: World, seeds: range) -> None:
    group = dist.group.WORLD
    for seed in seeds:
        check_case(random_case(seed, world.size), world.rank, partial(ring_attention, group=group), group)


@ranks(2)
def test_ring_on_2_ranks(world: World) -> None:
    _check_ring(world, range(120))


@ranks(3)
def test_ring_on_3_ranks(world: World) -> None:
    _check_ring(world, range(120))


@ranks(4)
def test_ring_on_4_ranks(world: World) -> None:
    _check_ring(world, range(120))


@ranks(8)
def test_ring_on_8_ranks(world: World) -> None:
    _check_ring(world, range(20))


@pytest.fixture
def math_only() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.usefixtures("math_only")
@ranks(3)
def test_ring_with_the_math_kernel(world: World) -> None:
    _check_ring(world, range(200, 220))


@pytest.fixture
def tiny_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "_ELEMENTS", 60)


@pytest.mark.usefixtures("tiny_calls")
@ranks(2)
def test_ring_cut_into_many_small_calls(world: World) -> None:
    _check_ring(world, range(500, 520))


def _check_ulysses(world: World, seeds: range) -> None:
    group = dist.group.WORLD
    for seed in seeds:
        case = random_case(seed, world.size)
        if case.q_order is not None:
            check_case(case, world.rank, partial(ulysses_attention, group=group), group)


@ranks(3)
def test_ulysses_on_3_ranks(world: World) -> None:
    _check_ulysses(world, range(300, 360))


@ranks(4)
def test_ulysses_on_4_ranks(world: World) -> None:
    _check_ulysses(world, range(300, 360))


def _check_ring_ulysses(world: World, seeds: range) -> None:
    ring, ulysses = world.mesh.get_group("ring"), world.mesh.get_group("ulysses")
    across = ulysses.size()

    def attend(*qkv: Tensor, q_spans: Any, kv_spans: Any, **options: Any) -> Tensor:
        grids = [
            None if spans is None else [spans[at : at + across] for at in range(0, len(spans), across)] for spans in (q_spans, kv_spans)
        ]
        return ring_ulysses_attention(*qkv, q_spans=grids[0], kv_spans=grids[1], ring_group=ring, ulysses_group=ulysses, **options)

    for seed in seeds:
        case = random_case(seed, world.size)
        if case.q_order is not None:
            check_case(case, world.rank, attend, dist.group.WORLD)


@ranks(4, mesh={"ring": 2, "ulysses": 2})
def test_ring_of_2_with_ulysses_of_2(world: World) -> None:
    _check_ring_ulysses(world, range(400, 450))


@ranks(6, mesh={"ring": 2, "ulysses": 3})
def test_ring_of_2_with_ulysses_of_3(world: World) -> None:
    _check_ring_ulysses(world, range(400, 430))

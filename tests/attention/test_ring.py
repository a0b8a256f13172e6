"""What ring attention promises beyond equality: bytes, memory, precision, order of work, refusals."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.attention.cases import random_case, rows_of
from tests.attention.compare import check_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.attention import block, gather_rows, local_rows, ring, ring_attention, ulysses_attention
from shardwise.collectives.counter import count_communication
from shardwise.errors import InputError, MissingShardPatch
from shardwise.spec.sequence import contiguous_order, rows_in, zigzag_order
from shardwise.spec.spans import Spans
from shardwise.testing import World, ranks

Order = tuple[Spans, ...]


def rows(order: Order, rank: int) -> Tensor:
    return rows_of(order, rank, 0)


def qkv(world: World, length: int, heads: int = 4, kv_heads: int = 2, width: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and the gradient of the output over the whole sequence."""
    return [world.randn(1, count, length, width, seed=7 + i).to(dtype) for i, count in enumerate((heads, kv_heads, kv_heads, heads))]


def split_run(world: World, order: Order, whole: list[Tensor], **options: Any) -> dict[str, Tensor]:
    """Output and gradients of this rank's rows."""
    here = rows(order, world.rank)
    q, k, v = (x[:, :, here].clone().requires_grad_() for x in whole[:3])
    options = {"q_spans": order, "kv_spans": order, "group": dist.group.WORLD, **options}
    out = ring_attention(q, k, v, **options)
    out.backward(whole[3][:, :, here])
    return {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}


def one_process(whole: list[Tensor], **options: Any) -> dict[str, Tensor]:
    q, k, v = (x.double().requires_grad_() for x in whole[:3])
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    out.backward(whole[3].double())
    return {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}


def assert_rows_equal(have: dict[str, Tensor], want: dict[str, Tensor], here: Tensor) -> None:
    for name, value in have.items():
        torch.testing.assert_close(value, want[name][:, :, here], rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


# --- worked case: 12 rows as 5, 4, 2, 1 -------------------------------------------------------------------------------

UNEVEN = contiguous_order((5, 4, 2, 1))


@pytest.mark.parametrize("causal", [False, True])
@ranks(4)
def test_five_four_two_one_rows_equal_one_process(world: World, causal: bool) -> None:
    whole = qkv(world, 12)
    assert_rows_equal(split_run(world, UNEVEN, whole, causal=causal), one_process(whole, is_causal=causal), rows(UNEVEN, world.rank))


class LocalOnly(ring._Ring):
    """A backward that never sees another rank's keys: the defect that a healthy forward hides."""

    def __iter__(self) -> Iterator[Any]:
        in_backward = torch._C._current_graph_task_id() != -1
        for at, step in enumerate(super().__iter__()):
            if at == 0 or not in_backward:
                yield step


@pytest.fixture
def local_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_Ring", LocalOnly)


@pytest.mark.usefixtures("local_only")
@pytest.mark.parametrize("causal", [False, True])
@ranks(4)
def test_a_backward_with_local_keys_only_is_caught_though_its_forward_passes(world: World, causal: bool) -> None:
    whole = qkv(world, 12)
    here = rows(UNEVEN, world.rank)
    have, want = split_run(world, UNEVEN, whole, causal=causal), one_process(whole, is_causal=causal)
    assert_rows_equal({"out": have["out"]}, want, here)
    wrong = torch.tensor(max((have[name] - want[name][:, :, here]).abs().max().item() for name in "qkv"))
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    assert wrong > 1e-2


@ranks(3, processes=True)
def test_real_processes_agree_with_one_process(world: World) -> None:
    order = zigzag_order(25, 3)
    whole = qkv(world, 25)
    assert_rows_equal(split_run(world, order, whole, causal=True), one_process(whole, is_causal=True), rows(order, world.rank))


# --- bytes ------------------------------------------------------------------------------------------------------------


def bytes_sent(world: World, order: Order, **options: Any) -> tuple[int, int, int]:
    """Forward and backward bytes of all ranks together, and the bytes of the whole K and V."""
    whole = qkv(world, sum(map(rows_in, order)))
    with count_communication() as sent:
        split_run(world, order, whole, **options)
    total = torch.tensor([sent.only(direction="forward").bytes, sent.only(direction="backward").bytes])
    dist.all_reduce(total)
    return int(total[0]), int(total[1]), sum(x.numel() * x.element_size() for x in whole[1:3])


@pytest.mark.parametrize("sizes", [(6, 6, 6, 6), (5, 4, 2, 1), (7, 0, 1, 3)])
@ranks(4)
def test_each_rank_gets_the_keys_it_does_not_have_and_returns_their_gradients(world: World, sizes: tuple[int, ...]) -> None:
    forward, backward, kv = bytes_sent(world, contiguous_order(sizes))
    with_queries = sum(size > 0 for size in sizes)
    assert forward == (with_queries - 1) * kv  # (n - 1)/n of K and V to each rank when even; none to a rank without queries
    assert backward == 2 * forward


@ranks(4)
def test_causal_order_halves_the_bytes_of_contiguous_shards(world: World) -> None:
    forward, backward, kv = bytes_sent(world, contiguous_order((6, 6, 6, 6)), causal=True)
    assert (2 * forward, backward) == ((world.size - 1) * kv, 2 * forward)


@ranks(4)
def test_balanced_causal_order_sends_only_keys_that_some_query_sees(world: World) -> None:
    """A later rank of a pair needs half of the other's keys, an earlier one all of them: three quarters, at half of the work."""
    forward, backward, kv = bytes_sent(world, zigzag_order(24, 4), causal=True)
    assert (4 * forward, backward) == (3 * (world.size - 1) * kv, 2 * forward)


@ranks(4)
def test_a_window_sends_a_halo(world: World) -> None:
    forward, _, kv = bytes_sent(world, contiguous_order((6, 6, 6, 6)), causal=True, window=(2, None))
    assert forward == 3 * 2 * kv // 24  # two rows over each of three borders


@ranks(4)
def test_ulysses_sends_three_quarters_of_queries_keys_values_and_output(world: World) -> None:
    order = contiguous_order((3, 3, 3, 3))
    whole = qkv(world, 12, 8, 4)
    here = rows(order, world.rank)
    with count_communication() as sent:
        out = ulysses_attention(*(x[:, :, here] for x in whole[:3]), q_spans=order, kv_spans=order, group=dist.group.WORLD)
    local = sum(x[:, :, here].numel() for x in whole) * out.element_size()
    assert (sent.bytes, sent.calls) == (local * 3 // 4, 4)


LOG: dict[int, list[str]] = {}


class LoggedShift(ring.Shift):
    def __init__(self, *args: Any) -> None:
        LOG.setdefault(dist.get_rank(), []).append("start")
        super().__init__(*args)

    def wait(self) -> list[Tensor]:
        LOG.setdefault(dist.get_rank(), []).append("wait")
        return super().wait()


class LoggedRows(ring.Rows):
    def add(self, *args: Any) -> None:
        LOG.setdefault(dist.get_rank(), []).append("compute")
        super().add(*args)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> None:
    LOG.clear()
    monkeypatch.setattr(ring, "Shift", LoggedShift)
    monkeypatch.setattr(ring, "Rows", LoggedRows)


@pytest.mark.usefixtures("logged")
@ranks(3)
def test_the_next_keys_travel_while_a_block_is_computed(world: World) -> None:
    order = contiguous_order((3, 3, 3))
    ring_attention(*qkv(world, 3)[:3], q_spans=order, kv_spans=order, group=dist.group.WORLD)
    assert LOG[world.rank] == ["start", "compute", "wait", "start", "compute", "wait", "compute"]


# --- memory -----------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Bytes of tensors alive at once, and of the largest one, among those made in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak_bytes(world: World, local_rows: int, group: dist.ProcessGroup | None = None, *, causal: bool = True, **options: Any) -> int:
    ranks_of_group = group.size() if group else world.size
    order = zigzag_order(local_rows * ranks_of_group, ranks_of_group)
    q, k, v = (x.requires_grad_() for x in qkv(world, local_rows, dtype=torch.float32)[:3])
    with Live() as live:
        ring_attention(q, k, v, q_spans=order, kv_spans=order, group=group or dist.group.WORLD, causal=causal, **options).sum().backward()
    return live.peak


@pytest.fixture
def small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with masks or the math kernel hold fewer elements, so that their constant does not hide what grows."""
    monkeypatch.setattr(block, "_ELEMENTS", 1 << 12)


@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("kernel", ["flash", "math", "masked"])
@ranks(2)
def test_memory_is_linear_in_the_local_rows(world: World, kernel: str) -> None:
    options: dict[str, Any] = {"math": {"bias": lambda i, j: (i[:, None] - j) * 0.1}, "masked": {"window": (40, None)}}.get(kernel, {})
    once, twice = (peak_bytes(world, size, **options) for size in (128, 256))
    assert twice <= 2.1 * once


@ranks(8)
def test_memory_does_not_grow_with_the_number_of_ranks(world: World) -> None:
    half = world.make_mesh((2, 4), ("others", "half")).get_group("half")
    assert peak_bytes(world, 64, causal=False) <= 1.01 * peak_bytes(world, 64, half, causal=False)


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@ranks(8)
def test_bfloat16_error_on_8_ranks_is_at_most_twice_that_on_2(world: World, causal: bool) -> None:
    pairs = world.make_mesh((4, 2), ("others", "pair")).get_group("pair")
    whole = qkv(world, 256, width=32, dtype=torch.bfloat16)
    want = one_process(whole, is_causal=causal)
    errors = []
    for group, place in ((dist.group.WORLD, world.rank), (pairs, pairs.rank())):
        order = zigzag_order(256, group.size())
        here = rows(order, place)
        q, k, v = (x[:, :, here].clone().requires_grad_() for x in whole[:3])
        out = ring_attention(q, k, v, q_spans=order, kv_spans=order, group=group, causal=causal)
        out.backward(whole[3][:, :, here])
        assert {x.dtype for x in (out, q.grad, k.grad, v.grad)} == {torch.bfloat16}
        have = {"out": out, "q": q.grad, "k": k.grad, "v": v.grad}
        errors.append(torch.stack([(have[name].double() - want[name][:, :, here]).abs().max() for name in want]).detach())
        dist.all_reduce(errors[-1], dist.ReduceOp.MAX)
    assert (errors[0] <= 2 * errors[1]).all(), f"out, dq, dk, dv on 8 ranks {errors[0].tolist()}, on 2 ranks {errors[1].tolist()}"
    assert (errors[0] <= 0.05).all()


@ranks(2)
def test_autocast_computes_in_its_dtype_and_returns_gradients_in_that_of_the_inputs(world: World) -> None:
    order = zigzag_order(16, 2)
    whole = qkv(world, 16, dtype=torch.float32)
    here = rows(order, world.rank)
    q, k, v = (x[:, :, here].clone().requires_grad_() for x in whole[:3])
    with torch.autocast("cpu", torch.bfloat16):
        out = ring_attention(q, k, v, q_spans=order, kv_spans=order, group=dist.group.WORLD)
    out.backward(whole[3][:, :, here].to(out.dtype))
    assert (out.dtype, q.grad.dtype) == (torch.bfloat16, torch.float32)
    want = one_process(whole)
    torch.testing.assert_close(out.double(), want["out"][:, :, here], rtol=0, atol=0.03)
    torch.testing.assert_close(k.grad.double(), want["k"][:, :, here], rtol=0, atol=0.05)


# --- order ------------------------------------------------------------------------------------------------------------


@ranks(3)
def test_rows_go_out_in_an_order_and_come_back_by_position(world: World) -> None:
    order = zigzag_order((7, 10), 3)
    whole = world.randn(2, 17, 3)
    local = local_rows(whole, order[world.rank], 1).requires_grad_()
    assert torch.equal(local, whole[:, rows(order, world.rank)])
    back = gather_rows(local, order, 1, dist.group.WORLD)
    assert torch.equal(back, whole)
    (back * whole).sum().backward()
    assert torch.equal(local.grad, world.size * local.detach())  # each rank's copy of the loss sends its gradient


# --- cases users have reported ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "v_width"), [(4, 4), (12, 12), (20, 20), (24, 8), (4, 6)])
@ranks(2)
def test_small_and_unequal_head_widths_keep_their_shapes(world: World, width: int, v_width: int) -> None:
    case = dataclasses.replace(PLAIN, ranks=2, q_order=zigzag_order(4, 2), kv_order=zigzag_order(4, 2), q_len=4, kv_len=4)
    check_ring(world, dataclasses.replace(case, width=width, v_width=v_width))


PLAIN = dataclasses.replace(
    random_case(1, 4),
    q_order=zigzag_order(16, 4),
    kv_order=zigzag_order(16, 4),
    q_len=16,
    kv_len=16,
    batch=1,
    kv_heads=2,
    group=2,
    width=8,
    v_width=8,
    causal=True,
    window=None,
    scale=None,
    mask="none",
    bias="none",
    segments=False,
    dropout_p=0.0,
)


def check_ring(world: World, case: Any) -> None:
    def attend(*args: Tensor, **options: Any) -> Tensor:
        return ring_attention(*args, group=dist.group.WORLD, **options)

    check_case(case, world.rank, attend, dist.group.WORLD)


@ranks(4)
def test_a_window_of_three_reaches_over_shard_borders(world: World) -> None:
    order = contiguous_order((5, 1, 4, 6))
    check_ring(world, dataclasses.replace(PLAIN, q_order=order, kv_order=order, window=(3, 0)))


@ranks(4)
def test_two_rows_per_rank_causal(world: World) -> None:
    order = contiguous_order((2, 2, 2, 2))
    check_ring(world, dataclasses.replace(PLAIN, q_order=order, kv_order=order, q_len=8, kv_len=8))


@ranks(4)
def test_packed_documents_of_5_and_11_tokens_attend_to_themselves_only(world: World) -> None:
    order = zigzag_order((5, 11), 4)
    whole = qkv(world, 16)
    ids = torch.tensor([0] * 5 + [1] * 11)
    here = rows(order, world.rank)
    have = split_run(world, order, whole, causal=True, q_segments=ids[None, here], kv_segments=ids[None, here])
    one, two = (one_process([x[:, :, part] for x in whole], is_causal=True) for part in (slice(0, 5), slice(5, 16)))
    assert_rows_equal(have, {name: torch.cat((one[name], two[name]), 2) for name in one}, here)


@ranks(4)
def test_two_head_counts_in_one_process_do_not_meet(world: World) -> None:
    order = contiguous_order((3, 3, 3, 3))
    here = rows(order, world.rank)
    for heads, kv_heads in ((12, 12), (10, 2), (3, 1), (12, 4)):
        whole = qkv(world, 12, heads, kv_heads)
        out = ulysses_attention(*(x[:, :, here] for x in whole[:3]), q_spans=order, kv_spans=order, group=dist.group.WORLD)
        assert_rows_equal({"out": out}, one_process(whole), here)


# --- rows without keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bool", "minus infinity"])
@ranks(3)
def test_a_row_with_nothing_to_attend_is_zero_and_gets_zero_gradients(world: World, kind: str) -> None:
    order = contiguous_order((3, 2, 1))
    whole = qkv(world, 6)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[[0, 4]] = False
    mask[:, 1] = False
    if kind == "minus infinity":
        mask = torch.zeros(6, 6, dtype=torch.float64).masked_fill(~mask, -float("inf"))
    here = rows(order, world.rank)
    have = split_run(world, order, whole, mask=mask[here])
    for name in ("out", "q"):
        dead = [i for i, row in enumerate(here.tolist()) if row in (0, 4)]
        assert torch.equal(have[name][:, :, dead], torch.zeros_like(have[name][:, :, dead]))
    for name in ("k", "v"):
        unseen = [i for i, row in enumerate(here.tolist()) if row == 1]
        assert torch.equal(have[name][:, :, unseen], torch.zeros_like(have[name][:, :, unseen]))
    assert all(value.isfinite().all() for value in have.values())


@ranks(2)
def test_an_empty_batch_and_a_sequence_of_nothing_pass(world: World) -> None:
    order = contiguous_order((2, 1))
    local = [torch.zeros(0, 2, rows_in(order[world.rank]), 4, requires_grad=True) for _ in range(3)]
    out = ring_attention(*local, q_spans=order, kv_spans=order, group=dist.group.WORLD)
    out.sum().backward()
    assert out.shape == local[0].shape == local[0].grad.shape
    nothing = [torch.zeros(1, 2, rows_in(order[world.rank]), 4), torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 0, 4)]
    out = ring_attention(*nothing, q_spans=order, kv_spans=contiguous_order((0, 0)), group=dist.group.WORLD)
    assert torch.equal(out, torch.zeros_like(out))


# --- dropout ----------------------------------------------------------------------------------------------------------


@ranks(4)
def test_a_split_of_batch_and_heads_drops_the_same_weights(world: World) -> None:
    q, k, v, _ = (world.randn(2, 4, 6, 8) for _ in range(4))
    options: dict[str, Any] = {"q_spans": None, "kv_spans": None, "group": None, "dropout_p": 0.5, "dropout_seed": 3}
    whole = ring_attention(q, k, v, **options)
    batch, head = world.rank // 2, world.rank % 2 * 2
    part = ring_attention(*(x[batch : batch + 1, head : head + 2] for x in (q, k, v)), dropout_offset=(batch, head), **options)
    torch.testing.assert_close(part, whole[batch : batch + 1, head : head + 2], rtol=0, atol=1e-12)


def test_dropout_keeps_the_share_it_should_and_other_seeds_drop_others() -> None:
    at = torch.arange(300)
    masks = [ring.Dropout(p=0.3, seed=seed).multipliers((2, 3), at, at, torch.float64) for seed in (1, 2, 1 << 40)]
    for mask in masks:
        assert abs((mask == 0).double().mean() - 0.3) < 0.003
        assert abs(mask.mean() - 1) < 0.005
    kept = torch.stack([mask != 0 for mask in masks]).double()
    agreement = (kept[0] == kept[1]).double().mean(), (kept[0] == kept[2]).double().mean(), (kept[0, 0, 0] == kept[0, 1, 2]).double().mean()
    assert all(abs(share - 0.58) < 0.01 for share in agreement)  # 0.7^2 + 0.3^2
    neighbours = (kept[0, :, :, :-1] == kept[0, :, :, 1:]).double().mean(), (kept[0, ..., :-1] == kept[0, ..., 1:]).double().mean()
    assert all(abs(share - 0.58) < 0.01 for share in neighbours)


# --- refusals ---------------------------------------------------------------------------------------------------------

GOOD = contiguous_order((2, 2))
Z = torch.zeros


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_spans": contiguous_order((2, 1, 1))}, "3 entries for a group of 2 ranks"),
        ({"kv_spans": contiguous_order((3, 3))}, "its spans"),
        ({"kv_spans": (((0, 2),), ((1, 3),))}, "position 1 is held twice"),
        ({"kv_spans": (((0, 2),), ((3, 5),))}, "position 2 is held by no rank"),
        ({"k": Z(1, 3, 2, 4), "v": Z(1, 3, 2, 4)}, "not a multiple of 3 key heads"),
        ({"enable_gqa": False}, "enable_gqa is False"),
        ({"k": Z(1, 2, 2, 8)}, "q is 4 wide and k 8"),
        ({"v": Z(1, 2, 1, 4)}, "k and v differ"),
        ({"q": Z(4, 2, 4)}, "4-D"),
        ({"q": Z(1, 4, 2, 4, dtype=torch.float64)}, "one floating dtype"),
        ({"mask": Z(2, 2, dtype=torch.bool)}, "all keys in global order"),
        ({"mask": Z(2, 4, dtype=torch.int64)}, "boolean or is added"),
        ({"q_segments": Z(1, 2, dtype=torch.int64)}, "segment ids come for queries and keys"),
        ({"dropout_p": 0.5}, "dropout_seed"),
        ({"dropout_p": 1.5, "dropout_seed": 1}, "0..1"),
        ({"window": (-1, 0)}, "0 or more"),
    ],
)
@ranks(2)
def test_arguments_that_do_not_fit_are_refused_on_every_rank(world: World, change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"q": Z(1, 4, 2, 4), "k": Z(1, 2, 2, 4), "v": Z(1, 2, 2, 4), "q_spans": GOOD, "kv_spans": GOOD}
    with pytest.raises((InputError, ValueError), match=message):
        ring_attention(**{**given, **change}, group=dist.group.WORLD)


@ranks(2)
def test_a_second_derivative_is_refused(world: World) -> None:
    local = [Z(1, 2, 2, 4).requires_grad_() for _ in range(3)]
    out = ring_attention(*local, q_spans=GOOD, kv_spans=GOOD, group=dist.group.WORLD)
    (grad,) = torch.autograd.grad(out.sum(), local[:1], create_graph=True)
    with pytest.raises(MissingShardPatch, match="second derivative"):
        grad.sum().backward()

"""Neighbourhood attention: windows as defined, one process against several, and the rows that travel."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from shardwise.functional import neighborhood, neighborhood_attention
from shardwise.testing import assert_same_as_unsharded, count_communication, ranks, shard

WINDOWS = [(3, 1, False), (4, 1, False), (5, 3, False), (16, 1, False), (3, 2, True), (4, 4, True)]


def window(i, size, kernel, dilation, causal):
    """The positions that position `i` attends to, by the definition: the nearest ones on its lane, or those up to it."""
    lane = range(i % dilation, size, dilation)
    if causal:
        return [j for j in lane if j <= i][-kernel:]
    away = {j: (abs(j - i) - (0.5 if j < i else 0)) for j in lane}  # among equally near ones the earlier
    return sorted(sorted(lane, key=away.get)[:kernel])


@pytest.mark.parametrize(("kernel", "dilation", "causal"), WINDOWS)
def test_windows_are_the_nearest_positions(kernel, dilation, causal):
    side = neighborhood.Window(size=17, kernel=kernel, dilation=dilation, causal=causal)
    first, last = (bound.tolist() for bound in side.bounds(0, 17))
    for i in range(17):
        assert list(range(first[i], last[i] + 1, dilation)) == window(i, 17, kernel, dilation, causal)


@pytest.mark.parametrize("tile", [1, 8, 10_000])
def test_two_dims_by_definition(tile, monkeypatch):
    monkeypatch.setattr(neighborhood, "TILE", tile)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 7, 6, 2, 4).double(), torch.randn(2, 7, 6, 2, 4).double(), torch.randn(2, 7, 6, 2, 3).double()
    out = neighborhood_attention(q, k, v, (3, 2), dilation=(2, 1), is_causal=(False, True), scale=0.3)
    for x, y in itertools.product(range(7), range(6)):
        seen = list(itertools.product(window(x, 7, 3, 2, False), window(y, 6, 2, 1, True)))
        keys, values = (torch.stack([t[:, a, b] for a, b in seen], 2) for t in (k, v))
        scores = torch.einsum("bhd,bhnd->bhn", q[:, x, y], keys) * 0.3
        torch.testing.assert_close(out[:, x, y], torch.einsum("bhn,bhnd->bhd", scores.softmax(-1), values))


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (5, 3, 6, 2), (14, 0, 1, 1)], ids=str)
@ranks(4)
def test_split_equals_one_process(world, sizes):
    q, k, v = world.randn(1, 16, 2, 4), world.randn(1, 16, 2, 4), world.randn(1, 16, 2, 3)
    parts = [shard(x, world.mesh, dim=1, sizes=sizes) for x in (q, k, v)]
    for kernel, dilation, causal in WINDOWS:

        def attention(a, b, c, kernel=kernel, dilation=dilation, causal=causal):
            return neighborhood_attention(a, b, c, kernel, dilation=dilation, is_causal=causal)

        assert_same_as_unsharded(attention, *parts)
    assert_same_as_unsharded(attention, parts[0], k, v)
    assert_same_as_unsharded(attention, q, parts[1], v)


@ranks(4)
def test_dims_of_a_mesh_split_any_dim(world):
    mesh = world.make_mesh((2, 2), ("a", "b"))
    x = world.randn(2, 3, 5, 4, 2, 3)
    for split in (1, 1), (1, 2), (3, 2), (2, 0), (4, 1), (1, 5), (3, None):
        part = shard(x, mesh, placements=[Replicate() if dim is None else Shard(dim) for dim in split])
        assert_same_as_unsharded(lambda a: neighborhood_attention(a, a * 0.5, a, (3, 2, 2), dilation=(1, 2, 1)), part)


@ranks(4)
def test_only_the_rows_in_reach_travel(world):
    q, k, v = (shard(world.randn(2, 16, 5, 3, 4), world.mesh, dim=1, sizes=(5, 3, 6, 2)) for _ in range(3))
    with count_communication() as sent:
        neighborhood_attention(q, k, v, (5, 3))
    # windows of 5 at the border rows 5, 8, 14: rows 5 before and after; the last rank's windows are moved inwards, to row 11
    received = {0: 2, 1: 4, 2: 4, 3: 3}
    row = 2 * 5 * 3 * (4 + 4) * 8
    total = torch.tensor([float(sent.bytes)])
    torch.distributed.all_reduce(total)
    assert sent.calls == 1
    assert total.item() == sum(received.values()) * row


@ranks(2)
def test_windows_that_do_not_fit_are_refused_together(world):
    x = shard(world.randn(1, 8, 2, 3), world.mesh, dim=1)
    with pytest.raises(ValueError, match="a window of 5 positions, 2 apart, does not fit 8 positions"):
        neighborhood_attention(x, x, x, 5, dilation=2)
    with pytest.raises(ValueError, match="give all three the shape"):
        neighborhood_attention(x, x[:, :, :1], x, 3)

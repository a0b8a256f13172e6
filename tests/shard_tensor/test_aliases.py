"""A write into a tensor shows in its views and a write into a view shows in the tensor, where the shard had to be copied too; what is no
view in one process shares no memory here."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

from shardwise import MissingShardPatch
from shardwise.testing import assert_same_as_unsharded, ranks, shard

# Views that copy the shard when dim 1 of (4, 5, 6) is split, or dim 1 of one row.
VIEWS = {
    "flatten": lambda x: x.view(-1),
    "joined": lambda x: x.reshape(20, 6),
    "one row": lambda x: x[:, 3],
    "rows in a loop": lambda x: x.unbind(1)[3],
    "squeezed": lambda x: x[:, 2:3].squeeze(1),
    "expanded": lambda x: x[:, 2:3].expand(4, 3, 6),
    "view of a view": lambda x: x.view(-1).view(4, 30)[:, 3:],
    "copied view of a copied view": lambda x: x.view(20, 6).view(-1)[1:].view(7, 17),
    "view of a row": lambda x: x[:, 3].t(),
    "row of a view": lambda x: x.transpose(0, 1)[3],
    "another dtype": lambda x: x[:, 1].view(torch.int64),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "windows": lambda x: x.unfold(2, 3, 2),
    "windows of the split dim": lambda x: x.detach().unfold(1, 2, 1),
    "as strided": lambda x: x.as_strided((4, 2), (30, 1)),
}


@pytest.mark.parametrize("name", VIEWS)
@ranks(3)
def test_a_write_shows_in_views_taken_before(world, name):
    def program(x):
        x = x * 1
        view = VIEWS[name](x)
        before = view * 2
        x.mul_(3)
        x[:, 1:3] += 0.5
        return x, view, before, view.sin() if view.is_floating_point() else view + 1

    assert_same_as_unsharded(program, shard(world.randn(4, 5, 6), world.mesh, dim=1, sizes=(3, 0, 2)), grads=False)
    if name not in ("another dtype", "windows of the split dim", "rows in a loop"):  # torch itself refuses a gradient of the last
        assert_same_as_unsharded(program, shard(world.randn(4, 5, 6), world.mesh, dim=1, sizes=(3, 0, 2)))


@pytest.mark.parametrize(
    "name", [name for name in VIEWS if name not in ("expanded", "diagonal", "windows", "windows of the split dim", "as strided")]
)
@ranks(3)
def test_a_write_into_a_view_shows_in_the_tensor_and_its_other_views(world, name):
    def program(x):
        x = x * 1
        with torch.no_grad():
            views = [VIEWS[name](x), x.view(-1), x[:, 3], x.detach()]
            views[0].fill_(3)
            views[1][7:90].mul_(2)
        return x, *views

    assert_same_as_unsharded(program, shard(world.randn(4, 5, 6), world.mesh, dim=1, sizes=(3, 0, 2)), grads=False)


@ranks(2)
def test_in_inference_mode_too(world):
    def program(x):
        with torch.inference_mode():
            y = x + 1
            views = y.view(-1), y[1], x.view(-1), x[0]
            y.mul_(2)
            x.add_(1)
            views[0][:4].zero_()
            return y, x, *views

    assert_same_as_unsharded(program, shard(world.randn(5, 4), world.mesh, dim=0, sizes=(1, 4)), grads=False)
    assert_same_as_unsharded(program, shard(world.randn(5, 4), world.mesh, dim=1, sizes=(1, 3)), grads=False)


@ranks(2)
def test_windows_with_a_gradient_refuse_to_be_used_after_a_write(world):
    x = shard(world.randn(6, 4), world.mesh, dim=0, sizes=(1, 5)).requires_grad_() * 1
    windows = x.unfold(0, 3, 1)
    x.mul_(2)
    with pytest.raises(MissingShardPatch, match="after a write"):
        windows.sum()


@ranks(2)
def test_a_write_that_would_not_reach_what_is_viewed_is_refused(world):
    x = shard(world.randn(6, 4), world.mesh, dim=0, sizes=(1, 5))
    for view in (x.unfold(0, 3, 1), x.unfold(0, 3, 1)[1], x.unfold(0, 3, 1)[2:].view(-1)):
        with pytest.raises(MissingShardPatch, match="would not reach"):
            view.mul_(2)


@ranks(2)
def test_views_of_a_split_pending_sum_cannot_be_written_into(world):
    mesh = world.make_mesh((1, 2), ("a", "b"))
    x = shard(world.randn(4, 5), mesh, placements=(Partial(), Shard(1)))
    with pytest.raises(MissingShardPatch, match="view"):
        x.view(-1).mul_(2)
    with pytest.raises(MissingShardPatch, match="view"):
        x[:, 1].mul_(2)


@ranks(2)
def test_a_copied_view_keeps_no_graph(world):
    x = shard(world.randn(6, 4), world.mesh, dim=0).requires_grad_()
    y = x.sin()
    row = y[2].detach()
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None and row.shape == (4,)


@ranks(2)
def test_results_that_are_no_views_have_memory_of_their_own(world):
    def padded(x):
        return F.pad(x, (0, 0, 0, 2))

    def cropped(x):
        return F.pad(x, (0, 0, 0, -1))

    def shuffled(x):
        return F.channel_shuffle(x[None], 1)

    def flat(x):  # a copy, since the columns lie apart
        return x[:, 1].flatten()

    for function in (padded, cropped, shuffled, flat):

        def program(x, function=function):
            y = function(x)
            y.mul_(2)
            return x, y

        for dim in (0, 1):
            assert_same_as_unsharded(program, shard(world.randn(5, 4), world.mesh, dim=dim), grads=False)


@ranks(2)
def test_rows_of_a_replicated_tensor_are_copied_when_it_is_split(world):
    whole = world.randn(6, 4)
    x = shard(whole, world.mesh, placements=(Replicate(),))
    x.redistribute(placements=(Shard(0),)).zero_()
    torch.testing.assert_close(x.to_local(), whole)


@ranks(2)
def test_results_have_the_memory_order_of_one_process(world):
    """On which it depends whether `flatten` is a view."""

    def program(x):
        views = x[:, 1:3], x.t(), x.t()[1:3], x[:, None].expand(5, 2, 4)
        results = [y for v in views for y in (v * 2, v + v, v.clone(), v.contiguous(), v.sin() + 1, v.double())]
        for y in results:
            y.flatten().zero_()
        return results

    for dim in (0, 1):
        assert_same_as_unsharded(program, shard(world.randn(5, 4), world.mesh, dim=dim), grads=False)


@ranks(2)
def test_contiguous_is_a_new_tensor_where_it_is_one_in_one_process(world):
    """Whose hook is its own."""

    def program(x):
        result = []
        for y in (x.unfold(0, 3, 2), x[:, 1], x.diagonal(), x.t() * 2):
            z = y.contiguous()
            z.register_hook(lambda g: g * 0.5)
            result += [y, z]
        return result

    for dim in (0, 1):
        assert_same_as_unsharded(program, shard(world.randn(5, 4), world.mesh, dim=dim))


@ranks(2)
def test_ops_that_change_dims_in_place_are_refused(world):
    """Of a square matrix too, whose shape stays."""
    x = shard(world.randn(4, 4), world.mesh, dim=0)
    for change in (lambda: x.transpose_(0, 1), lambda: x.t_(), lambda: x.unsqueeze_(0)):
        with pytest.raises(MissingShardPatch, match="in place"):
            change()


@ranks(3)
def test_one_rank_alone_may_print_a_view(world):
    x = shard(world.randn(4, 5, 6), world.mesh, dim=1, sizes=(3, 0, 2)) * 1
    row = x[:, 3]
    x.mul_(3)
    if world.rank == 0:
        assert "before a write" in repr(row)
    assert row.full_tensor().equal(x.full_tensor()[:, 3])
    assert "before a write" not in repr(row)


STRIDED = {
    "transposed": lambda x: x.transpose(0, 1).as_strided((3, 4, 6), (6, 24, 1)),
    "chunks that overlap": lambda x: x.transpose(0, 2).reshape(6, 20).as_strided((6, 9, 4), (1, 12, 6)),
    "a part of a part": lambda x: x[:, 1:4].as_strided((4, 3), (30, 6)),
    "one row repeated": lambda x: x[:1].expand(3, 5, 6).as_strided((2, 5), (0, 6)),
    "an offset": lambda x: x.transpose(1, 2).as_strided((4, 5), (30, 6), 2),
    "scattered": lambda x: x.transpose(0, 1).as_strided_scatter(x[0] * 0 + 2, (5, 6), (6, 1)),
}


@pytest.mark.parametrize("name", STRIDED)
@ranks(3)
def test_strided_views_count_in_the_memory_of_one_process(world, name):
    for sizes in ((3, 0, 2), (2, 2, 1)):
        x = shard(world.randn(4, 5, 6), world.mesh, dim=1, sizes=sizes)
        grads = name != "scattered"  # torch itself has none for that of a transposed tensor
        assert_same_as_unsharded(lambda x: STRIDED[name](x * 1), x if grads else x.detach(), grads=grads)


@ranks(3)
def test_a_strided_view_of_what_is_not_gathered_is_refused(world):
    x = shard(world.randn(4, 5, 6), world.mesh, dim=1, sizes=(3, 0, 2))
    with pytest.raises(MissingShardPatch, match="between or beyond the elements"):
        x[:, :2].as_strided((4, 3), (30, 6))
    with pytest.raises(MissingShardPatch, match="between or beyond the elements"):
        x[:, :, :2].as_strided((4, 5, 3), (30, 6, 1))

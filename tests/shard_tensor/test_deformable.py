"""Deformable convolution: as an operator of a library, which is gathered, and written in plain torch, which stays split.

torchvision, whose `deform_conv2d` it stands for, is no dependency of the tests; the operator here has the same arguments.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise.testing import assert_same_as_unsharded, ranks, shard


def deformed(x, offset, weight):
    """A 3 x 3 convolution, padding 1, whose nine taps are moved by `offset` [batch, 18, rows, columns] (row, column for each tap)."""
    rows, columns = x.shape[2:]
    out = 0
    y, z = torch.arange(rows, dtype=x.dtype).view(-1, 1), torch.arange(columns, dtype=x.dtype)
    for tap in range(9):
        at_y = y + (tap // 3 - 1) + offset[:, 2 * tap]
        at_z = z + (tap % 3 - 1) + offset[:, 2 * tap + 1]
        grid = torch.stack([(2 * at_z + 1) / columns - 1, (2 * at_y + 1) / rows - 1], -1)
        sampled = F.grid_sample(x, grid, align_corners=False)
        out = out + torch.einsum("bihw,oi->bohw", sampled, weight[:, :, tap // 3, tap % 3])
    return out


@pytest.fixture(scope="module")
def operator():
    library = torch.library.Library("made_up_vision", "DEF")
    library.define("deform_conv2d(Tensor x, Tensor offset, Tensor weight) -> Tensor")
    library.define("deform_conv2d_backward(Tensor grad, Tensor x, Tensor offset, Tensor weight) -> (Tensor, Tensor, Tensor)")

    def gradients(grad, *inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(deformed(*inputs), inputs, grad)

    def backward(*tensors):
        with ThreadPoolExecutor(1) as outside:  # of the operator, where autograd is off
            return outside.submit(gradients, *tensors).result()

    library.impl("deform_conv2d", deformed, "CPU")
    library.impl("deform_conv2d_backward", backward, "CPU")
    torch.library.register_autograd(
        "made_up_vision::deform_conv2d",
        lambda ctx, grad: torch.ops.made_up_vision.deform_conv2d_backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lib=library,
    )
    yield torch.ops.made_up_vision.deform_conv2d
    library._destroy()


def inputs(world):
    x, offset = world.randn(2, 3, 10, 5), 0.4 * world.randn(2, 18, 10, 5)
    return *(shard(t, world.mesh, dim=2, sizes=(7, 1, 2)) for t in (x, offset)), world.randn(4, 3, 3, 3)


@pytest.mark.filterwarnings("ignore:made_up_vision")
def test_operator_is_gathered(operator):
    @ranks(3)
    def check(world):
        assert_same_as_unsharded(operator, *inputs(world))
        with shardwise.fallback("error"), pytest.raises(shardwise.MissingShardPatch, match=r"made_up_vision\.deform_conv2d"):
            operator(*inputs(world))

    check()


@ranks(3)
def test_plain_form_stays_split(world):
    with shardwise.fallback("error"):
        assert_same_as_unsharded(deformed, *inputs(world))
        assert deformed(*inputs(world))._spec.sizes[2] == (7, 1, 2)

"""Samples of picking and placing by index, and of writing into slices."""

import torch

from tests.samples import Sample, T

aten = torch.ops.aten


def at(*numbers, like=None, size=None):
    """Indices below a size."""
    return torch.tensor(numbers) % (size or like.shape[0])


def written(x, key, value):
    y = x * 1
    y[key] = value
    return y * 2


def plain_written(x, key, value):
    y = torch.zeros(x.shape, dtype=x.dtype)
    y[key] = value
    return y + x


PICKS = [
    Sample(
        name="index by a plain tensor",
        function=lambda x: (
            x[at(3, 1, 9, 3, size=x.shape[0])],
            x[:, at(3, 1, 9, size=x.shape[1])],
            x[..., [2, 0]],
            x[at(-1, size=x.shape[0])],
            x[torch.tensor(0)],
        ),
        inputs=(T("nck"),),
        split="nc",
    ),
    Sample(
        name="index by a plain matrix",
        function=lambda x: (
            x[at(*range(6), size=x.shape[0]).view(2, 3)],
            x[1:, at(*range(6), size=x.shape[1]).view(3, 2)],
            x[None, at(4, 5, size=x.shape[0])],
        ),
        inputs=(T("nck"),),
        split="nc",
    ),
    Sample(
        name="index several dims",
        function=lambda x: (
            x[at(3, 1, 9, size=x.shape[0]), at(0, 1, 5, size=x.shape[1])],
            x[at(3, 1, size=x.shape[0]), :, at(0, 2, size=3)],
            x[:, at(3, 1, size=x.shape[1]), at(0, 2, size=3)],
            x[at(3, 1, size=x.shape[0]).view(2, 1), at(0, 2, 5, size=x.shape[1])],
        ),
        inputs=(T("nck"),),
        split="nc",
    ),
    Sample(name="index by split indices", function=lambda x, i: (x[i], x[:, 0][i]), inputs=(T("nck"), T("mc", "index", "n")), split="nmc"),
    Sample(
        name="index several dims by split indices", function=lambda x, i: x[i, i * 0], inputs=(T("nck"), T("m", "index", "n")), split="nm"
    ),
    Sample(
        name="index by a mask and a number", function=lambda x, m: x[m, torch.tensor([1])], inputs=(T("nck"), T("nc", "bool")), split="nc"
    ),
    Sample(
        name="plain table by split indices", function=lambda x, i: x[i] * 2, inputs=(T("nk"), T("m", "index", "n")), split="m", plain=(0,)
    ),
    Sample(
        name="index_select",
        function=lambda x, i: (
            x.index_select(0, i),
            torch.index_select(x, 1, at(3, 3, 0, size=x.shape[1])),
            x.index_select(2, torch.tensor([0])),
        ),
        inputs=(T("nck"), T("m", "index", "n")),
        split="ncm",
    ),
    Sample(
        name="take",
        function=lambda x: (x.take(at(3, 30, 5, size=x.numel())), torch.take(x, at(3, 1, size=x.numel()).view(2, 1))),
        inputs=(T("nc"),),
        split="nc",
    ),
    Sample(
        name="gather",
        function=lambda x, i, j: (x.gather(0, i), torch.gather(x, 1, j), x.gather(1, j[:1, :2])),
        inputs=(T("nc"), T("nc", "index", "n"), T("nc", "index", "c")),
        split="nc",
    ),
    Sample(name="gather from a line", function=lambda x, i: x.gather(0, i), inputs=(T("n"), T("m", "index", "n")), split="nm"),
    Sample(
        name="take_along_dim",
        function=lambda x: (
            torch.take_along_dim(x, x.detach().argsort(1), 1),
            x.take_along_dim(x.detach().argmax(0, keepdim=True), 0),
            x.take_along_dim(at(3, 30, size=x.numel())),
        ),
        inputs=(T("nck"),),
        split="nc",
    ),
    Sample(
        name="aten picks",
        function=lambda x, i: (
            aten.index.Tensor(x, [i]),
            aten.index_select.default(x, 0, i),
            aten.gather.default(x, 1, x.argsort(1)),
            aten.take.default(x, i),
        ),
        inputs=(T("nc"), T("m", "index", "n")),
        split="ncm",
        grads=False,
    ),
]

PLACES = [
    Sample(
        name="scatter",
        function=lambda x, y, i, j: (
            x.scatter(0, i.argsort(0), y),
            torch.scatter(x, 1, j.argsort(1)[:, :2], 2.0),
            x.scatter(0, i, 1.5),
        ),
        inputs=(T("nc"), T("nc"), T("nc", "index", "n"), T("nc", "index", "c")),
        split="nc",
    ),
    Sample(
        name="scatter in place",
        function=lambda x, y, i: (x.clone().scatter_(0, i.argsort(0), y), x.new_zeros(x.shape).scatter_add_(0, i, y)),
        inputs=(T("nc"), T("nc"), T("nc", "index", "n")),
        split="nc",
    ),
    Sample(
        name="scatter_add",
        function=lambda x, y, i: (x.scatter_add(0, i, y), torch.scatter_add(x, 0, i[:1], y[:1])),
        inputs=(T("nc"), T("mc"), T("mc", "index", "n")),
        split="nmc",
        vary="nm",
    ),
    Sample(
        name="scatter_add into a line",
        function=lambda x, y, i: x.scatter_add(0, i, y),
        inputs=(T("n"), T("m"), T("m", "index", "n")),
        split="nm",
    ),
    Sample(
        name="scatter_add of rows",
        function=lambda x, i: x.new_zeros(7, x.shape[1]).scatter_add_(0, i.unsqueeze(1).expand(-1, x.shape[1]), x),
        inputs=(T("mc"), T("m", "index", 7)),
        split="mc",
    ),
    Sample(
        name="scatter_reduce",
        function=lambda x, y, i: (
            x.scatter_reduce(0, i, y, "amax"),
            torch.scatter_reduce(x, 0, i, y, "mean", include_self=False),
            x.scatter_reduce(0, i, y, "sum"),
            x.detach().clone().scatter_reduce_(0, i, y, "amin"),
        ),
        inputs=(T("nc"), T("mc"), T("mc", "index", "n")),
        split="nmc",
        vary="nm",
    ),
    Sample(
        name="index_add",
        function=lambda x, y, i: (
            x.index_add(0, i, y),
            torch.index_add(x, 0, i, y, alpha=2),
            x.new_zeros(x.shape).index_add_(0, i, y),
        ),
        inputs=(T("nc"), T("mc"), T("m", "index", "n")),
        split="nmc",
    ),
    Sample(
        name="index_add into a line",
        function=lambda x, y, i: x.index_add(0, i, y),
        inputs=(T("n"), T("m"), T("m", "index", "n")),
        split="nm",
    ),
    Sample(
        name="index_copy and index_fill",
        function=lambda x, y: (
            x.index_copy(0, torch.tensor([0]), y[:1]),
            torch.index_copy(x, 1, torch.tensor([0]), y[:, :1]),
            x.clone().index_copy_(0, torch.tensor([0]), y[:1]),
            torch.index_fill(x, 0, torch.tensor([0]), 2.0),
            x.index_fill(1, torch.tensor([-1]), 2.0),
            x.clone().index_fill_(0, torch.tensor([0]), 1.0),
        ),
        inputs=(T("nc"), T("nc")),
        split="nc",
    ),
    Sample(
        name="index_reduce",
        function=lambda x, y, i: (
            torch.index_reduce(x, 0, i, y, "amax"),
            x.index_reduce(0, i, y, "amin"),
            x.clone().index_reduce_(0, i, y, "mean"),
        ),
        inputs=(T("nc"), T("mc"), T("m", "index", "n")),
        split="nmc",
        grads=False,
    ),
    Sample(
        name="index_put",
        function=lambda x, y, i: (
            torch.index_put(x, (i,), y, True),
            x.index_put((i,), y, accumulate=True),
            x.detach().clone().index_put_((i, i * 0), y[:, 0], True),
        ),
        inputs=(T("nc"), T("mc"), T("m", "index", "n")),
        split="nmc",
    ),
    Sample(
        name="aten places",
        function=lambda x, y, i: (
            aten.scatter.src(x, 0, i.argsort(0), y),
            aten.scatter.value(x, 0, i, 1.0),
            aten.scatter_add.default(x, 0, i, y),
            aten.scatter_reduce.two(x, 0, i, y, "amax"),
            aten.index_add.default(x, 0, i[:, 0], y),
            aten.index_copy.default(x, 0, i[:1, 0], y[:1]),
            aten.index_reduce.default(x, 0, i[:, 0], y, "amax"),
            aten.index_put.default(x, [i[:1, 0]], y[:1]),
            aten.index_put_.default(x.clone(), [i[:1, 0]], y[:1]),
            aten.index_add_.default(x.clone(), 0, i[:, 0], y),
            aten.scatter_add_.default(x.clone(), 0, i, y),
        ),
        inputs=(T("nc"), T("nc"), T("nc", "index", "n")),
        split="nc",
        grads=False,
    ),
]

WRITES = [
    Sample(
        name="write by mask",
        function=lambda x, m: (written(x, m, 0.5), written(x, m[:, 0], 0.5), written(x, (slice(None), m[0]), 2.0)),
        inputs=(T("nc"), T("nc", "bool")),
        split="nc",
    ),
    Sample(
        name="write values by mask",
        function=lambda x, m: (written(x, m, x[m] * 3), written(x, m[:, 0], x[0])),
        inputs=(T("nc"), T("nc", "bool")),
        split="nc",
    ),
    Sample(
        name="write by index",
        function=lambda x: (
            written(x, at(3, 1, size=x.shape[0]), x[:1] * 3),
            written(x, (slice(None), at(1, size=x.shape[1])), x[:, :1] * 3),
            written(x, [0], 7.0),
            written(x, (slice(1, None), at(1, size=x.shape[1])), x[1:, :1]),
        ),
        inputs=(T("nc"),),
        split="nc",
    ),
    Sample(
        name="write slices into a plain tensor",
        function=lambda x: (
            plain_written(x, slice(1, None), x[1:] * 2),
            plain_written(x, (Ellipsis, slice(0, 2)), x[..., :2] * 2),
            plain_written(x, 0, x[0]),
            plain_written(x, at(1, size=x.shape[0]), x[:1]),
            plain_written(x, x.detach() > 0, 2.0),
            plain_written(x, slice(None), x.sum(0)),
        ),
        inputs=(T("nc"),),
        split="nc",
    ),
    Sample(
        name="pointwise into a plain tensor",
        function=lambda x: (
            torch.zeros(x.shape, dtype=x.dtype).add_(x),
            torch.zeros(x.shape, dtype=x.dtype).copy_(x),
            torch.ones(x.shape, dtype=x.dtype).mul_(x),
            torch.ones(x.shape, dtype=x.dtype).sub_(x),
            torch.ones(x.shape, dtype=x.dtype).div_(x),
            _augmented(torch.ones(x.shape, dtype=x.dtype), x),
            torch.zeros(x.shape, dtype=x.dtype).masked_fill_(x.detach() > 0, 3.0),
            torch.zeros(x.shape[1], dtype=x.dtype).add_(x.sum(0)),
        ),
        inputs=(T("nc"),),
        split="nc",
    ),
]


def _augmented(y, x):
    y += x
    y -= x * 2
    y *= x
    y /= x + 20
    return y


SAMPLES = [*PICKS, *PLACES, *WRITES]

"""Samples of ops along a dim: scans, sorting, flipping, repeating, and of results whose size depends on data."""

import torch

from tests.samples import Sample, T

aten = torch.ops.aten
X = (T("nck"),)


def both(name, function, **options):
    """A sample over two split dims, the op along each of them."""
    return Sample(name=name, function=lambda x: (*_tuple(function(x, 0)), *_tuple(function(x, 1))), inputs=X, split="nc", **options)


def _tuple(value):
    return tuple(value) if isinstance(value, tuple) else (value,)


SCANS = [
    both("cumsum", torch.cumsum),
    both("cumsum method in float32", lambda x, d: x.cumsum(dim=d, dtype=torch.float32), dtypes=(torch.float32,)),
    both("cumprod", torch.cumprod),
    both("logcumsumexp", torch.logcumsumexp),
    both("cummax", torch.cummax),
    both("cummin", torch.cummin),
    both("cumsum of a line", lambda x, d: x.select(1 - d, 0).select(1, 0).cumsum(0)),
    Sample(
        name="cumulative methods", function=lambda x: (x.cumprod(0), x.logcumsumexp(0), *x.cummax(0), *x.cummin(0)), inputs=X, split="nc"
    ),
    Sample(name="cumsum of counts", function=lambda m: m.cumsum(0), inputs=(T("nc", "bool"),), split="nc"),
    Sample(
        name="aten scans",
        function=lambda x: (aten.cumsum.default(x, 0), aten.cumprod.default(x, 0), aten.logcumsumexp.default(x, 1)),
        inputs=X,
        split="nc",
    ),
    both("diff", lambda x, d: x.diff(dim=d)),
]

ORDER = [
    both("sort", torch.sort),
    both("sort descending, stable", lambda x, d: x.sort(dim=d, descending=True, stable=True)),
    both("argsort", lambda x, d: (torch.argsort(x, d), x.argsort(d, descending=True))),
    both("topk", lambda x, d: (*torch.topk(x, min(3, x.shape[d]), d), *x.topk(min(2, x.shape[d]), d, largest=False))),
    both("kthvalue", lambda x, d: (*torch.kthvalue(x, (x.shape[d] + 1) // 2, d), *x.kthvalue(1, d, keepdim=True))),
    both("median", lambda x, d: (*torch.median(x, d), *x.median(d, keepdim=True))),
    both("nanmedian", lambda x, d: (*torch.nanmedian(x, d), *x.nanmedian(d))),
    both("mode", lambda x, d: (torch.mode(x.detach().round(), d)[0], x.detach().round().mode(d)[0])),
    both("quantile", lambda x, d: (torch.quantile(x, 0.3, d), x.quantile(x.new_tensor([0.1, 0.8]), d, keepdim=True))),
    both("nanquantile", lambda x, d: (torch.nanquantile(x, 0.3, d), x.nanquantile(0.5, dim=d, interpolation="lower"))),
    Sample(
        name="quantile and median of everything", function=lambda x: (x.quantile(0.4), torch.median(x), x.nanmedian()), inputs=X, split="nc"
    ),
    Sample(name="msort", function=lambda x: (torch.msort(x), x.msort()), inputs=X, split="nc"),
    Sample(name="sort of a line", function=lambda x: (*x.sort(), *x.topk(1)), inputs=(T("n"),), split="n"),
    Sample(
        name="aten order",
        function=lambda x: (
            *aten.sort.default(x, 0),
            *aten.sort.stable(x, stable=True, dim=1),
            aten.argsort.default(x, 0),
            *aten.topk.default(x, 1, 0),
            *aten.kthvalue.default(x, 1, 0),
            *aten.median.dim(x, 0),
            *aten.nanmedian.dim(x, 0),
            aten.mode.default(x.detach().round(), 0)[0],
        ),
        inputs=X,
        split="nc",
        grads=False,
    ),
]

MOVES = [
    Sample(name="flip", function=lambda x: (x.flip(0), torch.flip(x, (0, 1)), x.flip(-2, 2)), inputs=X, split="nc"),
    Sample(name="fliplr and flipud", function=lambda x: (x.fliplr(), torch.flipud(x), torch.fliplr(x), x.flipud()), inputs=X, split="nc"),
    Sample(name="rot90", function=lambda x: (x.rot90(1, (0, 1)), torch.rot90(x, -1, (1, 2)), x.rot90(2), x.rot90(4)), inputs=X, split="nc"),
    Sample(name="roll", function=lambda x: (x.roll(3, 0), torch.roll(x, (-5, 2), (1, 0)), x.roll(1, 2), x.roll(7)), inputs=X, split="nc"),
    Sample(
        name="repeat",
        function=lambda x: (x.repeat(2, 1, 1), x.repeat(1, 3, 2), x.repeat(2, 1, 2, 1), x.repeat(0, 1, 1)),
        inputs=X,
        split="nc",
    ),
    Sample(name="tile", function=lambda x: (x.tile(2), torch.tile(x, (2, 1, 1))), inputs=X, split="nc"),
    Sample(
        name="repeat_interleave",
        function=lambda x: (
            x.repeat_interleave(2, 0),
            torch.repeat_interleave(x, 3, dim=1),
            x.repeat_interleave(torch.arange(x.shape[0]) % 3, 0),
            x.repeat_interleave(2),
        ),
        inputs=X,
        split="nc",
    ),
    Sample(
        name="repeat_interleave by split counts",
        function=lambda x, n: x.repeat_interleave(n, 0),
        inputs=(T("nc"), T("n", "index", 3)),
        split="n",
    ),
    Sample(
        name="aten moves",
        function=lambda x: (aten.flip.default(x, [0, 1]), aten.roll.default(x, [2], [0]), aten.repeat.default(x, [2, 1, 1])),
        inputs=X,
        split="nc",
        grads=False,
    ),
]

COUNTS = [
    Sample(name="mask", function=lambda x, m: (x[m], x[x > 0]), inputs=(T("nck"), T("nck", "bool")), split="nc"),
    Sample(name="mask of the first dims", function=lambda x, m: (x[m], x[:, m[0]]), inputs=(T("nck"), T("nc", "bool")), split="nc"),
    Sample(name="plain mask", function=lambda x, m: x[m], inputs=(T("nck"), T("n", "bool")), split="nc", plain=(1,)),
    Sample(
        name="masked_select",
        function=lambda x, m: (torch.masked_select(x, m), x.masked_select(x > 0)),
        inputs=(T("nck"), T("ck", "bool")),
        split="nc",
    ),
    Sample(
        name="masked_scatter",
        function=lambda x, m: (
            torch.masked_scatter(x, m, x * 2),
            x.masked_scatter(m, x.flip(0)),
            x.clone().masked_scatter_(m, x.detach() + 1),
        ),
        inputs=(T("nck"), T("nck", "bool")),
        split="nc",
    ),
    Sample(
        name="nonzero", function=lambda m: (m.nonzero(), *m.nonzero(as_tuple=True), *torch.where(m)), inputs=(T("nck", "bool"),), split="nc"
    ),
    Sample(
        name="unique",
        function=lambda i: (i.unique(), *torch.unique(i, return_inverse=True, return_counts=True)),
        inputs=(T("nc", "index", 7),),
        split="nc",
    ),
    Sample(
        name="bincount",
        function=lambda i, x: (torch.bincount(i), i.bincount(minlength=20), torch.bincount(i, x.detach())),
        inputs=(T("n", "index", 7), T("n")),
        split="n",
        grads=False,
    ),
    Sample(name="histc", function=lambda x: (torch.histc(x.detach(), 5), torch.histc(x.detach(), 5, -1, 1)), inputs=X, split="nc"),
    Sample(
        name="searchsorted",
        function=lambda x, s: (
            torch.searchsorted(s.sort(1)[0], x),
            torch.searchsorted(s[0].sort()[0], x, right=True),
            torch.bucketize(x, s[0].sort()[0]),
        ),
        inputs=(T("nc"), T("nk")),
        split="nc",
        grads=False,
    ),
]

DIAGONALS = [
    Sample(
        name="tril and triu",
        function=lambda x: (x.tril(), torch.triu(x, 2), x.tril(-1), x.clone().tril_(1), x.clone().triu_()),
        inputs=(T("knc"),),
        split="nc",
    ),
    Sample(
        name="diagonal",
        function=lambda x: (x.diagonal(), torch.diagonal(x, 2), x.diagonal(-3, 1, 0), x.diagonal(0, 1, 2)),
        inputs=X,
        split="nc",
    ),
    # with both dims split the diagonal is a copy, and a write into it is refused on all ranks
    Sample(name="write into a diagonal", function=lambda x: _filled(x * 1), inputs=(T("nk"),), split="n", sizes={"k": 12}),
    Sample(name="write into a diagonal, columns", function=lambda x: _filled(x * 1), inputs=(T("nk"),), split="k", sizes={"n": 12}),
    Sample(name="diag", function=lambda x: (torch.diag(x), x.diag(1), x[:, 0].diag(), x[0].diag(-2)), inputs=(T("nc"),), split="nc"),
    Sample(
        name="diag_embed",
        function=lambda x: (x.diag_embed(), torch.diag_embed(x, 2), torch.diag_embed(x, -1, 0, 2)),
        inputs=(T("nc"),),
        split="nc",
    ),
    Sample(name="trace", function=lambda x: (x.trace(), torch.trace(x)), inputs=(T("nc"),), split="nc"),
    Sample(
        name="aten.diagonal_backward",
        function=lambda g: aten.diagonal_backward.default(g, [g.shape[0], 5, 5], 1, 1, 2),
        inputs=(T("ni"),),
        split="n",
        sizes={"i": 4},
        grads=False,
    ),
]


def _filled(x):
    if x.shape[0] >= 1:
        x.diagonal().fill_(0.5)
    return x * 2


SAMPLES = [*SCANS, *ORDER, *MOVES, *COUNTS, *DIAGONALS]

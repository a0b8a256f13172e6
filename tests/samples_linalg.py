"""Samples of linear algebra, distances and recurrent layers."""

import torch
from torch import nn

from tests.samples import Sample, T

aten = torch.ops.aten
LA = torch.linalg


def positive(x):
    """Well conditioned symmetric matrices of the last two dims."""
    return x.mT @ x + 5 * torch.eye(x.shape[-1], dtype=x.dtype)


def recurrent(name, kind, split, **options):
    """A layer with fixed weights, in double or single precision as its input is."""

    def function(x):
        layer = kind(3, 4, batch_first=True, **options).to(x.dtype)
        for number, weight in enumerate(layer.parameters()):
            weight.data.copy_(torch.linspace(-0.5, 0.4, weight.numel()).roll(number).view(weight.shape))
        output, state = layer(x)
        return (output, *(state if isinstance(state, tuple) else (state,)))

    return Sample(name=name, function=function, inputs=(T("btc"),), split=split, vary="", sizes={"b": 2} if split == "t" else {})


SAMPLES = [
    Sample(
        name="inverse and determinant",
        function=lambda x: (LA.inv(positive(x)), LA.det(positive(x) / 20), LA.slogdet(positive(x))[1]),
        inputs=(T("bnk"),),
        split="bnk",
    ),
    Sample(
        name="solve",
        function=lambda x, y: (LA.solve(positive(x), y), LA.solve(positive(x), y[..., 0]), LA.solve(positive(x), y[0])),
        inputs=(T("bnk"), T("bkm")),
        split="bk",
    ),
    Sample(
        name="cholesky",
        function=lambda x, y: (
            LA.cholesky(positive(x)),
            torch.cholesky_solve(y, LA.cholesky(positive(x))),
            LA.solve_triangular(positive(x).triu(), y, upper=True),
        ),
        inputs=(T("bnk"), T("bkm")),
        split="bk",
    ),
    Sample(
        name="eigenvalues",
        function=lambda x: (
            LA.eigvalsh(positive(x)),
            LA.eigh(positive(x))[0],
            LA.eigvals(positive(x)).real.sort(-1)[0],
            LA.eig(positive(x))[0].real.sort(-1)[0],
        ),
        inputs=(T("bnk"),),
        split="bn",
        grads=False,
    ),
    Sample(
        name="singular values",
        function=lambda x: (LA.svdvals(x), LA.matrix_norm(x, ord="nuc"), LA.qr(positive(x))[1].abs(), LA.pinv(positive(x))),
        inputs=(T("bnk"),),
        split="bn",
    ),
    Sample(
        name="matrix functions",
        function=lambda x: (LA.matrix_exp(positive(x) * 0.01), LA.matrix_power(positive(x) * 0.1, 2)),
        inputs=(T("bnk"),),
        split="bn",
    ),
    Sample(
        name="aten matrices",
        function=lambda x: (
            aten.linalg_lu_factor_ex.default(positive(x))[0],
            aten._linalg_eigvals.default(positive(x)).real.sort(-1)[0],
            aten.linalg_pinv.atol_rtol_tensor(positive(x), atol=torch.tensor(0.0), rtol=torch.tensor(1e-9)),
        ),
        inputs=(T("bnk"),),
        split="bn",
        grads=False,
    ),
    Sample(
        name="cross",
        function=lambda x, y: (torch.cross(x, y, dim=2), LA.cross(x, y[:1]), x.cross(y, 2)),
        inputs=(T("nck"), T("nck")),
        split="nck",
        sizes={"k": 3},
        vary="nc",
    ),
    Sample(
        name="tensordot",
        function=lambda x, y: (torch.tensordot(x, y, ([0, 1], [0, 1])), torch.tensordot(x, y.permute(2, 0, 1), 1)),
        inputs=(T("nck"), T("nck")),
        split="nc",
    ),
    Sample(
        name="cdist",
        function=lambda x, y: (torch.cdist(x, y), torch.cdist(x, y, p=1.0), torch.cdist(x[0], y)),
        inputs=(T("bnk"), T("bmk")),
        split="bnmk",
    ),
    Sample(name="cdist to plain points", function=lambda x, y: torch.cdist(x, y), inputs=(T("nk"), T("mk")), split="n", plain=(1,)),
    Sample(
        name="nearest points",
        function=lambda x, y: torch.cdist(x, y).topk(min(3, y.shape[0]), largest=False),
        inputs=(T("nk"), T("mk")),
        split="nm",
    ),
    recurrent("LSTM", nn.LSTM, "bt", num_layers=2),
    recurrent("LSTM of few sequences", nn.LSTM, "t", num_layers=2, bidirectional=True),
    recurrent("LSTM with a projection", nn.LSTM, "t", proj_size=2),
    recurrent("GRU", nn.GRU, "t", bidirectional=True),
    recurrent("RNN", nn.RNN, "t"),
    recurrent("RNN with relu", nn.RNN, "bt", nonlinearity="relu", bias=False),
]

"""Samples of sums, moments, norms, extremes and softmax."""

import torch
import torch.nn.functional as F

from tests.samples import FLOATS, Sample, T

aten = torch.ops.aten
INTEGERS = (*FLOATS, torch.int64)


def over_dims(name, reduce, dtypes=FLOATS, kind="normal", grads=True):
    """A reduction over everything, the first dim, and the last with keepdim."""

    def run(x):
        return reduce(x), reduce(x, dim=0), reduce(x, dim=-1, keepdim=True)

    return Sample(name=name, function=run, inputs=(T("nck", kind),), split="nc", dtypes=dtypes, grads=grads)


def over_several(name, reduce, dtypes=FLOATS):
    return [
        Sample(name=f"{name} of two dims", function=lambda x: reduce(x, dim=(0, 2)), inputs=(T("nck"),), split="nck", dtypes=dtypes),
        Sample(name=f"{name} of no dims", function=lambda x: reduce(x, dim=()), inputs=(T("nc"),), split="nc", dtypes=dtypes),
    ]


def lowered(x):
    """Ties: few different values."""
    return (x * 2).round()


SUMS = [
    over_dims("sum", torch.sum, INTEGERS),
    *over_several("sum", torch.sum, INTEGERS),
    over_dims("mean", torch.mean),
    *over_several("mean", torch.mean),
    over_dims("nansum", lambda x, **k: torch.nansum(torch.where(x > 1, torch.nan, x), **k)),
    over_dims("nanmean", lambda x, **k: torch.nanmean(torch.where(x > 1, torch.nan, x), **k)),
    Sample(
        name="sum method",
        function=lambda x: (x.sum(1, True), x.sum((0, 1)), x.sum(axis=0), x.sum(keepdims=True, dim=0)),
        inputs=(T("nck"),),
        split="nck",
    ),
    Sample(name="mean method", function=lambda x: (x.mean(1, True), x.mean((0, 1)), x.mean(axis=0)), inputs=(T("nck"),), split="nck"),
    Sample(name="sum to another dtype", function=lambda x: x.sum(0, dtype=torch.float32), inputs=(T("nc"),), split="nc"),
    Sample(name="sum of a bool", function=lambda x: (x.sum(), x.sum(0)), inputs=(T("nc", "bool"),), split="nc"),
    Sample(name="sum of sums", function=lambda x: (x.sum(0).sum(0) * 2, x.mean(1).mean()), inputs=(T("nc"),), split="nc"),
    Sample(name="centred", function=lambda x: x - x.mean(0, keepdim=True), inputs=(T("nc"),), split="nc"),
    Sample(
        name="count_nonzero",
        function=lambda x: (torch.count_nonzero(x > 0), torch.count_nonzero(x > 0, dim=0), (x > 1).count_nonzero((0, 1))),
        inputs=(T("nc"),),
        split="nc",
        grads=False,
    ),
]

MOMENTS = [
    over_dims("var", torch.var),
    over_dims("std", torch.std),
    over_dims("var without correction", lambda x, **k: torch.var(x, correction=0, **k)),
    Sample(name="std of two dims", function=lambda x: torch.std(x, dim=(0, 2)), inputs=(T("nck"),), split="nck"),
    Sample(name="var_mean", function=lambda x: (*torch.var_mean(x, 0), *torch.std_mean(x)), inputs=(T("nck"),), split="nck"),
    Sample(
        name="var of large numbers",
        function=lambda x: torch.var(x + 1e3, 0) + torch.var(x + 1e3),
        inputs=(T("nc"),),
        split="nc",
        dtypes=(torch.float64,),
    ),
]

NORMS = [
    Sample(
        name=f"vector norm {order}",
        function=lambda x, o=order: (torch.linalg.vector_norm(x, o), torch.linalg.vector_norm(x, o, dim=0)),
        inputs=(T("nck"),),
        split="nck",
    )
    for order in (2, 1, 3.5, float("inf"), float("-inf"), -1)
] + [
    Sample(
        name="vector norm 0", function=lambda x: torch.linalg.vector_norm(x, 0, dim=(0, 1)), inputs=(T("nck"),), split="nck", grads=False
    ),
    Sample(
        name="norm method", function=lambda x: (x.norm(), x.norm(1, dim=0), x.norm(dim=-1, keepdim=True)), inputs=(T("nc"),), split="nc"
    ),
    Sample(name="normalize", function=F.normalize, inputs=(T("nc"),), split="nc"),
    Sample(
        name="aten.norm", function=lambda x: (aten.norm.Scalar(x, 2), aten.norm.ScalarOpt_dim(x, 2, [0])), inputs=(T("nc"),), split="nc"
    ),
    Sample(
        name="aten.norm with dtype",
        function=lambda x: (
            aten.norm.ScalarOpt_dtype(x, 2, dtype=torch.float64),
            aten.norm.ScalarOpt_dim_dtype(x, 2, [0], True, dtype=torch.float64),
        ),
        inputs=(T("nc"),),
        split="nc",
        grads=False,
    ),
    Sample(name="aten.foreach_norm", function=lambda x, y: torch._foreach_norm([x, y], 2), inputs=(T("nc"), T("n")), split="nc"),
]

EXTREMES = [
    over_dims("amax", torch.amax, INTEGERS),
    over_dims("amin", torch.amin, INTEGERS),
    *over_several("amax", torch.amax, INTEGERS),
    over_dims("amax with ties", lambda x, **k: torch.amax(lowered(x), **k)),
    over_dims("max", torch.max, INTEGERS),
    over_dims("min", torch.min, INTEGERS),
    over_dims("max with ties", lambda x, **k: torch.max(lowered(x), **k)),
    over_dims("argmax", torch.argmax, INTEGERS, grads=False),
    over_dims("argmin with ties", lambda x, **k: torch.argmin(lowered(x), **k), grads=False),
    over_dims("max with NaN", lambda x, **k: torch.max(torch.where(x > 1, torch.nan, x.detach()), **k), grads=False),
    over_dims("min with NaN", lambda x, **k: torch.min(torch.where(x > 1, torch.nan, x.detach()), **k), grads=False),
    over_dims("argmax with NaN", lambda x, **k: torch.argmax(torch.where(x > 1, torch.nan, x), **k), grads=False),
    Sample(
        name="max method",
        function=lambda x: (x.max(1).values, x.max(0, True)[0], x.min(dim=0).values, x.max()),
        inputs=(T("nc"),),
        split="nc",
    ),
    Sample(name="max of two", function=lambda x, y: (torch.max(x, y), x.min(y)), inputs=(T("nc"), T("nc")), split="nc"),
    Sample(name="aminmax", function=lambda x: (*torch.aminmax(x), *torch.aminmax(x, dim=0, keepdim=True)), inputs=(T("nc"),), split="nc"),
    over_dims("any", lambda x, **k: torch.any(x > 1, **k), INTEGERS, grads=False),
    over_dims("all", lambda x, **k: torch.all(x > -1, **k), INTEGERS, grads=False),
    Sample(
        name="any of dims",
        function=lambda x: (x.any(dim=(0, 1)), x.all(dim=(0, 1), keepdim=True), x.any(dim=()), x.all(dim=[])),
        inputs=(T("nck", "bool"),),
        split="nck",
    ),
    over_dims("prod", torch.prod, INTEGERS),
    over_dims("prod without gradient", lambda x, **k: torch.prod(x.detach(), **k), INTEGERS, grads=False),
    over_dims("prod with zeros", lambda x, **k: torch.prod(torch.where(x > 1.5, 0, x), **k)),
    Sample(
        name="logsumexp",
        function=lambda x: (x.logsumexp(0), x.logsumexp((0, 1)), x.logsumexp(-1, keepdim=True)),
        inputs=(T("nck"),),
        split="nck",
    ),
    Sample(
        name="logsumexp of infinities",
        function=lambda x: torch.where(x > 0.5, -torch.inf, x.detach()).logsumexp(0),
        inputs=(T("nc"),),
        split="nc",
        grads=False,
    ),
]

SOFTMAX = [
    Sample(name=name, function=lambda x, f=f: (f(x, dim=-1), f(x * 3, dim=0)), inputs=(T("nck"),), split="nc")
    for name, f in [("softmax", F.softmax), ("log_softmax", F.log_softmax), ("softmin", F.softmin)]
] + [
    Sample(name="softmax method", function=lambda x: x.softmax(1) * x.log_softmax(1), inputs=(T("nck"),), split="nck"),
    Sample(name="softmax to float64", function=lambda x: x.softmax(1, dtype=torch.float64), inputs=(T("nc"),), split="nc"),
    Sample(
        name="softmax with masked rows",
        function=lambda x: torch.where(x > 0, x, -torch.inf).softmax(0),
        inputs=(T("nc"),),
        split="nc",
        grads=False,
    ),
    Sample(
        name="safe softmax",
        function=lambda x: aten._safe_softmax.default(torch.where(x > 1, x, -torch.inf), 0),
        inputs=(T("nc"),),
        split="nc",
        grads=False,
    ),
]

SAMPLES = [*SUMS, *MOMENTS, *NORMS, *EXTREMES, *SOFTMAX]

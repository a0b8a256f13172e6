"""Samples of random ops where nothing is left to chance: how they draw is in tests/shard_tensor/test_random.py."""

import torch
import torch.nn.functional as F

from tests.samples import Sample, T

aten = torch.ops.aten


def sample(name, function, dims="nc", split="nc", **options):
    return Sample(name=name, function=function, inputs=(T(dims),), split=split, **options)


DROPOUT = [
    sample("dropout of nothing and of all", lambda x: (F.dropout(x, 0.0), F.dropout(x, training=False), F.dropout(x, 1.0))),
    sample("dropout in place", lambda x: (F.dropout(x.clone(), 1.0, inplace=True), torch.dropout_(x.clone(), 1.0, True))),
    sample("torch.dropout", lambda x: (torch.dropout(x, 1.0, True), torch.dropout(x, 0.5, False), *torch.native_dropout(x, 0.5, False))),
    *(
        sample(f.__name__, lambda x, f=f: (f(x, 1.0), f(x, 0.0), f(x, 0.5, False), f(x * 1, 1.0, True, True)), dims="nchw", split="nch")
        for f in (F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
    ),
    sample("dropout1d", lambda x: (F.dropout1d(x, 1.0), F.dropout1d(x[0], 1.0)), dims="ncl", split="ncl"),
    sample("torch.alpha_dropout", lambda x: (torch.alpha_dropout(x, 0.5, False), torch.alpha_dropout(x, 1.0, True))),
    sample("torch.feature_alpha_dropout", lambda x: torch.feature_alpha_dropout(x, 1.0, True)),
    sample("torch.feature_dropout", lambda x: torch.feature_dropout(x, 1.0, True)),
]

FILLS = [
    sample(
        "fill with random numbers",
        lambda x: [
            x.detach().clone().normal_(2.0, 0.0),
            x.detach().clone().uniform_(3.0, 3.0),
            x.detach().clone().bernoulli_(1.0),
            x.detach().clone().exponential_() * 0,
            x.detach().clone().cauchy_(1.0, 1e-300).round(),
            x.detach().clone().geometric_(0.5) * 0,
            x.detach().clone().log_normal_() * 0,
            x.detach().clone().random_(3, 4),
            x.detach().clone().random_(1),
            x.detach().clone().random_() * 0,
        ],
        dtypes=(torch.float64,),
    ),
    sample(
        "random numbers like a tensor",
        lambda x: [
            torch.rand_like(x) * 0,
            torch.randn_like(x) * 0,
            torch.randint_like(x, 1),
            torch.randint_like(x, 4, 5),
            torch.bernoulli(torch.ones_like(x.detach())),
            torch.bernoulli(x.detach(), 1.0),
            torch.normal(x.detach(), 0.0),
            torch.normal(0.0, x.detach().abs()) * 0,
            torch.normal(x.detach(), torch.zeros_like(x)),
        ],
    ),
    sample(
        "random operators",
        lambda x: [
            aten.normal_functional(x.detach(), 1.0, 0.0),
            aten.uniform(x.detach(), 2.0, 2.0),
            aten.exponential(x.detach()) * 0,
            aten.cauchy(x.detach()) * 0,
            aten.geometric(x.detach(), 0.5) * 0,
            aten.log_normal(x.detach()) * 0,
            aten.rand_like.generator(x, generator=None) * 0,
            aten.randn_like.generator(x, generator=None) * 0,
            aten.randint_like.generator(x, 1, generator=None),
            aten.randint_like.low_generator_dtype(x, 1, 2, generator=None),
        ],
        grads=False,
    ),
]

SAMPLES = [*DROPOUT, *FILLS]

"""Random convolutions and splits of their inputs, drawn from a seeded generator, the same on every rank."""

from __future__ import annotations

import itertools
import math
import random

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

from shardwise.testing import shard

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def random_sizes(rng: random.Random, total: int, parts: int) -> tuple[int, ...]:
    """Any sizes, empty ones included, that add up to `total`."""
    cuts = sorted(rng.choices(range(total + 1), k=parts - 1))
    return tuple(stop - start for start, stop in itertools.pairwise([0, *cuts, total]))


def random_split(rng: random.Random, mesh, tensor: torch.Tensor, dims=None):
    """`tensor` with each mesh axis sharding one of `dims` (any by default) or none, in random sizes."""
    dims = range(tensor.ndim) if dims is None else dims
    placements = [rng.choice([Replicate(), *(Shard(dim) for dim in dims for _ in range(3))]) for _ in range(mesh.ndim)]
    sizes = {}
    for dim in dims:
        parts = math.prod(mesh.size(i) for i, p in enumerate(placements) if p == Shard(dim))
        if Shard(dim) in placements:
            sizes[dim] = random_sizes(rng, tensor.shape[dim], parts)
    return shard(tensor, mesh, placements=placements, sizes=sizes)


def random_convolution(rng: random.Random):
    """(dims, input shape, weight shape, bias, arguments of the call)."""
    n = rng.choice((1, 2, 2, 3))
    groups = rng.choice((1, 1, 1, 2, 4))
    channels, outputs = groups * rng.choice((1, 2)), groups * rng.choice((1, 2))
    kernel = [rng.randint(1, 5) for _ in range(n)]
    dilation = [rng.randint(1, 3) for _ in range(n)]
    stride = [rng.randint(1, 4) for _ in range(n)]
    padding = rng.choice(("valid", "same", *4 * ([rng.randint(0, 4) for _ in range(n)],)))
    if padding == "same":
        stride = [1] * n
    least = [d * (k - 1) + 1 for k, d in zip(kernel, dilation)]
    if padding == "same":
        least = [1] * n
    elif padding != "valid":
        least = [max(1, rows - 2 * pad) for rows, pad in zip(least, padding)]
    spatial = [rows + rng.randint(0, 12 if n < 3 else 5) for rows in least]
    shape = ([rng.randint(1, 3)] if rng.random() < 0.8 else []) + [channels, *spatial]
    arguments = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return n, shape, (outputs, channels // groups, *kernel), rng.random() < 0.7, arguments


def random_transposed(rng: random.Random):
    """The same for a transposed convolution."""
    n = rng.choice((1, 2, 2, 3))
    groups = rng.choice((1, 1, 1, 2, 4))
    channels, outputs = groups * rng.choice((1, 2)), groups * rng.choice((1, 2))
    kernel, dilation, stride = ([rng.randint(1, high) for _ in range(n)] for high in (5, 3, 4))
    padding = [rng.randint(0, min(4, d * (k - 1))) for k, d in zip(kernel, dilation)]
    output_padding = [rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation)]
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation)]
    least = [max(1, -(-(2 * p - r + 1) // s) + 1) for p, r, s in zip(padding, reach, stride)]
    spatial = [rows + rng.randint(0, 9 if n < 3 else 3) for rows in least]
    shape = ([rng.randint(1, 3)] if rng.random() < 0.8 else []) + [channels, *spatial]
    arguments = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation, "groups": groups}
    return n, shape, (channels, outputs // groups, *kernel), rng.random() < 0.7, arguments

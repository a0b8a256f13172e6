"""Sample inputs for ops: one table, from which come the fixed tests (`test_samples.py`) and the random sweep (`sweep.py`).

A sample names the dims of its inputs by letters, so that equal letters are equal sizes and are split alike:

    Sample(name="linear", function=F.linear, inputs=(T("bsc"), T("oc"), T("o")), split="bs", plain=(1, 2))

runs with `b` and with `s` split, evenly, unevenly, with one-row and with empty shards, on several meshes. `tests/samples_*.py` hold the
table: each defines a list `SAMPLES`, and a new file is found by its name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardwise.spec.spans import chunk_sizes
from shardwise.testing import shard

Kind = Literal["normal", "positive", "unit", "index", "bool"]
FLOATS = (torch.float64, torch.float32)
SPLIT_SIZE, OTHER_SIZE = 12, 3  # of letters that a sample gives no size


@dataclass(frozen=True)
class T:
    """A tensor input. dims: a letter for each dim.

    kind: `normal` numbers; `positive` from 0.5; `unit` inside (-1, 1); `index` from 0 below `high`, a letter or a number; `bool`.
    """

    dims: str
    kind: Kind = "normal"
    high: str | int = 0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One op and its inputs.

    function: called with the tensors of `inputs`, in order. split: letters along which inputs are sharded; `refused`: letters along which
    the op refuses, on all ranks, with one of `shardwise.errors`. plain: positions of inputs that are always plain tensors, such as weights.
    sizes: of letters (split ones have 12, others 3). vary: letters whose size the sweep may change (by default the split ones).
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[T, ...]
    split: str
    refused: str = ""
    plain: tuple[int, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    vary: str | None = None
    dtypes: tuple[torch.dtype, ...] = FLOATS
    grads: bool = True

    def size(self, letter: str) -> int:
        return self.sizes.get(letter, SPLIT_SIZE if letter in self.split + self.refused else OTHER_SIZE)

    @property
    def letters(self) -> str:
        return "".join(dict.fromkeys("".join(t.dims for t in self.inputs)))

    def __repr__(self) -> str:
        return self.name


def whole_inputs(sample: Sample, *, sizes: Mapping[str, int], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """The unsharded inputs, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [_tensor(t, sizes, dtype, generator) for t in sample.inputs]


def _tensor(t: T, sizes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    shape = [sizes[letter] for letter in t.dims]
    if t.kind == "index":
        high = sizes[t.high] if isinstance(t.high, str) else t.high
        return torch.randint(0, high, shape, generator=generator)
    if t.kind == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(1 if t.kind == "positive" else -9, 10, shape, generator=generator, dtype=dtype)
    x = torch.randn(shape, dtype=dtype, generator=generator)
    if t.kind == "positive":
        return x.abs() + 0.5
    return x.tanh() * 0.9 if t.kind == "unit" else x


def split_inputs(
    sample: Sample, tensors: Sequence[torch.Tensor], mesh: Any, axes: Sequence[str | None], blocks: Mapping[str, Sequence[int]]
) -> list[Any]:
    """The inputs with each mesh axis splitting one letter (None: replicated). An input without a split letter stays plain."""
    result: list[Any] = []
    for number, (t, x) in enumerate(zip(sample.inputs, tensors)):
        placements = tuple(Shard(t.dims.index(letter)) if letter and letter in t.dims else Replicate() for letter in axes)
        if number in sample.plain or not any(isinstance(p, Shard) for p in placements):
            result.append(x)
            continue
        used = {letter for letter in axes if letter and letter in t.dims}
        sizes = {t.dims.index(letter): blocks[letter] for letter in used}
        result.append(shard(x, mesh, placements=placements, sizes=sizes))
    return result


def rows(kind: str, total: int, count: int) -> tuple[int, ...]:
    """`total` rows over `count` ranks: `even` as torch.chunk has it, `uneven`, `one-row` shards, or some `empty` ones."""
    big = count // 2
    match kind:
        case "even":
            return tuple(chunk_sizes(total, count))
        case "uneven":
            sizes = list(chunk_sizes(total, count))
            moved = (sizes[-1] + 1) // 2
            sizes[0], sizes[-1] = sizes[0] + moved, sizes[-1] - moved
            return tuple(sizes)
        case "one-row":
            return tuple(total - count + 1 if rank == big else 1 for rank in range(count))
        case "empty":
            filled = [rank for rank in range(count) if rank % 2 == big % 2]
            shares = iter(chunk_sizes(total, len(filled)))
            return tuple(next(shares) if rank in filled else 0 for rank in range(count))
    raise ValueError(kind)


def all_samples() -> list[Sample]:
    """The table: every `SAMPLES` of `tests/samples_*.py`."""
    files = sorted(Path(__file__).parent.glob("samples_*.py"))
    samples = [sample for file in files for sample in importlib.import_module(f"tests.{file.stem}").SAMPLES]
    names = [sample.name for sample in samples]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"samples with the same name: {sorted(repeated)}")
    return samples

"""Random op cases against one process: `python -m tests.sweep --cases 3000 --seed 0`.

Each case draws an op from the sample table, sizes, a mesh, a placement for each axis and input, rows for each rank (none for some), and a
dtype. It is right when values, gradients and metadata equal those of one process; refused when every rank raises one of `shardwise.errors`;
else wrong, or hung. The exit code is 1 when a case was wrong or hung. `--only N` runs one case of a seed and shows what happened.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardwise.errors import MissingShardPatch, UndeterminedShardingError
from shardwise.testing import RankHang, World, assert_same_as_unsharded, shard
from shardwise.testing.threads import run_in_threads
from tests.samples import Sample, all_samples, whole_inputs

REFUSALS = (MissingShardPatch, UndeterminedShardingError)
MESHES = ((2,), (3,), (4,), (2, 2), (2, 3), (3, 1))
TIMEOUT_S = 30.0
TOLERANCE = {torch.float32: 2e-4, torch.complex64: 2e-4}  # of random cases, which may be badly conditioned


@dataclass(frozen=True, kw_only=True)
class Case:
    """One random case. layouts: for each input its placements and rows by dim, or None for a plain tensor."""

    number: int
    sample: Sample
    sizes: Mapping[str, int]
    mesh: tuple[int, ...]
    dtype: torch.dtype
    layouts: tuple[tuple[tuple[Placement, ...], Mapping[int, tuple[int, ...]]] | None, ...]

    def __str__(self) -> str:
        shapes = [tuple(self.sizes[letter] for letter in t.dims) for t in self.sample.inputs]
        inputs = [f"{shape} {'plain' if layout is None else f'{layout[0]} {layout[1]}'}" for shape, layout in zip(shapes, self.layouts)]
        return f"case {self.number}: {self.sample.name}, {self.dtype}, mesh {self.mesh}, " + "; ".join(inputs)


def draw(samples: list[Sample], seed: int, number: int) -> Case:
    """Case `number` of a seed; one that fails in one process too is drawn again."""
    rng = random.Random(f"{seed}-{number}")
    while True:
        sample = rng.choice(samples)
        vary = sample.split if sample.vary is None else sample.vary
        sizes = {letter: rng.choice((1, 2, 5, 7, 10, 13)) if letter in vary else sample.size(letter) for letter in sample.letters}
        mesh, dtype = rng.choice(MESHES), rng.choice(sample.dtypes)
        try:
            sample.function(*whole_inputs(sample, sizes=sizes, dtype=dtype, seed=number))
        except (RuntimeError, ValueError, IndexError):
            continue
        letters = [rng.choice([*sample.split, *sample.split, None]) for _ in mesh]
        case = Case(number=number, sample=sample, sizes=sizes, mesh=mesh, dtype=dtype, layouts=())
        blocks: dict[tuple[str, int], tuple[int, ...]] = {}
        layouts = tuple(_layout(rng, case, position, letters, blocks) for position in range(len(sample.inputs)))
        if any(layouts):
            return replace(case, layouts=layouts)


def _layout(rng, case, position, letters, blocks):
    """Usually each axis splits its letter; now and then an input lies otherwise, is a pending sum, or is plain."""
    sample, t = case.sample, case.sample.inputs[position]
    if position in sample.plain or not t.dims or rng.random() < 0.08:
        return None
    if rng.random() < 0.15:
        letters, blocks = [rng.choice([*sample.split, None]) for _ in case.mesh], {}
    pending = case.dtype.is_floating_point and t.kind == "normal"
    placements = tuple(
        Partial() if pending and rng.random() < 0.06 else Shard(t.dims.index(letter)) if letter and letter in t.dims else Replicate()
        for letter in letters
    )
    rows = {}
    for dim in {placement.dim for placement in placements if isinstance(placement, Shard)}:
        letter, count = t.dims[dim], prod(size for size, placement in zip(case.mesh, placements) if placement == Shard(dim))
        if (letter, count) not in blocks:
            blocks[letter, count] = random_rows(rng, case.sizes[letter], count)
        rows[dim] = blocks[letter, count]
    return placements, rows


def random_rows(rng: random.Random, total: int, count: int) -> tuple[int, ...]:
    """`total` rows over `count` blocks, some perhaps empty."""
    weights = [rng.choice((0, 1, 1, 2, 3)) for _ in range(count)]
    weights[rng.randrange(count)] += 1
    cuts = [total * sum(weights[: i + 1]) // sum(weights) for i in range(count)]
    return tuple(b - a for a, b in zip([0, *cuts], cuts))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """kind: `right`, `refused`, `wrong` or `hung`. summary: why, in a line. detail: all that is known."""

    kind: str
    summary: str = ""
    detail: str = ""

    @property
    def bad(self) -> bool:
        return self.kind in ("wrong", "hung")


class Tally:
    """Counts verdicts; why what was refused was."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def add(self, verdict: Verdict, why: str) -> None:
        self.counts[verdict.kind] += 1
        if verdict.kind == "refused":
            self.refused[why] += 1

    def report(self, title: str) -> int:
        """Print the counts; the exit code."""
        for text, count in self.refused.most_common():
            print(f"refused {count} times: {text}")
        right, refused, wrong, hung = (self.counts[kind] for kind in ("right", "refused", "wrong", "hung"))
        print(f"{title}: {right} right, {refused} refused on all ranks, {wrong} wrong, {hung} hung")
        return int(wrong + hung > 0)


def run(case: Case) -> Verdict:
    """The case on its ranks against one process."""

    def compare(rank: int) -> None:
        world = World(device=torch.device("cpu"), axes=dict(zip("ab", case.mesh)))
        tensors = whole_inputs(case.sample, sizes=case.sizes, dtype=case.dtype, seed=case.number)
        inputs = [
            x if layout is None else shard(x, world.mesh, placements=layout[0], sizes=layout[1]) for x, layout in zip(tensors, case.layouts)
        ]
        tolerance = TOLERANCE.get(case.dtype)
        assert_same_as_unsharded(case.sample.function, *inputs, grads=case.sample.grads, rtol=tolerance, atol=tolerance)

    return judge(prod(case.mesh), compare)


def judge(size: int, compare: Callable[[int], None]) -> Verdict:
    """What `compare(rank)`, which raises AssertionError where it differs from one process, says on `size` ranks."""

    def rank_function(rank: int) -> tuple[str, str]:
        try:
            compare(rank)
        except REFUSALS as error:
            return "refused", f"{type(error).__name__}: {error}"
        except AssertionError as error:
            return "wrong", str(error)
        return "right", ""

    try:
        results = run_in_threads(size, rank_function, TIMEOUT_S)
    except RankHang as error:
        return Verdict(kind="hung", summary=str(error).partition("\n")[0], detail=str(error))
    except Exception as error:
        notes = ", ".join(getattr(error, "__notes__", []))
        return Verdict(kind="wrong", summary=f"{type(error).__name__}: {error} ({notes})", detail=traceback.format_exc())
    detail = "\n".join(f"rank {rank} {kind}: {text}" for rank, (kind, text) in enumerate(results))
    kinds = {kind for kind, _ in results}
    if kinds == {"right"}:
        return Verdict(kind="right")
    if kinds == {"refused"}:
        texts = {text for _, text in results}
        if len(texts) == 1:
            return Verdict(kind="refused", summary=results[0][1].partition("\n")[0], detail=detail)
        return Verdict(kind="wrong", summary="the ranks refuse with different messages", detail=detail)
    if kinds == {"wrong"} or kinds == {"wrong", "right"}:
        text = next(text for kind, text in results if kind == "wrong")
        return Verdict(kind="wrong", summary=text.splitlines()[-1], detail=detail)
    return Verdict(kind="wrong", summary="some ranks refuse, others do not", detail=detail)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="run case N of the seed and show it")
    parser.add_argument("--op", default="", help="only samples whose name contains this")
    options = parser.parse_args()
    samples = [sample for sample in all_samples() if options.op in sample.name]
    if not samples:
        parser.error(f"no sample is named like {options.op!r}")
    warnings.simplefilter("ignore")
    if options.only is not None:
        case = draw(samples, options.seed, options.only)
        verdict = run(case)
        print(case, verdict.kind, verdict.summary, verdict.detail, sep="\n")
        return int(verdict.bad)
    start = time.monotonic()
    tally = Tally()
    for number in range(options.cases):
        case = draw(samples, options.seed, number)
        verdict = run(case)
        tally.add(verdict, f"{case.sample.name}: {verdict.summary}")
        if verdict.bad:
            print(f"{verdict.kind}: {case}\n    {verdict.summary}", flush=True)
    return tally.report(f"{options.cases} cases of {len(samples)} ops, seed {options.seed}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())

"""Random programs against one process: `python -m tests.programs --cases 1000 --seed 0 [--ranks 3] [--mesh 2x2]`.

Each program is a few lines of Python (`program_steps.py`) on inputs that lie at random: split in any dims over any axes, evenly or not,
with empty shards and shards of one row, pending sums, plain tensors and DTensors. All values at its end, and the gradients of all inputs,
must equal those of one process. A program that is wrong or hung is printed without the lines it can do without, and the exit code is 1.
`--only N` runs one program of a seed and shows what happened.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
import warnings
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from shardwise import ShardTensor
from shardwise.testing import World, assert_same_as_unsharded, shard
from tests.program_steps import LARGEST, ONE, SEVERAL, WRITES, Draw, NoFit
from tests.sweep import Tally, Verdict, judge, random_rows

MESHES = ((2,), (3,), (4,), (2, 2))
BOUND = 30.0  # of values
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}  # by the lowest precision of a program


@dataclass(frozen=True, kw_only=True)
class Input:
    """shape: of the whole. kind: `shard`, `plain` or `dtensor`. placements, rows: of a tensor that is not plain; rows by dim."""

    shape: tuple[int, ...]
    kind: str
    placements: tuple[Placement, ...] = ()
    rows: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        where = ", ".join(str(p) for p in self.placements)
        return f"{self.shape} {self.kind}" + (f" ({where})" + "".join(f", dim {d} in {rows}" for d, rows in self.rows) if where else "")


@dataclass(frozen=True, kw_only=True)
class Program:
    """lines: Python, on `x0`, `x1`, ...; `v1`, `v2`, ... are its values. mode: `grad`, `no_grad` or `inference`."""

    number: int
    mesh: tuple[int, ...]
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    mode: str
    precision: torch.dtype = torch.float64

    def __str__(self) -> str:
        head = [f"program {self.number}: mesh {self.mesh}, {self.mode}"]
        return "\n    ".join([*head, *(f"x{i}: {given}" for i, given in enumerate(self.inputs)), *self.lines])


# ---------------------------------------------------------------------- what a program's lines may call


def relay(x: Any, text: str) -> Any:
    """`x` under the placements `text`, such as "S0 R"."""
    placements = [Replicate() if word == "R" else Shard(int(word[1:])) for word in text.split()]
    result = x.redistribute(placements=placements) if isinstance(x, ShardTensor) else x
    return x * 1 if result is x else result


def whole(x: Any) -> Any:
    return (x.full_tensor() if isinstance(x, ShardTensor) else x) * 1


def autocast(function: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return function()


CALLED = {"torch": torch, "F": F, "checkpoint": checkpoint, "relay": relay, "whole": whole, "autocast": autocast}


def execute(lines: tuple[str, ...], inputs: list[Any]) -> dict[str, Any]:
    """The values by name after the lines."""
    values = {f"x{i}": x for i, x in enumerate(inputs)}
    scope = {**CALLED, **values}
    for line in lines:
        exec(line, scope)
    return {name: value for name, value in scope.items() if re.fullmatch(r"[xv]\d+", name) and isinstance(value, torch.Tensor)}


def outputs(program: Program, inputs: list[Any]) -> list[Any]:
    with torch.inference_mode(program.mode == "inference"):
        return list(execute(program.lines, inputs).values())


def whole_inputs(program: Program) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(program.number)
    return [torch.randn(given.shape, dtype=torch.float64, generator=generator) for given in program.inputs]


# ---------------------------------------------------------------------- drawing


def draw(seed: int, number: int, mesh: tuple[int, ...] | None = None) -> Program:
    """Program `number` of a seed, one that runs in one process, forward and backward."""
    rng = random.Random(f"{seed}-{number}")
    while True:
        chosen = mesh or rng.choice(MESHES)
        sizes = [rng.choice((1, 2, 3, 4, 5, 6, 7, 9)) for _ in range(2)] + [rng.choice((0, 1, 2, 3, 4, 6, 8))]
        inputs = tuple(_input(rng, sizes, chosen, first=i == 0) for i in range(rng.randint(1, 4)))
        mode = rng.choices(("grad", "no_grad", "inference"), weights=(8, 1, 1))[0]
        program = Program(number=number, mesh=chosen, inputs=inputs, lines=(), mode=mode)
        program = _with_lines(rng, program)
        if program.lines and runs(program):
            return program


def _input(rng: random.Random, sizes: list[int], mesh: tuple[int, ...], *, first: bool) -> Input:
    shape = tuple(rng.choice(sizes) for _ in range(rng.choice((1, 2, 2, 2, 3, 3, 4))))
    if prod(shape) > 200:
        shape = shape[:2]
    kind = "shard" if first else rng.choices(("shard", "plain", "dtensor"), weights=(12, 4, 1))[0]
    if kind == "dtensor" and len(mesh) > 1:  # whose own gradient is wrong where two axes split one dim unevenly
        return Input(shape=shape, kind=kind, placements=(Shard(0), Replicate()))
    if kind == "plain":
        return Input(shape=shape if rng.random() < 0.9 else (), kind=kind)
    pending = kind == "shard"
    placements = tuple(
        Partial() if pending and rng.random() < 0.08 else Replicate() if rng.random() < 0.12 else Shard(rng.randrange(len(shape)))
        for _ in mesh
    )
    rows = []
    for dim in sorted({p.dim for p in placements if isinstance(p, Shard)} if pending else ()):
        rows.append((dim, random_rows(rng, shape[dim], prod(n for n, p in zip(mesh, placements) if p == Shard(dim)))))
    return Input(shape=shape, kind=kind, placements=placements, rows=tuple(rows))


def _with_lines(rng: random.Random, program: Program) -> Program:
    wanted = rng.randint(3, 10)
    split = {f"x{i}" for i, given in enumerate(program.inputs) if given.kind == "shard"}
    for _ in range(wanted * 8):
        if len(program.lines) == wanted:
            break
        values = values_of(program)
        assert values is not None
        found = _line(rng, program, values, split)
        if found is None:
            continue
        line, made, steps = found
        longer = replace(program, lines=(*program.lines, line))
        after = values_of(longer)
        if after is None or any(_unsuited(value.data) for value in after.values()):
            continue
        if set(made) - set(after):  # not a tensor
            continue
        program = longer
        if split & set(re.findall(r"[xv]\d+", line.partition("=")[2])) and "whole(" not in line:
            split |= set(made)
        low = torch.bfloat16 if "autocast" in steps else torch.float32 if "single" in steps else torch.float64
        program = replace(program, precision=min(program.precision, low, key=lambda dtype: dtype.itemsize))
    return program


def _line(rng: random.Random, program: Program, values: dict[str, torch.Tensor], split: set[str]) -> tuple[str, list[str], str] | None:
    """A line, the names it makes, and its step."""
    count = 1 + max((int(n) for line in program.lines for n in re.findall(r"v(\d+)", line)), default=0)
    usable = {name: value for name, value in values.items() if name[0] == "v" or program.inputs[int(name[1:])].kind != "dtensor"}
    d = Draw(rng, usable, split, len(program.mesh))
    kind = rng.random()
    try:
        others = [i for i, given in enumerate(program.inputs) if given.kind == "dtensor"]
        if others and kind < 0.2:
            other = rng.choice(others)
            shape = values[f"x{other}"].shape
            return f"v{count} = {d.x(split=True, ok=lambda v: v.shape == shape)} {d.one_of('+', '*')} x{other}", [f"v{count}"], "dtensor"
        if kind < 0.2:
            step = rng.choice(list(WRITES))
            return WRITES[step](d), [], step
        if kind < 0.3:
            step = rng.choice(list(SEVERAL))
            text, results = SEVERAL[step](d)
            names = [f"v{count + i}" for i in range(results)]
            return f"{', '.join(names)} = {text}", names, step
        step = rng.choice(list(ONE))
        return f"v{count} = {ONE[step](d)}", [f"v{count}"], step
    except (NoFit, RuntimeError):  # the latter: of a view that a write has made unusable
        return None


def _unsuited(value: torch.Tensor) -> bool:
    if value.numel() > LARGEST or value.ndim > 5:
        return True
    return value.is_floating_point() and value.numel() > 0 and not float(value.abs().max()) < BOUND


def values_of(program: Program) -> dict[str, torch.Tensor] | None:
    """The values in one process, or None if it does not run there."""
    grad = program.mode == "grad"
    inputs = [x.requires_grad_(grad) for x in whole_inputs(program)]
    try:
        with torch.set_grad_enabled(grad), torch.inference_mode(program.mode == "inference"):
            return execute(program.lines, inputs)
    except Exception:
        return None


def runs(program: Program) -> bool:
    """Whether it runs in one process, with gradients that are finite and not large."""
    values = values_of(program)
    if values is None:
        return False
    if program.mode != "grad":
        return True
    pairs = [value for value in values.values() if value.requires_grad]
    if not pairs:
        return True
    try:
        torch.autograd.backward(pairs, [torch.randn_like(value) for value in pairs])
    except Exception:
        return False
    return all(x.grad is None or not x.numel() or float(x.grad.abs().max()) < 1e4 for name, x in values.items() if name[0] == "x")


# ---------------------------------------------------------------------- running


def run(program: Program) -> Verdict:
    """The program on its ranks against one process."""

    def compare(rank: int) -> None:
        world = World(device=torch.device("cpu"), axes=dict(zip("ab", program.mesh)))
        inputs = [_laid_out(x, given, world.mesh) for x, given in zip(whole_inputs(program), program.inputs)]
        tolerance = TOLERANCE[program.precision]
        assert_same_as_unsharded(
            lambda *args: outputs(program, list(args)), *inputs, grads=program.mode == "grad", rtol=tolerance,
            atol=None if program.precision is torch.float64 else tolerance,
        )  # fmt: skip

    return judge(prod(program.mesh), compare)


def _laid_out(x: torch.Tensor, given: Input, mesh: Any) -> Any:
    if given.kind == "plain":
        return x
    if given.kind == "dtensor":
        return distribute_tensor(x, mesh, given.placements)
    return shard(x, mesh, placements=given.placements, sizes=dict(given.rows))


def shrunk(program: Program, verdict: Verdict) -> Program:
    """The program without the lines that the verdict does not need; what used a dropped value uses what that was made of."""
    again = True
    while again:
        again = False
        for i in reversed(range(len(program.lines))):
            shorter = _without(program, i)
            if shorter is not None and runs(shorter) and run(shorter).kind == verdict.kind:
                program, again = shorter, True
                break
    return program


def _without(program: Program, i: int) -> Program | None:
    before, line, after = program.lines[:i], program.lines[i], program.lines[i + 1 :]
    made = re.match(r"((?:v\d+(?:, )?)+) = ", line)
    if made:
        sources = re.findall(r"\b[xv]\d+\b", line[made.end() :])
        for name in made[1].split(", "):
            if sources:
                after = tuple(re.sub(rf"\b{name}\b", sources[0], each) for each in after)
            elif any(re.search(rf"\b{name}\b", each) for each in after):
                return None
    return replace(program, lines=(*before, *after))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, help="a mesh of one axis of so many ranks, instead of any")
    parser.add_argument("--mesh", help="such as 2x2, instead of any")
    parser.add_argument("--only", type=int, metavar="N", help="run program N of the seed and show it")
    options = parser.parse_args()
    mesh = tuple(int(n) for n in options.mesh.split("x")) if options.mesh else (options.ranks,) if options.ranks else None
    warnings.simplefilter("ignore")
    start = time.monotonic()
    tally = Tally()
    numbers = range(options.cases) if options.only is None else [options.only]
    for number in numbers:
        program = draw(options.seed, number, mesh)
        verdict = run(program)
        tally.add(verdict, verdict.summary)
        if options.only is not None:
            print(program, verdict.kind, verdict.summary, verdict.detail, sep="\n")
        if verdict.bad:
            small = shrunk(program, verdict)
            print(f"{verdict.kind}: {small}\n    -> {run(small).summary}", flush=True)
    return tally.report(f"{len(numbers)} programs, seed {options.seed}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())

"""The smoke matrix: one plain model trained on four ranks under every wrapper, plain and compiled, against one process.

    python -m benchmarks.smoke_matrix                        # starts torchrun itself; exit code 1 when anything differs
    python -m benchmarks.smoke_matrix --backend aot_eager --only fsdp

20 steps in float32: AdamW, clipping at a norm that is always exceeded, accumulation of 1 and of 4 batches. Losses, gradient norms and
weights must agree with one process within 1e-6 relative, and so must what each setup infers; what cannot run must be refused on all ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from tests.parallel.training import LAYOUTS, Setup, build, compile_blocks, data, furthest, infer_split, train_alone, train_split
from torch.distributed.device_mesh import init_device_mesh

from shardwise import DistributedManager, parallelize
from shardwise.data import DomainSampler
from shardwise.errors import InputError

RANKS = 4
TOLERANCE = 1e-6
SINGLE = Setup(ddp=1, domain=1)


def refusals() -> dict[str, Callable[[], object]]:
    """What must be refused, by a piece of the message."""
    manager = DistributedManager()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    return {
        "multiply to 6, the world has 4 ranks": lambda: manager.initialize_mesh((2, 3), ["ddp", "domain"]),
        "axes without names": lambda: parallelize(build(torch.float32), init_device_mesh("cpu", (2, 2))),
        "a multiple of 8": lambda: DomainSampler(64, mesh, global_batch=12, accumulate=4),
        "fewer than one global batch": lambda: DomainSampler(3, mesh, global_batch=4),
    }


def train(setup: Setup, steps: int):
    if setup.ddp * setup.domain == 1:
        return train_alone(torch.float32, steps, setup.compiled, setup.accumulate)
    mesh = init_device_mesh("cpu", (setup.ddp, setup.domain), mesh_dim_names=("ddp", "domain"))
    return train_split(setup, mesh, torch.float32, steps)


def infer(setup: Setup) -> float:
    """The relative difference from one process, the largest of the ranks."""
    expected = build(torch.float32)(data(torch.float32)[0]).detach()
    if setup.ddp * setup.domain == 1:
        model = build(torch.float32)
        compile_blocks(model, setup.compiled)
        with torch.inference_mode():
            mine = model(data(torch.float32)[0])
    else:
        mesh = init_device_mesh("cpu", (setup.ddp, setup.domain), mesh_dim_names=("ddp", "domain"))
        mine, expected = infer_split(setup, mesh, torch.float32), expected.chunk(setup.ddp)[mesh.get_local_rank("ddp")]
    worst = (mine - expected).norm() / expected.norm()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def run_ranks(steps: int, backend: str, only: str) -> int:
    torch.set_num_threads(1)
    DistributedManager.initialize()
    wrong, count = 0, 0

    def say(name: str, good: bool, text: str) -> None:
        nonlocal wrong, count
        count, wrong = count + 1, wrong + (not good)
        if dist.get_rank() == 0:
            print(f"{'equal' if good else 'DIFFERS':8} {name:60} {text}", flush=True)

    references = train_alone(torch.float32, steps)
    for layout in (SINGLE, *LAYOUTS):
        for setup in (layout, replace(layout, compiled=backend)):
            for each in (setup, replace(setup, accumulate=4)):
                if only not in str(each):
                    continue
                began = time.perf_counter()
                far = furthest(train(each, steps), references)
                worst = torch.tensor(max(far.values()), dtype=torch.float64)
                dist.all_reduce(worst, dist.ReduceOp.MAX)
                took = time.perf_counter() - began
                text = "  ".join(f"{name} {value:.1e}" for name, value in far.items())
                say(f"{each}", float(worst) <= TOLERANCE, f"{text}  {took:.0f} s")
            if only in str(setup):
                value = infer(setup)
                say(f"{setup} inference", value <= TOLERANCE, f"outputs {value:.1e}")
    for text, call in refusals().items():
        try:
            call()
            said = "nothing"
        except InputError as error:
            said = str(error)
        refused = torch.tensor(int(text in said))
        dist.all_reduce(refused, dist.ReduceOp.MIN)
        say(f"refused: {text}", bool(refused), "" if refused else said)
    if dist.get_rank() == 0:
        print(f"{count - wrong} of {count} hold")
    DistributedManager.cleanup()
    return int(wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--only", default="", help="run the setups whose name has this text")
    given = parser.parse_args()
    if "RANK" in os.environ:
        return run_ranks(given.steps, given.backend, given.only)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m", "benchmarks.smoke_matrix"]
    return subprocess.call([*command, *sys.argv[1:]], env={"OMP_NUM_THREADS": "1", **os.environ})


if __name__ == "__main__":
    sys.exit(main())

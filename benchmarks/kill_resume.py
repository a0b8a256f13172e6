"""Kill a random rank at a random moment of training, over and over; the run must resume and its losses must not change by a bit.

    python benchmarks/kill_resume.py --kills 50

Ranks are a data axis times a domain axis of two. Every step ends in a checkpoint, every second one written in the background, so that
many kills hit a save. Exit code 1 when a resumed run has another loss, or a checkpoint of a killed run is damaged.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardwise import Checkpoints, clip_grad_norm_, parallelize, param_groups, scatter_tensor


def train(rank: int, ranks: int, folder: Path, rendezvous: Path, steps: int) -> None:
    """What each rank does: resume if there is a checkpoint, train to the end, write each loss as its bits."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("ddp", "domain"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.Dropout(0.2), nn.Conv2d(16, 1, 3, padding=1))
    model = parallelize(model, mesh)
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2)
    checkpoints = Checkpoints(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "checkpoint of step")  # a damaged one
        found = checkpoints.load(model, optimizer)
    source = dist.get_global_rank(mesh["domain"].get_group(), 0)
    replica = mesh.get_local_rank("ddp")
    for step in range(found.step if found else 0, steps):
        x = torch.randn(1, 1, 33, 16, generator=torch.Generator().manual_seed(100 * step + replica))
        xs = scatter_tensor(x, source, mesh["domain"], (Shard(2),))
        ys = scatter_tensor(x.square(), source, mesh["domain"], (Replicate(),))
        loss = F.mse_loss(model(xs), ys)
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        if rank == 0:
            with (folder / "losses.txt").open("a") as file:
                file.write(f"{step} {value.hex()}\n")
        checkpoints.save(step + 1, model, optimizer, wait=step % 2 == 0)
    checkpoints.wait()
    dist.barrier()
    os._exit(0)


def start(folder: Path, ranks: int, steps: int, attempt: int) -> list[BaseProcess]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "shardwise.parallel.wrap", "shardwise.parallel.checkpoint"])
    rendezvous = folder / f"rendezvous{attempt}"
    processes = [context.Process(target=train, args=(rank, ranks, folder, rendezvous, steps)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def losses(folder: Path) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    file = folder / "losses.txt"
    for line in file.read_text().splitlines() if file.exists() else ():
        step, _, value = line.partition(" ")
        found.setdefault(int(step), set()).add(value)
    return found


def finish(processes: list[BaseProcess], what: str) -> None:
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"{what} ended with exit codes {[process.exitcode for process in processes]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="of one training; after its end the next one begins")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        reference = Path(name) / "reference"
        reference.mkdir()
        finish(start(reference, args.ranks, 0, -1), "a run of no steps")  # imports
        began = time.monotonic()
        finish(start(reference, args.ranks, args.steps, 0), "the uninterrupted run")
        whole = time.monotonic() - began
        expected = losses(reference)
        kills, trainings, resumed_at = 0, 0, []
        while kills < args.kills:
            trainings += 1
            folder = Path(name) / f"training{trainings}"
            folder.mkdir()
            for attempt in range(args.kills + 1):
                processes = start(folder, args.ranks, args.steps, attempt)
                if kills == args.kills:
                    finish(processes, "the resumed run")
                    break
                processes[0].join(chance.uniform(0.1, 1.0) * whole)
                if all(process.exitcode == 0 for process in processes):
                    break
                if any(process.exitcode for process in processes):
                    sys.exit(f"a resumed run failed by itself: exit codes {[process.exitcode for process in processes]}")
                processes[chance.randrange(args.ranks)].kill()
                for process in processes:  # as a launcher does once a rank is gone
                    process.kill()
                    process.join()
                kills += 1
                done = sorted(path.name for path in folder.glob("step_*"))
                resumed_at.append(int(done[-1].removeprefix("step_")) if done else 0)
            have = losses(folder)
            wrong = {step: values for step, values in have.items() if values != expected[step]}
            if wrong:
                sys.exit(f"after {kills} kills losses differ from the uninterrupted run: {wrong}")
        print(
            f"{kills} kills in {trainings} trainings on {args.ranks} ranks; last complete steps {resumed_at}; every loss equal to the bit"
        )


if __name__ == "__main__":
    main()

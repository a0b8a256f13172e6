"""Run one function on 1, 2, 4, ... local ranks and print what it measured, side by side. Shared by the examples."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise import DistributedManager

Run = Callable[[argparse.Namespace], dict[str, object]]


def main(run: Run, parser: argparse.ArgumentParser) -> None:
    """Call `run(options)` on every rank and print the table of what rank 0 returned.

    Started plainly, it starts `--ranks` local processes itself, one size of world after the other. Under torchrun it takes that world.
    """
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="sizes of world to compare, when not under torchrun")
    parser.add_argument("--plot", type=Path, help="write the seconds by ranks to this picture (needs matplotlib)")
    options = parser.parse_args()
    if "RANK" in os.environ:
        row = _measure(run, options)
        if int(os.environ["RANK"]) == 0:
            print_table([row])
        return
    rows = [_start(run, options, ranks) for ranks in options.ranks]
    print_table(rows)
    if options.plot:
        _plot(rows, options.plot)


def _measure(run: Run, options: argparse.Namespace) -> dict[str, object]:
    DistributedManager.initialize()
    try:
        return {"ranks": DistributedManager().world_size} | run(options)
    finally:
        DistributedManager.cleanup()


def _start(run: Run, options: argparse.Namespace, ranks: int) -> dict[str, object]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "shardwise.shard_tensor"])
    results = context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(run, options, rank, ranks, port, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"{ranks} ranks ended with exit codes {[process.exitcode for process in processes]}")
    return json.loads(results.get())


def _rank(run: Run, options: argparse.Namespace, rank: int, ranks: int, port: int, results) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    row = _measure(run, options)
    if rank == 0:
        results.put(json.dumps(row))


def seconds(step: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds of `step` on the slowest rank, after one call that does not count."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return largest(sorted(times[1:])[repeats // 2])


def largest(value: float) -> float:
    """The largest of the ranks' values."""
    tensor = torch.tensor(value, dtype=torch.float64, device=DistributedManager().device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def error(mine: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((mine - expected).abs().max() / expected.abs().max())


def print_table(rows: list[dict[str, object]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    first = next((row["seconds"] for row in rows if isinstance(row.get("seconds"), float)), None)
    cells = []
    for row in rows:
        cells.append([_text(row.get(name, "")) for name in names])
        if first is not None:
            took = row.get("seconds")
            cells[-1].append(f"{first / took:.2f}" if isinstance(took, float) else "")
    head = [*names, "speed-up"] if first is not None else names
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    for line in [head, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _plot(rows: list[dict[str, object]], path: Path) -> None:
    from matplotlib.figure import Figure

    points = [(row["ranks"], row["seconds"]) for row in rows if "seconds" in row]
    axes = (figure := Figure()).add_subplot()
    axes.plot(*zip(*points, strict=True), marker="o", label="measured")
    axes.plot([r for r, _ in points], [points[0][1] * points[0][0] / r for r, _ in points], linestyle="--", label="ideal")
    axes.set(xlabel="ranks", ylabel="seconds", xscale="log", yscale="log")
    axes.legend()
    figure.savefig(path)

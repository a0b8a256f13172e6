"""Public models split over ranks against one process: output, input gradient and every weight's gradient.

    python -m benchmarks.zoo                     # 4 ranks, equal shards
    python -m benchmarks.zoo --ranks 3 --uneven
    python -m benchmarks.zoo --names transformers

Ranks are threads of one process. `share` is what the fullest rank keeps for backward, as a part of what one process keeps: 1 / ranks
at best, 1 if everything was gathered. Exit code 1 if a model differs.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from dataclasses import dataclass

import torch
from torch.distributed.tensor.placement_types import Shard

from benchmarks.zoo_models import ZOO, Entry
from shardwise.errors import MissingShardPatch
from shardwise.shard_tensor import ShardTensor, scatter_tensor
from shardwise.testing import World, count_communication, measure_saved_bytes, shard
from shardwise.testing.threads import run_in_threads


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`verdict`: exact, wrong or refused. `error`: the largest difference relative to the largest value of its tensor."""

    verdict: str
    error: float
    share: float
    sent_bytes: int
    message: str = ""


def uneven_sizes(rows: int, ranks: int) -> tuple[int, ...]:
    """Sizes that differ: the first rank has twice the rows of the last, about."""
    weights = [2 * ranks - i for i in range(ranks)]
    sizes = [rows * w // sum(weights) for w in weights]
    sizes[0] += rows - sum(sizes)
    return tuple(sizes)


def run(world: World, entry: Entry, *, uneven: bool) -> Outcome:
    """Run one entry on this rank."""
    whole, ours = (world.same(lambda: entry.build().double().train(entry.train)) for _ in range(2))
    full = entry.inputs()
    differentiable = full[0].is_floating_point()
    with measure_saved_bytes(exclude=whole.parameters()) as alone:
        x = full[0].clone().requires_grad_(differentiable)
        expected = entry.run(whole, x, *full[1:])
    weights = torch.linspace(0.5, 1.5, expected.numel(), dtype=expected.dtype).view(expected.shape)
    (expected * weights).sum().backward()
    if uneven:
        part = shard(full[0], world.mesh, dim=entry.dim, sizes=uneven_sizes(full[0].shape[entry.dim], world.size))
        part = part.requires_grad_() if differentiable else part
    else:
        part = scatter_tensor(full[0], 0, world.mesh, (Shard(entry.dim),), requires_grad=differentiable)
    try:
        with count_communication() as sent, measure_saved_bytes(exclude=ours.parameters()) as kept:
            got = entry.run(ours, part, *full[1:])
        result = got.full_tensor() if isinstance(got, ShardTensor) else got
        (result * weights).sum().backward()
    except MissingShardPatch as refusal:
        return Outcome(verdict="refused", error=float("nan"), share=float("nan"), sent_bytes=0, message=str(refusal))
    pairs = [(result, expected)]
    if differentiable:
        pairs.append((part.grad.full_tensor(), x.grad))
    pairs += [(p.grad, q.grad) for p, q in zip(ours.parameters(), whole.parameters(), strict=True) if q.grad is not None]
    largest = max(b.abs().max().item() for _, b in pairs if b.numel())  # a bias before a norm has gradient 0: only rounding is left of it
    errors = [float("inf") if a is None else _difference(a, b, 1e-6 * largest) for a, b in pairs]
    return Outcome(
        verdict="exact" if max(errors) < 1e-6 else "wrong", error=max(errors), share=kept.peak / max(alone.peak, 1), sent_bytes=sent.bytes
    )


def _difference(a: torch.Tensor, b: torch.Tensor, least: float) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp(min=least)).item() if b.numel() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--names", default="", help="only entries that match this pattern")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    print(f"{'model':32s}{'verdict':>9s}{'error':>10s}{'share':>8s}{'sent':>12s}{'s':>7s}")
    bad = 0
    for name, entry in ZOO.items():
        if not re.search(options.names, name):
            continue
        began = time.perf_counter()

        def body(rank: int, entry: Entry = entry) -> Outcome:
            return run(World(device=torch.device("cpu")), entry, uneven=options.uneven)

        outcomes = run_in_threads(options.ranks, body, 300)
        worst = max(outcomes, key=lambda o: (o.verdict == "wrong", o.verdict == "refused", o.share))
        bad += worst.verdict == "wrong"
        print(
            f"{name:32s}{worst.verdict:>9s}{worst.error:10.1e}{worst.share:8.2f}{worst.sent_bytes:12,d}{time.perf_counter() - began:7.1f}"
            f"  {worst.message[:80]}",
            flush=True,
        )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

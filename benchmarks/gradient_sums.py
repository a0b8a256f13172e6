"""Collectives of one backward pass of the demo's models: how the gradients of plain weights are summed over the domain.

    python -m benchmarks.gradient_sums                  # 4 ranks as threads of one process; counts, not times
    python -m benchmarks.gradient_sums --ranks 8 --json

`weights`: parameters with a gradient, which is also the number of blocking all-reduces of a backward that sums each by itself.
`sums`: the bucketed, asynchronous all-reduces made instead, and the bytes a rank sends in them (an all-reduce of n bytes over r ranks
sends 2 n (r - 1) / r). `others`: what the ops themselves exchange in backward with all weights frozen (halos, statistics, keys and values).
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, init_device_mesh

from shardwise import scatter_tensor
from shardwise.collectives.counter import Communication, count_communication
from shardwise.recipes.elevation import MODELS, build
from shardwise.testing.threads import run_in_threads


def measure(name: str, mesh) -> dict[str, int | str]:
    """Counts of one backward of one model, its rows split over the mesh."""
    model, x, y = build(name)
    model, x, y = model.float(), x.float(), y.float()
    x, target = scatter_tensor(x, 0, mesh, (Shard(2),)), scatter_tensor(y, 0, mesh, (Shard(2),)) if y.ndim == 4 else y
    x.requires_grad_()

    def backward() -> Communication:
        out = model(x)
        loss = F.mse_loss(out.logits if hasattr(out, "logits") else out, target)
        with count_communication() as sent:
            loss.backward()
        return sent

    everything = backward()
    weights = [p for p in model.parameters() if p.grad is not None]
    size = sum(p.numel() * p.element_size() for p in weights)
    model.requires_grad_(False)
    others = backward()
    return {
        "model": name, "ranks": mesh.size(), "weights": len(weights), "weight bytes": size,
        "sums": everything.calls - others.calls, "bytes of sums": everything.bytes - others.bytes,
        "others": others.calls, "bytes of others": others.bytes,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    def all_models(rank: int) -> list[dict[str, int | str]]:
        mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("domain",))
        return [measure(name, mesh) for name in MODELS]

    rows = run_in_threads(options.ranks, all_models, timeout=600)[0]
    if options.json:
        print(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2))
        return
    print("".join(f"{name:>18s}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value if isinstance(value, str) else format(value, ','):>18s}" for value in row.values()))


if __name__ == "__main__":
    main()

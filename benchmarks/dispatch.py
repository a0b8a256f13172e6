"""What eager dispatch costs for one op on tiny shards: plain torch, DTensor and ShardTensor side by side in one process.

    python -m benchmarks.dispatch                       # 4 ranks of a fake process group, one thread
    python -m benchmarks.dispatch --json
    OTHER_ENV/bin/python benchmarks/dispatch.py --columns plain,dtensor,physicsnemo     # the reference, in an environment of its own

Two tables: forward without gradients, and forward + backward with them. An entry is the time of one op in a chain of ten, the least of
several rounds, taken in turn between the columns so that all see the same machine. Backward of the chain includes the reduction of the
weights' gradients for ShardTensor (ten in one bucket); DTensor leaves them pending.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

CHAIN = 10
ROWS, WIDTH, RANKS = 8, 8, 4


def chains() -> dict[str, Callable]:
    """Ten times each op: `chain(x, weights, biases)`."""

    def repeat(step: Callable) -> Callable:
        def chain(x, weights, biases):
            for w, b in zip(weights, biases, strict=True):
                x = step(x, w, b)
            return x

        return chain

    def there_and_back(there: Callable, back: Callable) -> Callable:
        def chain(x, weights, biases):
            for _ in range(CHAIN // 2):
                x = back(there(x))
            return x

        return chain

    def slices(x, weights, biases):
        return [x[:, 1:5] for _ in range(CHAIN)][-1]

    return {
        "add": repeat(lambda x, w, b: x + x),
        "mul": repeat(lambda x, w, b: x * 0.5),
        "relu": repeat(lambda x, w, b: F.relu(x)),
        "linear": repeat(F.linear),
        "layer_norm": repeat(lambda x, w, b: F.layer_norm(x, (WIDTH,), b, b)),
        "transpose": there_and_back(lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1)),
        "view": there_and_back(lambda x: x.view(-1, 2, 4), lambda x: x.view(-1, WIDTH)),
        "slice": slices,
    }


def build(column: str, mesh, requires_grad: bool):
    """Input, ten weights and ten biases of one column."""
    local = torch.randn(ROWS, WIDTH)
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(CHAIN)]
    biases = [torch.randn(WIDTH) for _ in range(CHAIN)]
    if column == "plain":
        x = local
    elif column == "dtensor":
        x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        weights, biases = ([DTensor.from_local(t, mesh, [Replicate()], run_check=False) for t in ts] for ts in (weights, biases))
    elif column == "shardwise":
        from shardwise import ShardTensor, ShardTensorSpec

        x = ShardTensor(local, ShardTensorSpec.chunked(mesh, [Shard(0)], (RANKS * ROWS, WIDTH), local.dtype))
    else:
        from physicsnemo.domain_parallel import ShardTensor, register_custom_ops

        register_custom_ops()
        x = ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes="chunk", global_shape=(RANKS * ROWS, WIDTH))
    if requires_grad:
        x = x.detach().requires_grad_()
        weights, biases = ([t.detach().requires_grad_() for t in ts] for ts in (weights, biases))
    return x, weights, biases


def measure(columns: list[str], mesh, *, backward: bool, rounds: int, repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds of one op, by op and column."""
    table: dict[str, dict[str, float]] = {}
    for name, chain in chains().items():
        calls = {column: _call(chain, *build(column, mesh, backward), backward) for column in columns}
        best = dict.fromkeys(columns, float("inf"))
        for _ in range(rounds):
            for column, call in calls.items():
                if call is None:
                    best[column] = float("nan")
                    continue
                began = time.perf_counter()
                for _ in range(repeats):
                    call()
                best[column] = min(best[column], (time.perf_counter() - began) / repeats / CHAIN * 1e6)
        table[name] = best
    return table


def _call(chain: Callable, x, weights, biases, backward: bool) -> Callable | None:
    try:
        out = chain(x, weights, biases)
        gradient = torch.ones_like(out.detach())
    except Exception:
        return None
    if not backward:
        return lambda: chain(x, weights, biases)

    def call():
        x.grad = None
        for t in (*weights, *biases):
            t.grad = None
        chain(x, weights, biases).backward(gradient)

    call()
    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--columns", default="plain,dtensor,shardwise")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    columns = options.columns.split(",")
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("domain",))
    tables = {
        "forward": measure(columns, mesh, backward=False, rounds=options.rounds, repeats=options.repeats),
        "forward + backward": measure(columns, mesh, backward=True, rounds=options.rounds, repeats=options.repeats),
    }
    dist.destroy_process_group()
    if options.json:
        print(json.dumps({"torch": torch.__version__, "microseconds": tables}, indent=2))
        return
    print(f"torch {torch.__version__}, {RANKS} ranks, shards of {ROWS} x {WIDTH}, one thread; microseconds per op")
    for title, table in tables.items():
        print(f"\n{title:20s}" + "".join(f"{c:>12s}" for c in columns))
        for name, row in table.items():
            print(f"{name:20s}" + "".join(f"{row[c]:12.1f}" for c in columns))


if __name__ == "__main__":
    main()

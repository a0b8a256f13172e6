"""Ring and Ulysses attention against one process: time and bytes, forward and backward.

    torchrun --nproc_per_node 2 benchmarks/ring_attention.py --length 4096 --heads 8 --kv-heads 2 --width 64

The one-process time is that of the fused kernel over the whole sequence on this rank, all ranks at once; an ideal split takes a
fraction of it. Numbers of ranks that share cores tell ratios, not speeds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.attention import ring_attention, ulysses_attention
from shardwise.collectives.counter import count_communication
from shardwise.spec.sequence import contiguous_order, even_sizes, rows_in, zigzag_order


def seconds(run: Callable[[], Tensor], repeats: int) -> float:
    """Median seconds of forward and backward, of the slowest rank."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        run().sum().backward()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(sorted(times[1:])[repeats // 2])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("length", 4096), ("heads", 8), ("kv-heads", 2), ("width", 64), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def qkv(rows: int) -> list[Tensor]:
        shapes = [(1, heads, rows, args.width) for heads in (args.heads, args.kv_heads, args.kv_heads)]
        return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]

    for causal in (False, True):
        whole = qkv(args.length)
        one = seconds(lambda: F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True), args.repeats)  # noqa: B023
        if rank == 0:
            print(
                f"{'causal' if causal else 'full'}: one process {one * 1e3:.1f} ms, an ideal split over {ranks} {one / ranks * 1e3:.1f} ms"
            )
        for order_name, order in (
            ("contiguous", contiguous_order(even_sizes(args.length, ranks))),
            ("zigzag", zigzag_order(args.length, ranks)),
        ):
            for attend in (ring_attention, ulysses_attention):
                local = qkv(rows_in(order[rank]))

                def run() -> Tensor:
                    return attend(*local, q_spans=order, kv_spans=order, group=group, causal=causal)  # noqa: B023

                with count_communication() as sent:
                    run().sum().backward()
                took = seconds(run, args.repeats)
                if rank == 0:
                    print(
                        f"  {attend.__name__:18} {order_name:10} {took * 1e3:8.1f} ms, {one / ranks / took:5.0%} of ideal, "
                        f"{sent.only(direction='forward').bytes / 2**20:.2f} MiB forward, "
                        f"{sent.only(direction='backward').bytes / 2**20:.2f} MiB backward sent by rank 0"
                    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

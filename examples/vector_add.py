"""Add two vectors that are split over ranks: nothing is sent.

python examples/vector_add.py --size 10000000 --ranks 1 2 4
"""

import argparse

import torch
from scaling import error, main, seconds
from torch.distributed.tensor.placement_types import Shard

from shardwise import DistributedManager, scatter_tensor
from shardwise.testing import count_communication


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1_000_001)
    return parser


def run(args: argparse.Namespace) -> dict:
    manager = DistributedManager()
    mesh = manager.initialize_mesh((manager.world_size,), ["domain"])
    torch.manual_seed(0)
    a, b = torch.randn(2, args.size, device=manager.device).unbind()
    x, y = (scatter_tensor(t.clone(), 0, mesh, (Shard(0),)) for t in (a, b))
    with count_communication() as sent:
        z = x + y
    return {"seconds": seconds(lambda: x + y), "bytes_sent": sent.bytes, "error": error(z.full_tensor(), a + b)}


if __name__ == "__main__":
    main(run, options())

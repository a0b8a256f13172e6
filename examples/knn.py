"""The nearest neighbours of each point of a cloud: queries are split, every rank compares its own with all points.

python examples/knn.py --points 20000 --neighbours 8 --ranks 1 2 4
"""

import argparse

import torch
from scaling import main, seconds
from torch.distributed.tensor.placement_types import Shard

from shardwise import DistributedManager, scatter_tensor
from shardwise.testing import count_communication


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=1501)
    parser.add_argument("--neighbours", type=int, default=5)
    return parser


def neighbours(queries: torch.Tensor, points: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the nearest points, nearest first; plain torch."""
    return torch.cdist(queries, points).topk(count, largest=False).indices


def run(args: argparse.Namespace) -> dict:
    manager = DistributedManager()
    mesh = manager.initialize_mesh((manager.world_size,), ["domain"])
    torch.manual_seed(0)
    points = torch.randn(args.points, 3, dtype=torch.float64, device=manager.device)
    queries = scatter_tensor(points.clone(), 0, mesh, (Shard(0),))
    with count_communication() as sent:
        found = neighbours(queries, points, args.neighbours)
    wrong = int((found.full_tensor() != neighbours(points, points, args.neighbours)).sum())
    took = seconds(lambda: neighbours(queries, points, args.neighbours))
    return {"seconds": took, "bytes_sent": sent.bytes, "wrong": wrong}


if __name__ == "__main__":
    main(run, options())

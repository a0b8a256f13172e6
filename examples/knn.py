"""The nearest neighbours of each point of a cloud: points and queries are split, the points go round the ring.

python examples/knn.py --points 20000 --neighbours 8 --ranks 1 2 4
"""

import argparse

import torch
from scaling import main, seconds
from torch.distributed.tensor.placement_types import Shard

from shardwise import DistributedManager, scatter_tensor
from shardwise.functional import knn
from shardwise.testing import count_communication


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=1501)
    parser.add_argument("--neighbours", type=int, default=5)
    return parser


def run(args: argparse.Namespace) -> dict:
    manager = DistributedManager()
    mesh = manager.initialize_mesh((manager.world_size,), ["domain"])
    torch.manual_seed(0)
    points = torch.randn(args.points, 3, dtype=torch.float64, device=manager.device)
    cloud = scatter_tensor(points.clone(), 0, mesh, (Shard(0),))
    with count_communication() as sent:
        found, _ = knn(cloud, cloud, args.neighbours)
    wrong = int((found.full_tensor() != knn(points, points, args.neighbours)[0]).sum())
    took = seconds(lambda: knn(cloud, cloud, args.neighbours))
    return {"seconds": took, "bytes_sent": sent.bytes, "wrong": wrong}


if __name__ == "__main__":
    main(run, options())

"""The dot product of two split vectors: each rank sums its part, and a few bytes complete the sum.

python examples/dot_product.py --size 10000000 --ranks 1 2 4
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
    a, b = torch.randn(2, args.size, dtype=torch.float64, device=manager.device).unbind()
    x, y = (scatter_tensor(t.clone(), 0, mesh, (Shard(0),), requires_grad=True) for t in (a, b))

    def step() -> torch.Tensor:
        x.grad = y.grad = None
        product = (x * y).sum().full_tensor()
        product.backward()
        return product

    with count_communication() as sent:
        product = step()
    wrong = max(error(product.detach(), a.dot(b)), error(x.grad.full_tensor(), b), error(y.grad.full_tensor(), a))
    return {"seconds": seconds(step), "bytes_sent": sent.bytes, "error": wrong}


if __name__ == "__main__":
    main(run, options())

"""Train monai's 3-D UNet on a volume that one rank has no memory for: it dies on one, and trains on four.

Each process is given a limit of memory beyond what it has at the start (Linux, `RLIMIT_DATA`).

python examples/unet3d_memory.py --size 64 --cap-mb 300 --ranks 1 2 4
"""

import argparse
import resource
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scaling import largest, main
from torch.distributed.tensor.placement_types import Shard

from shardwise import DistributedManager, parallelize, param_groups, scatter_tensor
from shardwise.testing import measure_saved_bytes


@contextmanager
def memory_cap(megabytes: int):
    """Let this process have `megabytes` more than it has now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + megabytes * 2**20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=48, help="voxels along each side")
    parser.add_argument("--cap-mb", type=int, default=150, help="memory of each process beyond what it has at the start")
    parser.add_argument("--steps", type=int, default=1)
    return parser


def run(args: argparse.Namespace) -> dict:
    from monai.networks.nets import BasicUNet

    manager = DistributedManager()
    mesh = manager.initialize_mesh((1, manager.world_size), ["ddp", "domain"])
    torch.manual_seed(0)
    model = BasicUNet(spatial_dims=3, in_channels=1, out_channels=2, features=(32, 16, 16, 16, 16, 32), norm="instance")
    model = parallelize(model.to(manager.device), mesh)
    optimizer = torch.optim.SGD(param_groups(model), lr=1e-2)
    volume = torch.randn(1, 1, *[args.size] * 3)
    x = scatter_tensor(volume, 0, mesh["domain"], (Shard(2),))
    y = scatter_tensor((volume[:, 0] > 0).long(), 0, mesh["domain"], (Shard(1),))
    del volume
    losses, died = [], 0.0
    with memory_cap(args.cap_mb), measure_saved_bytes(exclude=model.parameters()) as saved:
        try:
            for _ in range(args.steps):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        except RuntimeError as error:
            if "allocate" not in str(error) or dist.get_world_size() > 1:
                raise
            died = 1.0
    result = "out of memory" if largest(died) else " ".join(f"{loss:.6f}" for loss in losses)
    return {"cap_mb": args.cap_mb, "saved_mb": largest(saved.peak / 1e6), "losses": result}


if __name__ == "__main__":
    main(run, options())

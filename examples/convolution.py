"""A strided convolution over the split rows of an image, forward and backward: ranks exchange the rows at their borders.

python examples/convolution.py --size 1024 --kernel 7 --stride 2 --ranks 1 2 3 4
"""

import argparse

import torch
import torch.nn.functional as F
from scaling import error, main, seconds
from torch.distributed.tensor.placement_types import Shard

from shardwise import DistributedManager, scatter_tensor
from shardwise.testing import count_communication


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=129)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--kernel", type=int, default=7)
    parser.add_argument("--stride", type=int, default=2)
    return parser


def run(args: argparse.Namespace) -> dict:
    manager = DistributedManager()
    mesh = manager.initialize_mesh((manager.world_size,), ["domain"])
    torch.manual_seed(0)
    image = torch.randn(1, 3, args.size, args.size, dtype=torch.float64, device=manager.device, requires_grad=True)
    weight = torch.randn(args.channels, 3, args.kernel, args.kernel, dtype=torch.float64, device=manager.device, requires_grad=True)
    x = scatter_tensor(image, 0, mesh, (Shard(2),), requires_grad=True)

    def step(image: torch.Tensor) -> torch.Tensor:
        weight.grad = image.grad = None
        out = F.conv2d(image, weight, stride=args.stride, padding=args.kernel // 2)
        out.square().mean().backward()
        return out

    with count_communication() as sent:
        out = step(x)
    mine = [out.detach().full_tensor(), x.grad.full_tensor(), weight.grad.clone()]
    expected = [step(image).detach(), image.grad, weight.grad]
    wrong = max(error(a, b) for a, b in zip(mine, expected, strict=True))
    forward, backward = (sent.only(direction=d).bytes for d in ("forward", "backward"))
    return {"seconds": seconds(lambda: step(x)), "bytes_forward": forward, "bytes_backward": backward, "error": wrong}


if __name__ == "__main__":
    main(run, options())

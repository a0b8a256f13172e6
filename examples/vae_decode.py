"""Decode an image latent split over rows with diffusers' AutoencoderKL: exact, with no blended tiles.

python examples/vae_decode.py --size 64 --ranks 1 2 4
"""

import argparse

import torch
from scaling import error, largest, main, seconds
from torch.distributed.tensor.placement_types import Shard

from shardwise import DistributedManager, parallelize, scatter_tensor
from shardwise.testing import count_communication


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=13, help="rows of the latent; the image has four times as many")
    parser.add_argument("--width", type=int, default=16)
    return parser


def run(args: argparse.Namespace) -> dict:
    from diffusers import AutoencoderKL

    manager = DistributedManager()
    mesh = manager.initialize_mesh((1, manager.world_size), ["ddp", "domain"])
    torch.manual_seed(0)
    widths = (args.width, 2 * args.width, 2 * args.width)
    vae = AutoencoderKL(
        block_out_channels=widths, down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, norm_num_groups=8
    )
    vae = parallelize(vae.double().eval().to(manager.device), mesh)
    latent = torch.randn(1, 4, args.size, args.size, dtype=torch.float64, device=manager.device)
    with torch.inference_mode():
        z = scatter_tensor(latent, 0, mesh["domain"], (Shard(2),))
        with count_communication() as sent:
            image = vae.decode(z).sample
        wrong = error(image.full_tensor(), vae.decode(latent).sample)
        took = seconds(lambda: vae.decode(z).sample)
    share = largest(image._local_tensor.numel() / image.numel())
    return {"seconds": took, "bytes_sent": sent.bytes, "largest_share": share, "error": wrong}


if __name__ == "__main__":
    main(run, options())

"""Decode a video latent split over frames and rows with diffusers' AutoencoderKLTemporalDecoder: exact, with no blended tiles.

Half of the ranks split the frames, each such half the rows: temporal convolutions exchange frames, spatial ones rows.

python examples/video_decode.py --frames 5 --size 9 --ranks 1 2 4
"""

import argparse

import torch
from scaling import error, largest, main, seconds
from torch.distributed.tensor.placement_types import Shard

from shardwise import DistributedManager, scatter_tensor, sync_module_over_mesh
from shardwise.testing import count_communication


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=3)
    parser.add_argument("--size", type=int, default=5, help="rows of the latent; the frames have twice as many")
    parser.add_argument("--width", type=int, default=16)
    return parser


def run(args: argparse.Namespace) -> dict:
    from diffusers import AutoencoderKLTemporalDecoder

    manager = DistributedManager()
    rows = 1 if manager.world_size < 4 else 2
    mesh = manager.initialize_mesh((manager.world_size // rows, rows), ["frames", "rows"])
    torch.manual_seed(0)
    vae = AutoencoderKLTemporalDecoder(
        block_out_channels=(args.width * 2,) * 2, down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1
    )
    vae = vae.double().eval().to(manager.device)
    for axis in ("frames", "rows"):
        sync_module_over_mesh(vae, mesh[axis])
    latent = torch.randn(args.frames, 4, args.size, args.size, dtype=torch.float64, device=manager.device)

    def decode(z: torch.Tensor) -> torch.Tensor:
        return vae.decode(z, num_frames=args.frames).sample

    with torch.inference_mode():
        z = scatter_tensor(latent, 0, mesh, (Shard(0), Shard(2)))
        with count_communication() as sent:
            video = decode(z)
        wrong = error(video.full_tensor(), decode(latent))
        took = seconds(lambda: decode(z))
    share = largest(video._local_tensor.numel() / video.numel())
    return {
        "frames x rows": f"{mesh.size(0)}x{mesh.size(1)}",
        "seconds": took,
        "bytes_sent": sent.bytes,
        "largest_share": share,
        "error": wrong,
    }


if __name__ == "__main__":
    main(run, options())

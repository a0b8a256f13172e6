"""Train a plain ViT, ConvNet or neighbourhood-attention net in 2-D or 3-D over data and domain axes; only the script knows of the split.

python examples/training_loop.py --model vit --ranks 1 2 4
python examples/training_loop.py --model neighbourhood --dims 3 --size 16
torchrun --nproc-per-node 4 examples/training_loop.py --ddp 2 --domain 2 --fsdp --compile --amp
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scaling import largest, main, seconds
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardwise import DistributedManager, clip_grad_norm_, parallelize, param_groups, scatter_tensor
from shardwise.functional import neighborhood_attention
from shardwise.parallel.losses import global_sum
from shardwise.testing import count_communication, measure_saved_bytes

CLASSES = 5


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class ViT(nn.Module):
    def __init__(self, dims: int, size: int, width: int = 32, depth: int = 2, patch: int = 4) -> None:
        super().__init__()
        self.patches = (nn.Conv2d, nn.Conv3d)[dims - 2](3, width, patch, patch)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** dims, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class NeighbourBlock(nn.Module):
    """Each position attends to the `window` nearest ones along each dim; no rank holds other keys than its own and those at its borders."""

    def __init__(self, width: int, heads: int = 4, window: int = 3) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(neighborhood_attention(q, k, v, self.window).flatten(-2))
        return x + self.mlp(self.after(x))


class NeighbourNet(nn.Module):
    def __init__(self, dims: int, width: int = 32, depth: int = 2, patch: int = 4) -> None:
        super().__init__()
        self.patches = (nn.Conv2d, nn.Conv3d)[dims - 2](3, width, patch, patch)
        self.blocks = nn.ModuleList(NeighbourBlock(width) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).movedim(1, -1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1, -2).mean(1))


class ConvNet(nn.Module):
    def __init__(self, dims: int, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
        self.stem = conv(3, width, 5, stride=2, padding=2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, width), nn.GELU(), conv(width, width, 3, padding=1)) for _ in range(depth)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.flatten(2).mean(2))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["vit", "convnet", "neighbourhood"], default="vit")
    parser.add_argument("--dims", type=int, choices=[2, 3], default=2)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4, help="of one step, over all replicas")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ddp", type=int, default=1)
    parser.add_argument("--domain", type=int, default=-1, help="ranks that share a sample; -1: those that --ddp leaves")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--amp", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--inference", action="store_true")
    return parser


def run(args: argparse.Namespace) -> dict:
    manager = DistributedManager()
    ddp = min(args.ddp, manager.world_size)
    mesh = manager.initialize_mesh((ddp, args.domain), ["ddp", "domain"])
    torch.manual_seed(0)
    build = {
        "vit": lambda: ViT(args.dims, args.size),
        "convnet": lambda: ConvNet(args.dims),
        "neighbourhood": lambda: NeighbourNet(args.dims),
    }
    model = build[args.model]().to(manager.device)
    if args.compile:
        for block in model.blocks:
            block.compile(dynamic=False)
    images = torch.randn(args.batch, 3, *[args.size] * args.dims)
    labels = torch.arange(args.batch) % CLASSES
    model = parallelize(model, mesh, fsdp=args.fsdp and not args.inference)

    replica = mesh.get_local_rank("ddp")
    source = dist.get_global_rank(mesh["domain"].get_group(), 0)
    x = scatter_tensor(images.chunk(ddp)[replica], source, mesh["domain"], (Shard(2),))
    y = scatter_tensor(labels.chunk(ddp)[replica], source, mesh["domain"], (Replicate(),))
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-3)

    def step() -> Tensor:
        with torch.autocast(manager.device.type, torch.bfloat16) if args.amp else nullcontext():
            loss = F.cross_entropy(model(x), y)
        if not args.inference:
            loss.backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return global_sum(loss, mesh) / ddp

    with torch.inference_mode() if args.inference else nullcontext():
        with count_communication() as sent, measure_saved_bytes(exclude=model.parameters()) as saved:
            losses = [float(step())]
        losses += [float(step()) for _ in range(args.steps - 1)]
        took = seconds(step)
    mesh_text = f"{mesh.size(0)}x{mesh.size(1)}"
    return {
        "ddp x domain": mesh_text,
        "seconds": took,
        "bytes_sent": sent.bytes,
        "saved_mb": largest(saved.peak / 1e6),
        "losses": " ".join(f"{loss:.6f}" for loss in losses),
    }


if __name__ == "__main__":
    main(run, options())

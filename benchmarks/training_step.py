"""One training step of a ViT and a ConvNet split over ranks: seconds and bytes, side by side with the reference implementation.

    torchrun --nproc-per-node 4 benchmarks/training_step.py
    torchrun --nproc-per-node 4 benchmarks/training_step.py --reference      # needs nvidia-physicsnemo

The reference's attention has no form for CPUs: `scaled_dot_product_attention` on its tensors calls `torch.cuda.current_stream` and
`aten._scaled_dot_product_efficient_attention`, for which torch has a CUDA kernel only. A ViT whose tokens are mixed by a mean in place
of attention, all else equal, runs in both.

Steps of both libraries alternate in the same processes, so both see the same machine. Bytes are those that the loopback interface
carries, which counts everything that local gloo ranks send, of both alike; run it alone in a network namespace:
`unshare -n sh -c 'ip link set lo up; torchrun ...'`. The last loss of both is printed, so that a wrong step does not look fast.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardwise


def mean_mixing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In place of attention: what each token adds to all is a mean over the tokens, weighted by the keys."""
    return q * v + (k * v).mean(2, keepdim=True)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.before(x)).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.after(x))


class ViT(nn.Module):
    def __init__(self, size: int, attend: Callable[..., Tensor], width: int = 64, depth: int = 4, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, 4, attend) for _ in range(depth)))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.pos_embed
        return self.head(self.blocks(x).mean(1))


class ConvNet(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.GroupNorm(4, width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(depth))
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def wire_bytes() -> int:
    """Bytes the loopback interface has sent."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def make_step(kind: type | None, model: nn.Module, image: Tensor, target: Tensor, mesh) -> Callable[[], float]:
    """A step with tensors of class `kind`, split over rows; without one, of one process."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = image
    if kind is not None:
        parts = image.chunk(dist.get_world_size(), 2)
        shapes = {0: [part.shape for part in parts]}
        x = kind.from_local(parts[dist.get_rank()].contiguous(), mesh, (Shard(2),), sharding_shapes=shapes)

    def step() -> float:
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--reference", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    libraries = {"shardwise": shardwise.ShardTensor}
    if args.reference:
        from physicsnemo.domain_parallel import ShardTensor, register_custom_ops

        register_custom_ops()  # which it does by itself only where there is a GPU
        torch.cuda.set_device = lambda device: None  # its halo exchange calls it on any device
        libraries["reference"] = ShardTensor
    shardwise.DistributedManager.initialize()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    models = {
        "ConvNet": ConvNet,
        "ViT": lambda: ViT(args.size, F.scaled_dot_product_attention),
        "ViT, mean mixing": lambda: ViT(args.size, mean_mixing),
    }
    for name, build in models.items():
        torch.manual_seed(0)
        model, image, target = build(), torch.randn(1, 3, args.size, args.size), torch.randn(1, 8)
        steps = {library: make_step(kind, model, image, target, mesh) for library, kind in libraries.items()}
        if name == "ViT" and not torch.cuda.is_available():
            steps.pop("reference", None)  # see above
        steps["one process"] = make_step(None, model, image, target, mesh)
        seconds: dict[str, list[float]] = {library: [] for library in steps}
        sent: dict[str, list[int]] = {library: [] for library in steps}
        losses = {}
        for number in range(args.steps + 2):
            for library, step in steps.items():
                dist.barrier()
                before, began = wire_bytes(), time.perf_counter()
                losses[library] = step()
                took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
                dist.barrier()
                moved = wire_bytes() - before
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if number >= 2:
                    seconds[library].append(float(took))
                    sent[library].append(moved)
        if dist.get_rank() == 0:
            for library in steps:
                middle, low = statistics.median(seconds[library]), min(seconds[library])
                moved = 0 if library == "one process" else statistics.median(sent[library])
                times = f"{middle * 1e3:8.1f} ms (least {low * 1e3:.1f})"
                print(f"{name:18} {library:12} {times}  {moved:12,.0f} bytes  loss {losses[library]:.7f}")
            if "reference" in steps:
                ratio = statistics.median(a / b for a, b in zip(seconds["shardwise"], seconds["reference"], strict=True))
                bytes_ratio = statistics.median(sent["shardwise"]) / statistics.median(sent["reference"])
                print(f"{name:18} shardwise / reference: step time {ratio:.2f}, bytes {bytes_ratio:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

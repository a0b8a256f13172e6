"""A small plain model and its training loop, in one process and over a mesh; shared by the tests of the wrapper."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardwise import clip_grad_norm_, parallelize, param_groups, scatter_tensor
from shardwise.parallel.wrap import no_sync

BATCH, HEIGHT, WIDTH, CLASSES = 16, 10, 6, 3
MAX_NORM = 0.5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a bias of the keys has no gradient but rounding, which AdamW magnifies
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class Net(nn.Module):
    """Convolution, positional embedding, two transformer blocks, mean over tokens."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, width, 3, padding=1)
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, HEIGHT * WIDTH, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a run is split. spatial: handed to `parallelize` as `spatial_params`. compiled: the backend."""

    ddp: int
    domain: int
    fsdp: bool = False
    spatial: str | None = None
    accumulate: int = 1
    compiled: str | None = None

    def __str__(self) -> str:
        words = [f"ddp={self.ddp}", f"domain={self.domain}"]
        words += [name for name in ("fsdp", "spatial") if getattr(self, name)]
        words += [f"compiled={self.compiled}"] if self.compiled else []
        return " ".join([*words, f"accumulate={self.accumulate}"])


LAYOUTS = (
    Setup(ddp=4, domain=1),
    Setup(ddp=1, domain=4),
    Setup(ddp=2, domain=2),
    Setup(ddp=2, domain=2, fsdp=True),
    Setup(ddp=2, domain=2, fsdp=True, spatial="auto"),
    Setup(ddp=1, domain=4, fsdp=True),
    Setup(ddp=1, domain=4, fsdp=True, spatial="auto"),
    Setup(ddp=4, domain=1, fsdp=True),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def build(dtype: torch.dtype, seed: int = 3) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net().to(dtype)


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 2, HEIGHT, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(BATCH, CLASSES, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def compile_blocks(model: Net, backend: str | None) -> None:
    """Compile as a user does, and fail where the compiler would fall back to plain Python."""
    if backend is not None:
        torch._dynamo.reset()
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        for block in model.blocks:
            block.compile(backend=backend, dynamic=False, fullgraph=True)


def train_alone(dtype: torch.dtype, steps: int, compiled: str | None = None, accumulate: int = 1) -> Run:
    """In one process, with torch's own clipping."""
    model = build(dtype)
    compile_blocks(model, compiled)
    x, y = data(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for _ in range(steps):
        loss = 0.0
        for xs, ys in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            part = F.mse_loss(model(xs), ys) / accumulate
            part.backward()
            loss += float(part.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return Run(losses=losses, norms=norms, weights={name: p.detach().clone() for name, p in model.named_parameters()})


def train_split(setup: Setup, mesh: DeviceMesh, dtype: torch.dtype, steps: int) -> Run:
    rank = dist.get_rank()
    model = build(dtype, seed=3 if rank == 0 else 100 + rank)  # only the first rank has the right weights
    compile_blocks(model, setup.compiled)
    model = parallelize(model, mesh, fsdp=setup.fsdp, spatial_params=setup.spatial)
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-3)
    x, y = (part.chunk(setup.ddp)[mesh.get_local_rank("ddp")] for part in data(dtype))
    source = dist.get_global_rank(mesh["domain"].get_group(), 0)
    losses, norms = [], []
    for _ in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for part in range(setup.accumulate):
            xs = scatter_tensor(x.chunk(setup.accumulate)[part], source, mesh["domain"], (Shard(2),))
            ys = scatter_tensor(y.chunk(setup.accumulate)[part], source, mesh["domain"], (Replicate(),))
            last = part == setup.accumulate - 1
            with nullcontext() if last else no_sync(model):
                loss = F.mse_loss(model(xs), ys) / setup.accumulate
                loss.backward()
            total += full(loss).double()
        norms.append(float(clip_grad_norm_(model, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, group=mesh.get_group("ddp"))
        losses.append(float(total) / setup.ddp)
    plain = getattr(model, "module", model)
    return Run(losses=losses, norms=norms, weights={name: full(p) for name, p in plain.named_parameters()})


def infer_split(setup: Setup, mesh: DeviceMesh, dtype: torch.dtype) -> Tensor:
    """What the model makes of this replica's samples, without gradients."""
    model = build(dtype, seed=3 if dist.get_rank() == 0 else 100 + dist.get_rank())
    compile_blocks(model, setup.compiled)
    model = parallelize(model, mesh, fsdp=setup.fsdp, spatial_params=setup.spatial)
    x = data(dtype)[0].chunk(setup.ddp)[mesh.get_local_rank("ddp")]
    source = dist.get_global_rank(mesh["domain"].get_group(), 0)
    with torch.inference_mode():
        return full(model(scatter_tensor(x, source, mesh["domain"], (Shard(2),))))


def furthest(run: Run, reference: Run) -> dict[str, float]:
    """The largest relative difference of losses, gradient norms and weights (by tensor)."""
    result = {}
    for name in ("losses", "norms"):
        result[name] = max(abs(a - b) / abs(b) for a, b in zip(getattr(run, name), getattr(reference, name), strict=True))
    result["weights"] = max(float((run.weights[name] - w).norm() / w.norm()) for name, w in reference.weights.items())
    return result

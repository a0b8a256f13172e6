"""The first real run: plain models trained on a measured field, whole or split over rows.

The field is the elevation model of the Jacksboro fault that Matplotlib ships as sample data, 344 x 403 points, so that
nothing divides evenly. The models are plain modules of published packages: a UNet (monai) that learns to remove noise from
the field, and a vision transformer (transformers) that learns its relief from the whole of it.

    python -m shardwise.recipes.elevation --model unet --steps 5                                         # one process
    torchrun --nproc-per-node 4 -m shardwise.recipes.elevation --model unet --steps 5                    # rows over four ranks
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardwise.collectives.counter import count_communication
from shardwise.mesh.process import DistributedManager
from shardwise.shard_tensor import scatter_tensor, sync_module_over_mesh
from shardwise.testing.memory import measure_saved_bytes

MODELS = ("unet", "vit")
LEARNING_RATE = {"unet": 0.004, "vit": 0.001}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run measured, on its fullest rank.

    losses: one per step. saved_bytes: peak bytes kept for backward, parameters apart. sent_bytes: bytes a rank sends in the
    last step. collectives: calls in it. seconds: of a step, the median after the first.
    """

    model: str
    ranks: int
    dtype: str
    losses: tuple[float, ...]
    saved_bytes: int
    sent_bytes: int
    collectives: int
    seconds: float


def elevation() -> Tensor:
    """The field, [1, 1, 344, 403], float64, scaled to mean 0 and deviation 1."""
    import numpy as np
    from matplotlib.cbook import get_sample_data

    with get_sample_data("jacksboro_fault_dem.npz") as data:
        field = torch.from_numpy(np.asarray(data["elevation"], dtype=np.float64))
    return ((field - field.mean()) / field.std())[None, None]


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, its input and its target, the same in every process."""
    torch.manual_seed(0)
    field = elevation()
    if name == "unet":
        from monai.networks.nets import BasicUNet

        model = BasicUNet(spatial_dims=2, in_channels=1, out_channels=1, features=(8, 8, 16, 32, 64, 8))
        return model, field + 0.3 * torch.randn_like(field), field
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=tuple(field.shape[2:]), patch_size=8, num_channels=1, hidden_size=48, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=96, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config), field, torch.tensor([[field.min(), field.max(), field.diff(dim=2).abs().mean()]])


def train(name: str, mesh: DeviceMesh | None, *, steps: int, dtype: torch.dtype) -> Result:
    """Train for a few steps; with a mesh of one axis, split over the rows of the field."""
    model, x, y = build(name)
    model, x, y = model.to(dtype), x.to(dtype), y.to(dtype)
    if mesh is not None:
        rows = (Shard(2),)
        x = scatter_tensor(x, 0, mesh, rows)
        y = scatter_tensor(y, 0, mesh, rows if name == "unet" else (Replicate(),))
        sync_module_over_mesh(model, mesh)
    # Plain SGD: Adam would turn the rounding of gradients that are zero (a bias before a norm) into steps of full size.
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE[name], momentum=0.9)
    losses, seconds = [], []
    saved = 0
    for _ in range(steps):
        began = time.perf_counter()
        with count_communication() as sent, measure_saved_bytes(exclude=model.parameters()) as kept:
            out = model(x)
            loss = F.mse_loss(out if isinstance(out, Tensor) else out.logits, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        saved = max(saved, kept.peak)
    ranks = mesh.size() if mesh is not None else 1
    if mesh is not None:
        fullest = torch.tensor([saved, sent.bytes, sent.calls])
        torch.distributed.all_reduce(fullest, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
        saved, sent_bytes, calls = fullest.tolist()
    else:
        sent_bytes = calls = 0
    return Result(
        model=name,
        ranks=ranks,
        dtype=str(dtype).removeprefix("torch."),
        losses=tuple(losses),
        saved_bytes=saved,
        sent_bytes=sent_bytes,
        collectives=calls,
        seconds=sorted(seconds[1:] or seconds)[len(seconds[1:] or seconds) // 2],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=[*MODELS, "both"], default="both")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--out", type=Path, help="append each result to this file, one JSON object a line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((manager.world_size,), ["domain"]) if manager.world_size > 1 else None
    for name in MODELS if options.model == "both" else (options.model,):
        result = train(name, mesh, steps=options.steps, dtype=getattr(torch, options.dtype))
        if manager.rank == 0:
            line = json.dumps(asdict(result))
            print(line, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(line + "\n")
    DistributedManager.cleanup()


if __name__ == "__main__":
    main()

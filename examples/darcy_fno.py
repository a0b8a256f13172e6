"""Learn Darcy flow with a Fourier neural operator, the grid split over rows.

The data are made here: permeability of two values from a thresholded smooth random field, and the pressure of
`-div(a grad u) = 1` with `u = 0` on the border, by finite differences and conjugate gradients.

python examples/darcy_fno.py --grid 64 --steps 20 --ranks 1 2 4
"""

import argparse

import torch
import torch.nn.functional as F
from scaling import main, seconds
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard

from shardwise import DistributedManager, parallelize, param_groups, scatter_tensor
from shardwise.testing import count_communication


def permeability(count: int, grid: int) -> Tensor:
    """[count, grid, grid], 3 or 12: a Gaussian field with spectrum (k^2 + 9)^-2, thresholded at 0."""
    k = torch.fft.fftfreq(grid, 1 / grid, dtype=torch.float64)
    spectrum = ((k[:, None] ** 2 + k[None] ** 2) + 9.0) ** -1
    noise = torch.fft.fft2(torch.randn(count, grid, grid, dtype=torch.float64))
    return torch.where(torch.fft.ifft2(noise * spectrum).real > 0, 12.0, 3.0).double()


def pressure(a: Tensor, tolerance: float = 1e-8) -> Tensor:
    """Solve `-div(a grad u) = 1` on the unit square for each field; values between points are harmonic means."""
    h = 1.0 / (a.shape[-1] + 1)
    padded = F.pad(a[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]

    def between(p: Tensor, q: Tensor) -> Tensor:
        return 2 * p * q / (p + q)

    rows, columns = between(padded[:, 1:, 1:-1], padded[:, :-1, 1:-1]), between(padded[:, 1:-1, 1:], padded[:, 1:-1, :-1])

    def operator(u: Tensor) -> Tensor:
        wide = F.pad(u, (1, 1, 1, 1))
        flux_r = rows * wide[:, :, 1:-1].diff(dim=1)
        flux_c = columns * wide[:, 1:-1, :].diff(dim=2)
        return -(flux_r.diff(dim=1) + flux_c.diff(dim=2)) / h**2

    u, residual = torch.zeros_like(a), torch.ones_like(a)
    direction, norm = residual.clone(), residual.square().sum((1, 2), keepdim=True)
    start = norm.clone()
    while bool((norm > tolerance**2 * start).any()):
        image = operator(direction)
        step = norm / (direction * image).sum((1, 2), keepdim=True)
        u, residual = u + step * direction, residual - step * image
        before, norm = norm, residual.square().sum((1, 2), keepdim=True)
        direction = residual + norm / before * direction
    return u


class SpectralConv(nn.Module):
    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, width, width, modes, modes, dtype=torch.complex128) / width)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        low, high = (
            torch.einsum("bixy,ioxy->boxy", part, weight)
            for part, weight in zip((spectrum[:, :, : self.modes, : self.modes], spectrum[:, :, -self.modes :, : self.modes]), self.weight)
        )
        rows = spectrum.shape[2] - 2 * self.modes
        middle = torch.cat([low, F.pad(high, (0, 0, rows, 0))], 2)
        return torch.fft.irfft2(F.pad(middle, (0, spectrum.shape[3] - self.modes)), s=x.shape[-2:])


class FNO(nn.Module):
    def __init__(self, width: int = 8, modes: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        self.spectral = nn.ModuleList(SpectralConv(width, modes) for _ in range(depth))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", type=int, default=29)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    return parser


def run(args: argparse.Namespace) -> dict:
    manager = DistributedManager()
    mesh = manager.initialize_mesh((1, manager.world_size), ["ddp", "domain"])
    torch.manual_seed(0)
    a = permeability(args.samples, args.grid)
    u = pressure(a)
    model = parallelize(FNO().double().to(manager.device), mesh)
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2)
    x = scatter_tensor((a[:, None] - 7.5) / 4.5, 0, mesh["domain"], (Shard(2),))
    y = scatter_tensor(u[:, None] / u.std(), 0, mesh["domain"], (Shard(2),))

    def step() -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with count_communication() as sent:
        losses = [step().item()]
    losses += [step().item() for _ in range(args.steps - 1)]
    return {"seconds": seconds(step, 1), "bytes_sent": sent.bytes, "losses": " ".join(f"{loss:.8f}" for loss in losses)}


if __name__ == "__main__":
    main(run, options())

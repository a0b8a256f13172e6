"""What a layout runs on: `Gpu`, `Link`, `Cluster`. Units: bytes, bytes/s, FLOP/s, seconds, watts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator. Peaks are dense (no structured sparsity); None = not supported or not published."""

    name: str
    arch: str  # ampere, ada, hopper, blackwell, cdna3, rubin
    capability: tuple[int, int] | None  # CUDA compute capability; None on other vendors
    memory: int  # device memory a process can see, bytes
    bandwidth: float  # device memory, bytes/s
    sms: int  # streaming multiprocessors or compute units
    bf16_flops: float | None
    fp16_flops: float | None
    tf32_flops: float | None
    fp32_flops: float  # vector FP32
    fp8_flops: float | None
    fp4_flops: float | None
    power: float  # board power, W
    link: str  # catalog name of its link inside the fast domain
    source: str

    def peak(self, precision: str) -> float:
        """Dense peak of matrix products in `precision` (a `Layout.precision`), FLOP/s.

        A precision the GPU lacks runs at the next wider one it has.
        """
        ladder = [self.fp32_flops, self.tf32_flops, self.bf16_flops, self.fp8_flops, self.fp4_flops]
        width = {"fp32": 1, "fp16": 2, "bf16": 2, "nvfp4": 4}.get(precision, 3)
        if precision == "fp16" and self.fp16_flops:
            return self.fp16_flops
        return next(peak for peak in reversed(ladder[: width + 1]) if peak)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One communication tier, as one GPU sees it."""

    name: str
    bandwidth: float  # bytes/s per direction: per GPU for a link inside a fast domain, per NIC for a network
    latency: float  # seconds per message
    switched: bool  # every pair of GPUs of the tier reaches full bandwidth
    source: str


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs and the tiers between them. Ranks are laid on GPUs in order: consecutive ranks share a domain."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int  # GPUs of one host
    domain: int  # GPUs joined by `intra` (a node, or 72 for NVL72)
    intra: Link
    inter: Link
    nics_per_gpu: float = 1.0  # network interfaces per GPU

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def network_bandwidth(self) -> float:
        """Network bytes/s per direction one GPU has when all GPUs of its node send."""
        return self.inter.bandwidth * self.nics_per_gpu

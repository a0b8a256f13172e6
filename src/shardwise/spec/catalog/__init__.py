"""What is known by name: GPUs, links and models, each number with its unit and source."""

from shardwise.spec.catalog.hardware import cluster, gpu, gpu_names, link, link_names

__all__ = ["cluster", "gpu", "gpu_names", "link", "link_names"]

"""What is known by name: GPUs, links and models, each number with its unit and source."""

from shardwise.spec.catalog.hardware import cluster, gpu, gpu_names, link, link_names
from shardwise.spec.catalog.models import find_model, model, model_entry, model_names

__all__ = ["cluster", "find_model", "gpu", "gpu_names", "link", "link_names", "model", "model_entry", "model_names"]

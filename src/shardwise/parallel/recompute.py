"""Activation recompute: forwards of chosen modules run again in the backward pass instead of saving what they made."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from shardwise.parallel.roles import experts_paths, layer_list
from shardwise.parallel.router import RouterLosses
from shardwise.parallel.stage import Elsewhere
from shardwise.spec.layout import Recompute

# selective module names that are a child of a decoder layer
_CHILDREN = {"mlp": ("mlp", "feed_forward"), "core_attn": ()}  # core attention saves its inputs and statistics only, as it is


def apply_recompute(model: PreTrainedModel, recompute: Recompute, routers: RouterLosses) -> None:
    """Full: whole decoder layers (`block`: the first `num_layers` of the stage). Selective: the named modules of each layer.

    routers: told when a forward runs again, so that it counts nothing twice.
    """
    _, layers = layer_list(model)
    here = [layer for layer in layers if not isinstance(layer, Elsewhere)]
    if recompute.granularity == "full":
        count = recompute.num_layers if recompute.method == "block" and recompute.num_layers else len(here)
        for layer in here[:count]:
            _again(layer, routers)
    elif recompute.granularity == "selective":
        experts = experts_paths(model)
        for name, module in list(model.named_modules()):
            if _chosen(name, module, recompute.modules, experts):
                _again(module, routers)


def _chosen(name: str, module: nn.Module, words: tuple[str, ...], experts: tuple[str, ...]) -> bool:
    leaf = name.rpartition(".")[2]
    mixture = any(path.startswith(f"{name}.") for path in experts) and leaf in _CHILDREN["mlp"]
    return (
        ("mlp" in words and leaf in _CHILDREN["mlp"] and not mixture)
        or ("moe" in words and mixture)
        or ("moe_act" in words and name in experts)
        or ("layernorm" in words and leaf.endswith("layernorm"))
        or ("shared_experts" in words and leaf in ("shared_expert", "shared_experts"))
    )


def _again(module: nn.Module, routers: RouterLosses) -> None:
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, context_fn=lambda: (nullcontext(), routers.running_again()))

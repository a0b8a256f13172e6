"""Activation recompute: forwards of chosen modules run again in the backward pass instead of saving what they made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from shardwise.errors import ModelError
from shardwise.parallel.roles import experts_paths, layer_list
from shardwise.parallel.router import RouterLosses
from shardwise.parallel.stage import Elsewhere
from shardwise.spec.layout import Recompute

# selective module names that are a child of a decoder layer
_CHILDREN = {"mlp": ("mlp", "feed_forward"), "core_attn": ()}  # core attention saves its inputs and statistics only, as it is


def apply_recompute(model: PreTrainedModel, recompute: Recompute, routers: RouterLosses) -> None:
    """Full: whole decoder layers, of which one input per `num_layers` layers is kept (`uniform`), or the first `num_layers` of the stage,
    each from its own input (`block`). Selective: the named modules of each layer.

    routers: told when a forward runs again, so that it counts nothing twice.
    """
    if recompute.granularity == "full":
        groups = layer_groups(model, recompute)
        if recompute.method == "block" and recompute.num_layers:
            groups = groups[: recompute.num_layers]
        for group in groups:
            _again_together(group, routers)
    elif recompute.granularity == "selective":
        experts = experts_paths(model)
        for name, module in list(model.named_modules()):
            if _chosen(name, module, recompute.modules, experts):
                _again(module, routers)


def layer_groups(model: PreTrainedModel, recompute: Recompute) -> list[list[nn.Module]]:
    """The decoder layers of this stage, in runs that are recomputed from one input."""
    here = [layer for layer in layer_list(model)[1] if not isinstance(layer, Elsewhere)]
    size = (recompute.num_layers or 1) if recompute.granularity == "full" and recompute.method != "block" else 1
    return [here[start : start + size] for start in range(0, len(here), size)]


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
    module.forward = partial(_checkpointed, module.forward, routers)


def _checkpointed(forward: Callable[..., Any], routers: RouterLosses, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), routers.running_again()), **kwargs)


def _again_together(layers: Sequence[nn.Module], routers: RouterLosses) -> None:
    """The model calls its layers one by one, each with arguments of its own: all but the last only note them and pass their input on, and
    the last runs all of them."""
    *first, last = layers
    noted: list[Callable[[Tensor], Tensor]] = []
    shapes: list[torch.Size] = []
    plain = last.forward

    def check(hidden: Tensor) -> None:
        if noted and hidden.shape != shapes[0]:  # the model took a part of what it was given back
            noted.clear()
            raise ModelError(
                [
                    f"{type(last).__name__} returns more than its hidden states: {len(layers)} of them cannot be recomputed together. "
                    "Try: model.recompute_num_layers=1"
                ]
            )
        shapes[:] = [hidden.shape]

    def note(forward: Callable[..., Tensor], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        check(hidden)
        noted.append(lambda x: forward(x, *args, **kwargs))
        return hidden

    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        check(hidden)
        calls = [*noted, lambda x: plain(x, *args, **kwargs)]
        noted.clear()
        return _checkpointed(lambda x: reduce(lambda value, call: call(value), calls, x), routers, hidden)

    for layer in first:
        layer.forward = partial(note, layer.forward)
    last.forward = run

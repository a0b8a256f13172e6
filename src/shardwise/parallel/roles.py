"""What every weight's role in tensor and expert parallelism is, read from the model's own published plan.

`transformers` publishes plans in its configs (`base_model_tp_plan`, `base_model_ep_plan`). Blocks of a decoder layer that the plan says
nothing about are looked up in one table of names. A block is the module whose linear layers are split; activations enter it whole and
leave it as a pending sum.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import ModelError

# published words: (role, whole activations on the side that is not summed)
_LINEAR: dict[str, tuple[Literal["column", "row"], bool]] = {
    "colwise": ("column", False),
    "colwise_rep": ("column", True),
    "colwise_gather_output": ("column", True),
    "rowwise": ("row", False),
    "rowwise_rep": ("row", False),
    "rowwise_split_input": ("row", True),
}
# names of linear layers in blocks without a published plan
_TABLE: tuple[tuple[str, str], ...] = (
    (r"(q|k|v|q_b|kv_b|gate|up)_proj", "colwise"),
    (r"(w1|w3|fc1|c_fc|dense_h_to_4h|query_key_value)", "colwise"),
    (r"(o|out|down)_proj", "rowwise"),
    (r"(w2|fc2|dense_4h_to_h|dense)", "rowwise"),
)


@dataclass(frozen=True, kw_only=True)
class LinearRole:
    """column: rows of the weight are split. row: its columns are. whole: a column layer's output is gathered, a row layer's input is
    split, so what lies between is the same on all ranks."""

    kind: Literal["column", "row"]
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Roles:
    """blocks: path of a block, with the roles of its linear layers by child name. experts: paths of the routed experts."""

    blocks: dict[str, dict[str, LinearRole]]
    experts: tuple[str, ...]


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Path and module of the decoder layers. Raises `ModelError` when the base model has no single list of layers."""
    base = model.base_model
    lists = [(name, child) for name, child in base.named_children() if isinstance(child, nn.ModuleList)]
    if len(lists) != 1:
        found = ", ".join(name for name, _ in lists) or "none"
        raise ModelError([f"{type(model).__name__}: needs one list of decoder layers in its base model, found {found}"])
    name, layers = lists[0]
    prefix = "" if base is model else f"{model.base_model_prefix}."
    return f"{prefix}{name}", layers


def experts_paths(model: PreTrainedModel) -> tuple[str, ...]:
    """Paths of modules that hold stacked weights of routed experts, by the published expert plan, else by structure."""
    ep_plan = _plan(model, getattr(model.config, "base_model_ep_plan", None))
    marks = {pattern for pattern, word in ep_plan.items() if word in ("ep_dispatch_experts", "moe_experts_allreduce")}
    found = [name for name, _ in model.named_modules() if any(_matches(pattern, name) for pattern in marks)]
    if not found:
        found = [name for name, module in model.named_modules() if _stacked(module)]
    return tuple(found)


def _stacked(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return "down_proj" in own and own["down_proj"].ndim == 3


def read_roles(model: PreTrainedModel) -> Roles:
    """Roles of all linear layers inside the decoder layers."""
    layers, _ = layer_list(model)
    experts = experts_paths(model)
    plan = _plan(model, getattr(model.config, "base_model_tp_plan", None))
    blocks: dict[str, dict[str, LinearRole]] = defaultdict(dict)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith(f"{layers}.") and not name.startswith(experts):
            word = next((word for pattern, word in plan.items() if _matches(pattern, name)), None)
            if word in _LINEAR:
                parent, _, child = name.rpartition(".")
                kind, whole = _LINEAR[word]
                blocks[parent][child] = LinearRole(kind=kind, whole=whole)
    for path, children in _unplanned(model, layers, experts, blocks):
        roles = {child: _LINEAR[word] for child in children for pattern, word in _TABLE if re.fullmatch(pattern, child)}
        if {kind for kind, _ in roles.values()} == {"column", "row"}:
            blocks[path] = {child: LinearRole(kind=kind, whole=whole) for child, (kind, whole) in roles.items()}
    return Roles(blocks={path: roles for path, roles in blocks.items() if roles}, experts=experts)


def _unplanned(
    model: PreTrainedModel, layers: str, experts: tuple[str, ...], known: Mapping[str, object]
) -> Iterator[tuple[str, list[str]]]:
    for path, module in list(model.named_modules()):
        if path.startswith(f"{layers}.") and path not in known and not (experts and path.startswith(experts)):
            children = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
            if children:
                yield path, children


def _plan(model: PreTrainedModel, published: Mapping[str, str] | None) -> dict[str, str]:
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    return {f"{prefix}{pattern}": word for pattern, word in (published or {}).items()}


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None

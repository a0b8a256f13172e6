"""Apply a layout to an unmodified `transformers` model: the stages of this rank, with what every parameter is part of."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from shardwise.errors import ModelError
from shardwise.parallel import attention
from shardwise.parallel.experts import Dispatch, split_experts
from shardwise.parallel.part import Held, Part
from shardwise.parallel.recompute import apply_recompute, layer_groups
from shardwise.parallel.roles import Roles, layer_list, read_roles
from shardwise.parallel.router import Balance, RouterLosses, watch_routers
from shardwise.parallel.saved import Savings, save_less
from shardwise.parallel.stage import StageModule, build_meta, cut, embedding_name, tied_name
from shardwise.parallel.tensor import Rows, TensorGroup, sharing_ranks, split_block, split_embedding, split_head
from shardwise.parallel.topology import Topology
from shardwise.parallel.weights import materialize
from shardwise.spec.layout import Layout
from shardwise.spec.stages import split


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """What one rank trains. stages: by stage index, in token order. parameters: every parameter once, with what it is part of. dtype: of
    activations and products; parameters have it too, but those that FSDP2 shards, which are float32 and gathered in it."""

    topology: Topology
    config: Any
    stages: dict[int, StageModule]
    parameters: list[tuple[nn.Parameter, Held]]
    rows: Rows
    routers: RouterLosses
    savings: Savings
    dtype: torch.dtype

    @property
    def vocab(self) -> int:
        return self.config.get_text_config().vocab_size

    @property
    def hidden(self) -> int:
        return self.config.get_text_config().hidden_size

    @property
    def fsdp(self) -> bool:
        return self.topology.layout.sharding == "fsdp2"


def parallelize_model(
    config: Any,
    topology: Topology,
    *,
    seed: int,
    device: torch.device,
    balance: Balance | None = None,
    source: Mapping[str, Tensor] | None = None,
    fill: Callable[..., None] = materialize,
    dtype: torch.dtype = torch.float32,
) -> ParallelModel:
    """Build what this rank holds of the model of a `transformers` config.

    seed: initial weights depend on it alone, not on the layout. source: whole tensors by name to take weights from instead. balance:
    auxiliary router losses. fill: gives the cut and split meta model its weights. dtype: of activations and matrix products; gradients are
    float32 for any. Communication: process groups of shared key heads, FSDP's first gather. Raises `ModelError` when a module cannot be
    split as the layout says.
    """
    attention.register()
    layout = topology.layout
    whole = build_meta(config)
    _refuse_randomness(whole)
    rows, routers = Rows(), RouterLosses(topology=topology, balance=balance or Balance())
    savings = Savings(active=dtype != torch.float32)
    stages: dict[int, StageModule] = {}
    parameters: list[tuple[nn.Parameter, Held]] = []
    tp = _tensor_group(config.get_text_config(), topology, rows, savings)
    meshes = _meshes(topology, device.type) if layout.sharding == "fsdp2" else {}
    for stage in split(layout, len(layer_list(whole)[1])):
        if stage.rank != topology.pp_rank:
            continue
        model = build_meta(config)
        model.set_attn_implementation(attention.NAME)
        roles = read_roles(model)
        cut(model, stage)
        held = _held(model, whole)
        _split(model, roles, topology, tp, held)
        fill(model, whole, held, seed=seed, device=device, source=source, dtype=torch.float32 if meshes else dtype)
        model.train()
        if savings.active:
            save_less(model, roles, savings)
        watch_routers(model, roles, routers)
        apply_recompute(model, layout.recompute, routers)
        module = StageModule(model, stage)
        if meshes:
            _shard(module, roles, meshes, layout, dtype)
        stages[stage.index] = module
        known = {f"model.{name}": info for name, info in held.items()}
        parameters += [(parameter, known[name]) for name, parameter in module.named_parameters()]
    return ParallelModel(
        topology=topology,
        config=config,
        stages=stages,
        parameters=parameters,
        rows=rows,
        routers=routers,
        savings=savings,
        dtype=dtype,
    )


def _refuse_randomness(model: PreTrainedModel) -> None:
    """Each rank would draw numbers of its own: ranks that hold the same activation no longer would, and no layout would repeat another."""
    rates = {
        f"model.hf.{key}": rate
        for key, rate in _rates(model.config.get_text_config().to_dict())
        if _RANDOM.search(key) and not _OF_OTHER_HEADS.search(key)
    }
    try_ = " ".join(f"{name}=0" for name in rates)
    if not rates:
        rates = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0}
        try_ = "a config without dropout"
    if rates:
        given = ", ".join(f"{name}={rate}" for name, rate in rates.items())
        raise ModelError([f"{given}: random numbers would differ with the layout. Try: {try_}"])


_RANDOM = re.compile("dropout|pdrop|jitter|drop_path|layerdrop")
_OF_OTHER_HEADS = re.compile("classifier|summary")  # not of the language model


def _rates(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The positive fractions of a config and of the configs in it."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from _rates(value, f"{prefix}{key}.")
        elif isinstance(value, float) and value > 0:
            yield f"{prefix}{key}", value


def _held(model: PreTrainedModel, whole: PreTrainedModel) -> dict[str, Held]:
    """What this stage holds before anything is split."""
    tied, embedding = tied_name(whole), embedding_name(whole)
    made: dict[int, Held] = {}
    result = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            canonical = embedding if name == tied else name
            made[id(parameter)] = Held(name=canonical, part=Part.whole(tuple(parameter.shape)), counted=name != tied)
        result[name] = made[id(parameter)]
    return result


def _tensor_group(config: Any, topology: Topology, rows: Rows, savings: Savings) -> TensorGroup | None:
    axis, layout = topology["tp"], topology.layout
    if axis.group is None:
        return None
    same = sharing_ranks(getattr(config, "num_key_value_heads", 0) or 0, axis.ranks, axis.rank)
    sharing = topology.maker.group(same, "kv") if same else None
    return TensorGroup(group=axis.group, sharing=sharing, rank=axis.rank, size=axis.size, sequence=layout.sp, rows=rows, savings=savings)


def _split(model: PreTrainedModel, roles: Roles, topology: Topology, tp: TensorGroup | None, held: dict[str, Held]) -> None:
    layout = topology.layout
    config = model.config.get_text_config()
    for path in roles.experts:
        if not _present(model, path):
            continue
        experts = model.get_submodule(path)
        if layout.ep > 1 or layout.etp > 1 or layout.tp > 1 or layout.capacity_factor is not None:
            dispatch = Dispatch(topology=topology, count=_expert_count(experts), capacity_factor=layout.capacity_factor)
            split_experts(experts, path, dispatch, held)
        else:
            for name, _ in experts.named_parameters(recurse=False):
                held[f"{path}.{name}"].expert = True
    if tp is None:
        return
    blocks = {path: children for path, children in roles.blocks.items() if any(name.startswith(f"{path}.") for name in held)}
    if tp.sequence:
        _refuse_unknown_attention(model, blocks)
    for path, children in blocks.items():
        split_block(model.get_submodule(path), path, children, tp, held, config)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    same = isinstance(head, nn.Linear) and isinstance(embedding, nn.Embedding) and head.weight is embedding.weight
    if isinstance(embedding, nn.Embedding):
        split_embedding(embedding, embedding_name(model).removesuffix(".weight"), tp, held)
    if isinstance(head, nn.Linear):
        path = next(name for name, module in model.named_modules() if module is head)
        split_head(head, path, tp, held, tied=embedding.weight if same else None)
    inside = tuple(f"{path}." for path in (*blocks, *roles.experts))
    for name, info in {id(info): (name, info) for name, info in held.items()}.values():
        if info.part.local_shape == info.part.shape and not info.expert and not name.startswith(inside):
            info.copies = layout.tp
            if layout.sp:
                info.pending.append(tp.group)
    for name, info in held.items():
        if name.startswith(inside) and info.part.local_shape == info.part.shape and not info.expert:
            info.copies = layout.tp


def _refuse_unknown_attention(model: PreTrainedModel, blocks: Container[str]) -> None:
    """Under sequence parallelism an attention block that is not known to be one would attend to this rank's rows only."""
    path, layers = layer_list(model)
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if hasattr(module, "is_causal") and f"{path}.{index}.{name}" not in blocks:
                why = "no plan and no known names say how this attention block is split"
                raise ModelError([f"{path}.{index}.{name} ({type(module).__name__}): {why}. Try: sequence_parallel=false"])


def _expert_count(experts: nn.Module) -> int:
    return next(parameter for _, parameter in experts.named_parameters(recurse=False)).shape[0]


def _meshes(topology: Topology, device: str) -> dict[str, DeviceMesh]:
    """What FSDP shards over, for dense and for expert parameters: the whole axis, or (replicas, shards) where fewer ranks share a copy."""
    layout = topology.layout
    sizes = {"dp_cp": layout.shard_size, "expt_dp": layout.expert_shard_size}
    return {name: _mesh(topology, name, size, device) for name, size in sizes.items()}


def _mesh(topology: Topology, name: str, size: int, device: str) -> DeviceMesh:
    axis, maker = topology[name], topology.maker
    if size >= axis.size:
        return DeviceMesh.from_group(axis.group or maker.group((topology.rank,), "alone"), device)
    grid = torch.tensor(axis.ranks).view(-1, size)
    row, column = divmod(axis.rank, size)
    replicas = maker.group(tuple(grid[:, column].tolist()), "replicas")
    shards = maker.group(tuple(grid[row].tolist()), "shards")
    return DeviceMesh.from_group([replicas, shards], device, mesh=grid, mesh_dim_names=("replicate", "shard"))


def _shard(module: StageModule, roles: Roles, meshes: dict[str, DeviceMesh], layout: Layout, dtype: torch.dtype) -> None:
    """FSDP2 over the data parallel ranks, the experts over theirs. Gradients are summed, not averaged: the loss is normalised before."""
    model = module.model
    low = {} if dtype == torch.float32 else {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
    options = {"mesh": meshes["dp_cp"], "reshard_after_forward": layout.reshard_after_forward, **low}
    sharded = [
        fully_shard(model.get_submodule(path), **{**options, "mesh": meshes["expt_dp"]}) for path in roles.experts if _present(model, path)
    ]
    for group in layer_groups(model, layout.recompute):
        fully_shard(group, **options)  # layers that are recomputed together are gathered together
        sharded += group
    sharded.append(fully_shard(module, mesh=meshes["dp_cp"], reshard_after_forward=False, **low))
    for each in sharded:
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)


def _present(model: PreTrainedModel, path: str) -> bool:
    try:
        return next(model.get_submodule(path).parameters(), None) is not None
    except AttributeError:
        return False

"""One call that makes a plain model ready to train over a mesh of data and domain axes.

| axes | wrapper | gradients |
| --- | --- | --- |
| domain alone | none; weights made equal once | summed over the domain by the tensor |
| ddp alone | DDP on the ddp group | averaged by DDP |
| ddp x domain | DDP over the ranks of both | one bucketed, overlapped all-reduce does the average and the sum |
| fsdp | FSDP2: shards over ddp, copies over domain | one reduce-scatter and all-reduce do both |
| fsdp with spatial parameters | FSDP2 over ddp, those parameters as DTensors over domain | summed over the domain first |

One optimizer step equals that of a single process with the whole batch: no factor is left to the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shardwise import random
from shardwise.errors import InputError
from shardwise.mesh.groups import flat_group
from shardwise.shard_tensor.promote import averaging
from shardwise.shard_tensor.sync import sync_module_over_mesh

AXES = ("ddp", "domain")
SPATIAL_NAMES = re.compile(r"(^|\.)(pos_embed\w*|position_embeddings?|positional_embedding|absolute_pos_embed|rope\w*|freqs_cis)$")


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    fsdp: bool = False,
    spatial_params: str | Mapping[str, int] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> nn.Module:
    """Make weights equal over the mesh, random numbers over the domain, and wrap `model` as the table above says.

    Args:
        model: a plain module, on its device; not changed but for what FSDP2 does to it.
        mesh: a device mesh whose axes are named `ddp` and `domain` (either may be missing).
        fsdp: shard parameters, gradients and optimizer state over the ddp axis with FSDP2.
        spatial_params: parameters with a spatial dim of fixed size to shard over the domain as DTensors, with `fsdp` only:
            `"auto"` finds positional tables by name and shards their longest dim, a mapping gives `{name: dim}`.
        mp_policy, offload_policy: handed to `fully_shard`.

    Returns: the module to train: `model` itself, or a DDP module around it.
    Communication: one broadcast of the weights over each axis, one of the random state over the domain. Training: see the table.
    Raises: InputError naming everything that is wrong at once.
    """
    _check(model, mesh, fsdp, spatial_params, mp_policy, offload_policy)
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    ddp, domain = sizes.get("ddp", 1), sizes.get("domain", 1)
    if domain > 1:
        sync_module_over_mesh(model, mesh["domain"])
        random.synchronize(mesh["domain"])
    if fsdp:
        if ddp > 1:
            sync_module_over_mesh(model, mesh["ddp"])
        return _shard(model, mesh, spatial_params, mp_policy, offload_policy)
    if ddp == 1:
        return model
    axes = tuple(i for i, name in enumerate(mesh.mesh_dim_names) if name in AXES)
    group = mesh.get_group(axes[0]) if len(axes) == 1 else flat_group(mesh, axes)
    wrapped = DistributedDataParallel(model, process_group=group)
    _settle_buckets(wrapped)
    if domain > 1:
        owned = {id(p) for p in model.parameters()}
        _average_while_running(wrapped, lambda value: id(value) in owned)
    return wrapped


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """For all but the last of several accumulated batches: the data-parallel reduction of gradients waits for the last.

    `model` is what `parallelize` returned, whichever wrapper it chose. Gradients stay right either way; this saves communication.
    """
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def _check(model, mesh, fsdp, spatial_params, mp_policy, offload_policy) -> None:
    names = tuple(mesh.mesh_dim_names or ())
    problems = []
    if not names or not set(names) <= set(AXES):
        problems.append(
            f"a mesh with axes {names or 'without names'}: parallelize reads the axis names 'ddp' and 'domain'; "
            'build it with DistributedManager().initialize_mesh((ddp, domain), ["ddp", "domain"]), or pass those axes of a larger '
            'mesh, mesh["ddp", "domain"]'
        )
    if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
        problems.append(
            "a model wrapped in FSDP1 (FullyShardedDataParallel): it flattens parameters, so a plain weight can no longer meet a "
            "sharded activation; pass the plain model with fsdp=True, which uses FSDP2 (fully_shard)"
        )
    if any(isinstance(m, FSDPModule | DistributedDataParallel) for m in model.modules()):
        problems.append("a model that is already wrapped (DDP or fully_shard): pass the plain model")
    if not fsdp:
        given = [
            n
            for n, v in (("spatial_params", spatial_params), ("mp_policy", mp_policy), ("offload_policy", offload_policy))
            if v is not None
        ]
        if given:
            problems.append(f"{', '.join(given)} without fsdp=True: only FSDP2 can use them; add fsdp=True or leave them out")
    if isinstance(spatial_params, str) and spatial_params != "auto":
        problems.append(f"spatial_params={spatial_params!r}: give 'auto' or a mapping {{parameter name: dim}}")
    if isinstance(spatial_params, Mapping):
        known = dict(model.named_parameters())
        for name, dim in spatial_params.items():
            if name not in known:
                problems.append(f"spatial_params names {name!r}, which is not a parameter of the model")
            elif not -known[name].ndim <= dim < known[name].ndim:
                problems.append(f"spatial_params shards dim {dim} of {name!r}, whose shape is {tuple(known[name].shape)}")
    if problems:
        raise InputError(given="; ".join(problems), why="the model cannot be wrapped like this")


# ---------------------------------------------------------------------- FSDP2


def _shard(model: nn.Module, mesh: DeviceMesh, spatial_params, mp_policy, offload_policy) -> nn.Module:
    names = mesh.mesh_dim_names
    spatial = _spatial(model, spatial_params) if "domain" in names and mesh["domain"].size() > 1 else {}
    for name, dim in spatial.items():
        _replace(model, name, dim, mesh["domain"])
    copies = "domain" in names and not spatial
    if "ddp" not in names:
        where = mesh["domain"]
    else:
        where = _copies_by_shards(mesh) if copies else mesh["ddp"]
    options = {"mesh": where}
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    if offload_policy is not None:
        options["offload_policy"] = offload_policy
    for parameter in model.parameters():
        if not parameter.is_contiguous():  # FSDP2 takes contiguous parameters only
            parameter.data = parameter.data.contiguous()
    inner = dict(options)
    if mp_policy is not None:  # the dtype of outputs is the model's: between blocks they keep the computing one
        inner["mp_policy"] = replace(mp_policy, output_dtype=None)
    for block in _blocks(model):
        fully_shard(block, **inner)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(_gather_ordinary_weights, prepend=True)
    if copies and mesh["domain"].size() > 1:
        _average_while_running(model, lambda value: isinstance(value, nn.Parameter))
    return model


def _gather_ordinary_weights(module: FSDPModule, _) -> None:
    """Memory that FSDP2 allocates in inference mode could neither be used in training later nor, with one rank, at all.

    The hook of a compiled block is part of its graph, where the mode cannot be left: the module around it gathers for it.
    """
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return
    with torch.inference_mode(False), torch.no_grad():
        for part in module.modules():
            if part is module or (isinstance(part, FSDPModule) and part._compiled_call_impl is not None):
                part.unshard()


def _copies_by_shards(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh as FSDP2 reads two dims: copies over the first (domain), shards over the second (ddp)."""
    axes = [mesh.mesh_dim_names.index(name) for name in ("domain", "ddp")]
    groups = [mesh.get_group(axis) for axis in axes]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh.permute(axes), mesh_dim_names=("domain", "ddp"))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost module lists: the layers of a network, gathered one at a time."""
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(block for block in child if any(True for _ in block.parameters()))
            else:
                walk(child)

    walk(model)
    return found


def _spatial(model: nn.Module, spatial_params: str | Mapping[str, int] | None) -> dict[str, int]:
    if spatial_params is None:
        return {}
    if isinstance(spatial_params, Mapping):
        return dict(spatial_params)
    tables = {name: p for name, p in model.named_parameters() if SPATIAL_NAMES.search(name)}
    return {name: max(range(p.ndim), key=lambda d: p.shape[d] if d < p.ndim - 1 or p.ndim == 1 else 0) for name, p in tables.items()}


def _replace(model: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    table: Tensor = getattr(owner, leaf)
    if isinstance(table, DTensor):
        return
    sharded = distribute_tensor(table.detach(), mesh, [Shard(dim % table.ndim)])
    setattr(owner, leaf, nn.Parameter(sharded, requires_grad=table.requires_grad))


# ---------------------------------------------------------------------- DDP


class _Touch(nn.Module):
    """A module that uses each parameter of another, in order."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.use = parameters

    def forward(self) -> list[Tensor]:
        return [p.sum() for p in self.use]


def _settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Let DDP arrange its buckets now, once and for all.

    It does so after its first backward, in the order in which gradients came. The order within a bucket decides in which order the
    ranks' summands are added, so the first step of a resumed run would round otherwise than the same step of the run it continues.
    Communication: one all-reduce of zeros as large as the gradients.
    """
    module, parameters = wrapped.module, [p for p in wrapped.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    wrapped.module = _Touch(parameters)
    try:
        with torch.enable_grad():
            sums = wrapped()
            torch.autograd.backward(sums, [torch.zeros_like(value) for value in sums])
    finally:
        wrapped.module = module
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


# ---------------------------------------------------------------------- one pass over the wire


def _average_while_running(module: nn.Module, owns: Callable[[Tensor], bool]) -> None:
    """While `module` runs forward, gradients of what it owns are left to its reducer (see `promote.averaging`)."""

    def enter(*_) -> None:
        averaging.owns = owns

    def leave(*_) -> None:
        averaging.owns = None

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)

"""What the search tries: degrees, micro batches, recompute choices, sharding modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from shardwise.planner.rules.alternatives import natural_cp_comm
from shardwise.spec.blocks import Mla
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import CpComm, Layout, Recompute
from shardwise.spec.model import ModelSpec

LEAST_TOKENS = 1024  # of one sample on one context parallel rank; below, attention and messages are too small to be worth it

# What a sharding mode changes in a layout besides its name.
SHARDING: dict[str, dict[str, Any]] = {
    "none": {"sharding": "none"},
    "distributed_optimizer": {"sharding": "distributed_optimizer"},
    "zero2": {"sharding": "zero2"},
    "megatron_fsdp": {"sharding": "megatron_fsdp"},
    "fsdp2": {"sharding": "fsdp2", "param_dtype": "fp32", "master_dtype": None},
}
# What a precision changes in a layout besides its name.
NUMBERS: dict[str, dict[str, Any]] = {
    "fp32": {"param_dtype": "fp32", "master_dtype": None, "grad_dtype": "fp32"},
    "fp16": {"param_dtype": "fp16"},
}
# Precisions whose named recipe in Megatron Bridge sets `fp8_param_gather` (training/mixed_precision.py).
FP8_PARAMS = ("fp8-delayed", "fp8-current", "mxfp8")
# Megatron FSDP gathers each layer again for every micro batch; all published runs and presets use it without a pipeline.
NOT_WITH_PIPELINE = ("megatron_fsdp",)
FRAMEWORK_SHARDING = {
    "torchtitan": ("fsdp2",),
    "megatron-core": ("distributed_optimizer", "megatron_fsdp"),
    "bridge": ("distributed_optimizer", "megatron_fsdp"),
    "shardwise": ("distributed_optimizer", "fsdp2"),
}


def number_formats(framework: str, precision: str) -> dict[str, Any]:
    """Layout fields that follow from the precision under a framework's defaults."""
    if framework == "bridge" and precision in FP8_PARAMS:
        return {"param_dtype": "fp8"}
    return dict(NUMBERS.get(precision, {}))


@dataclass(frozen=True, kw_only=True)
class Space:
    """Values each choice may take. Only combinations that divide evenly are tried."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    pp: tuple[int, ...]
    vpp: tuple[int, ...] | None  # None = `virtual_stages`
    ep: tuple[int, ...]
    etp: tuple[int, ...] | None  # None = 1 and the tensor parallel size
    mbs: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    sharding: tuple[str, ...]
    cp_comm: tuple[CpComm, ...] = ("p2p",)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layouts that differ in virtual stages and recompute only; `layout` has one stage per rank and the first recompute choice."""

    layout: Layout
    vpp: tuple[int, ...]
    recompute: tuple[Recompute, ...]

    @property
    def size(self) -> int:
        return len(self.vpp) * len(self.recompute)

    def members(self) -> Iterator[Layout]:
        for recompute in self.recompute:
            first = derive(self.layout, recompute=recompute)
            yield from (first if vpp == 1 else derive(first, vpp=vpp) for vpp in self.vpp)

    def parts(self) -> Iterator[Group | Layout]:
        """One group per recompute choice, or the members of a group with one."""
        if len(self.recompute) == 1:
            yield from self.members()
        else:
            for recompute in self.recompute:
                yield Group(layout=derive(self.layout, recompute=recompute), vpp=self.vpp, recompute=(recompute,))


def derive(layout: Layout, **changes: Any) -> Layout:
    """``layout.replace`` without running the constructor: the search makes tens of thousands of layouts."""
    new = object.__new__(Layout)
    new.__dict__.update(layout.__dict__)
    new.__dict__.update(changes)
    return new


def divisors(number: int) -> tuple[int, ...]:
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def recompute_choices(model: ModelSpec, base: Layout) -> tuple[Recompute, ...]:
    """Nothing, the selective lists that save memory for this kind of model, and whole layers."""
    modules: list[tuple[str, ...]] = []
    if base.attention == "unfused":
        modules.append(("core_attn",))
    modules.append(("layernorm",))
    if model.dense_mlps and not model.moe:
        modules.append(("mlp",))
    if model.moe:
        modules += [("moe_act",), ("layernorm", "moe_act"), ("moe",)]
    if any(isinstance(block, Mla) for block in model.attentions):
        modules += [("mla_up_proj",), ("mla_up_proj", "layernorm", "moe_act") if model.moe else ("mla_up_proj", "layernorm")]
    whole = Recompute(granularity="full", method="uniform", num_layers=1)
    return (Recompute(), *(Recompute(granularity="selective", modules=each) for each in modules), whole)


def space_of(model: ModelSpec, cluster: Cluster, base: Layout, *, seq_len: int, framework: str) -> Space:
    """The full space of a model on a cluster: TP inside the fast domain, CP down to `LEAST_TOKENS`, every divisor of the world."""
    sizes = divisors(cluster.gpus)
    experts = model.moe.experts if model.moe else 1
    return Space(
        tp=tuple(size for size in sizes if size <= cluster.domain),
        cp=tuple(size for size in sizes if size == 1 or seq_len // size >= LEAST_TOKENS),
        pp=tuple(size for size in sizes if size <= model.num_layers),
        vpp=None,
        ep=tuple(size for size in sizes if experts % size == 0),
        etp=(1,) if framework == "torchtitan" else None,
        mbs=(1, 2, 4, 8),
        recompute=recompute_choices(model, base),
        sharding=FRAMEWORK_SHARDING[framework],
        cp_comm=("all_gather",) if framework == "torchtitan" else tuple(dict.fromkeys((natural_cp_comm(model), "a2a"))),
    )


def virtual_stages(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """Virtual stages per rank worth trying: for each number of layers in a stage, the fewest stages that hold the model.

    Embedding and loss may count as a layer or be alone on their stage.
    """
    if pp == 1:
        return (1,)
    layers = model.num_layers
    counts = {-(-units // (pp * size)) for size in range(1, layers // pp + 1) for units in (layers, layers + 2)}
    return (1, *sorted(vpp for vpp in counts if vpp > 1 and pp * vpp <= layers + 2))


def groups(space: Space, model: ModelSpec, world: int, base: Layout, *, seq_len: int) -> Iterator[Group]:
    """Every group of the space whose degrees tile the world, the batch, the sequence, the heads and the experts."""
    heads = [(block.heads, block.kv_heads) for block in model.attentions]
    for tp in space.tp:
        if any(count % tp or (kv % tp and tp % kv) for count, kv in heads) or any(mlp.ffn % tp for mlp in model.dense_mlps):
            continue
        for cp in space.cp:
            if cp > 1 and (seq_len % (2 * cp) or seq_len // cp % tp):
                continue
            comms = [comm for comm in space.cp_comm if comm != "a2a" or _heads_split(heads, tp, cp)] if cp > 1 else [base.cp_comm]
            for pp in space.pp:
                if world % (tp * cp * pp) == 0:
                    for comm in comms:
                        start = derive(base, tp=tp, cp=cp, pp=pp, dp=world // (tp * cp * pp), sp=tp > 1, cp_comm=comm, vpp=1)
                        yield from _batch_groups(space, model, start)


def _heads_split(heads: Sequence[tuple[int, int]], tp: int, cp: int) -> bool:
    """Query and key/value heads of a tensor parallel rank split over the context parallel group."""
    return all(count // tp % cp == 0 and max(kv // tp, 1) % cp == 0 for count, kv in heads)


def _batch_groups(space: Space, model: ModelSpec, start: Layout) -> Iterator[Group]:
    pp, dp, tp = start.pp, start.dp, start.tp
    meshes = [(1, 1)]
    if model.moe:
        etps = space.etp or tuple(dict.fromkeys((1, tp)))
        meshes = [(ep, etp) for etp in etps for ep in space.ep if start.world % (pp * ep * etp) == 0 and model.moe.ffn % etp == 0]
    counts = virtual_stages(model, pp)
    if space.vpp is not None:
        counts = tuple(vpp for vpp in space.vpp if pp * vpp <= model.num_layers + 2 and (vpp == 1 or pp > 1))
    for mbs in space.mbs:
        if start.gbs % (mbs * dp):
            continue
        micro = start.gbs // (mbs * dp)
        legal = tuple(vpp for vpp in counts if vpp == 1 or micro % pp == 0)
        for ep, etp in meshes:
            for sharding in space.sharding:
                if pp > 1 and sharding in NOT_WITH_PIPELINE:
                    continue
                layout = derive(start, ep=ep, etp=etp, mbs=mbs, recompute=space.recompute[0], **SHARDING[sharding])
                yield Group(layout=layout, vpp=legal, recompute=space.recompute)

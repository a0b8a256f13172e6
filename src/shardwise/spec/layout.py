"""How a training step is split over ranks: `Layout`, with `Recompute` and `Offload`.

A layout holds what the user chose; what follows from it (world size, expert data parallel size, micro batches) is a property.
A `Layout` may be illegal: `shardwise.planner.rules.check_layout` judges it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Sharding = Literal["none", "distributed_optimizer", "zero2", "fsdp2", "megatron_fsdp"]
Precision = Literal["fp32", "fp16", "bf16", "fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4"]
Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
Schedule = Literal["gpipe", "1f1b", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev"]
CpComm = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
Dispatcher = Literal["allgather", "alltoall", "deepep", "hybridep"]
CrossEntropy = Literal["unfused", "fused", "te", "chunked"]  # te: Transformer Engine, the gradient overwrites the logits
AttentionKernel = Literal["flash", "unfused"]
Optimizer = Literal["adam", "sgd", "muon"]
Peft = Literal["lora", "dora"]

DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What is recomputed in the backward pass instead of being saved.

    selective: `modules` (Megatron's words: core_attn, mlp, moe, moe_act, layernorm, mla_up_proj, shared_experts, ...; torchtitan: op, every
    other matrix product and what follows from it).
    full: whole layers; `uniform` saves one input per `num_layers` layers, `block` recomputes the first `num_layers` layers of each
    (virtual) stage and keeps the others whole.
    """

    granularity: Literal["none", "selective", "full"] = "none"
    modules: tuple[str, ...] = ()
    method: Literal["uniform", "block"] | None = None
    num_layers: int | None = None

    def __str__(self) -> str:
        if self.granularity == "selective":
            return "selective:" + "+".join(self.modules)
        if self.granularity == "full":
            return f"full:{self.method}:{self.num_layers}"
        return "none"


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What is kept in host memory.

    optimizer: fraction of the optimizer state, 0 to 1. activation_layers: layers whose activations are offloaded (Megatron
    `cpu_offloading_num_layers`). activation_modules: modules whose inputs are offloaded (Megatron fine-grained offloading).
    """

    optimizer: float = 0.0
    activation_layers: int = 0
    activation_modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = []
        if self.optimizer:
            parts.append(f"optimizer:{self.optimizer:g}")
        if self.activation_layers:
            parts.append(f"layers:{self.activation_layers}")
        if self.activation_modules:
            parts.append("modules:" + "+".join(self.activation_modules))
        return ",".join(parts) or "none"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A combined parallel layout in the vocabulary of Megatron. Degrees are numbers of ranks.

    `dp` counts dense replicas: world = tp * cp * dp * pp. Experts see the same ranks of a stage as etp * ep * edp.
    """

    # degrees
    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1  # virtual stages per pipeline rank
    sp: bool = False  # sequence parallel (over the tp group)

    # context parallel
    cp_comm: CpComm = "p2p"
    cp_sizes: tuple[int, ...] = ()  # hierarchical sizes of a2a+p2p: (a2a group, p2p group), product = cp

    # batch
    mbs: int = 1  # samples of a micro batch on one rank
    gbs: int = 1  # samples of a step over all ranks

    # pipeline
    schedule: Schedule = "1f1b"  # 1f1b with vpp > 1 is interleaved 1F1B
    vpp_group: int | None = None  # micro batches per virtual stage before switching; None = pp
    first_stage_layers: int | None = None  # pinned layers of the first / last pipeline rank
    last_stage_layers: int | None = None
    account_for_embedding: bool = False  # the embedding / the loss counts as one layer when stages are cut
    account_for_loss: bool = False
    pipeline_layout: tuple[str, ...] | None = None  # one word of E, t, m, L per (virtual) stage; stage s is on rank s % pp

    # sharding of training state over data parallel ranks
    sharding: Sharding = "distributed_optimizer"
    shard_group: int | None = None  # ranks of the dp*cp group that share one copy; None = all of them, fewer = HSDP
    reshard_after_forward: bool = True  # FSDP frees gathered weights after forward and gathers them again in backward

    # numbers
    precision: Precision = "bf16"  # of the matrix products
    param_dtype: Dtype = "bf16"  # of the weights the forward pass reads (fp8: FP8 parameters, fp32: autocast or FSDP)
    grad_dtype: Dtype = "fp32"  # of accumulated and reduced gradients
    master_dtype: Dtype | None = "fp32"  # of the optimizer's own copy of the weights; None = it updates the weights themselves
    moment_dtype: Dtype = "fp32"  # of each Adam moment
    optimizer: Optimizer = "adam"
    peft: Peft | None = None  # base weights frozen, adapters trained
    lora_rank: int = 32

    # memory against time
    recompute: Recompute = Recompute()
    offload: Offload = Offload()

    # kernels and overlap
    attention: AttentionKernel = "flash"
    cross_entropy: CrossEntropy = "fused"
    cuda_graphs: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    overlap_p2p: bool = True  # takes effect with vpp > 1
    overlap_tp: bool = False  # Megatron tp_comm_overlap
    overlap_moe: bool = False  # Megatron overlap_moe_expert_parallel_comm

    # experts
    dispatcher: Dispatcher = "alltoall"
    capacity_factor: float | None = None  # None = dropless
    pad_to_capacity: bool = False

    @property
    def world(self) -> int:
        """Ranks of the layout."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Expert data parallel size, world / (pp * ep * etp), rounded down."""
        return self.world // max(1, self.pp * self.ep * self.etp)

    @property
    def microbatches(self) -> int:
        """Micro batches of one replica in a step, gbs / (mbs * dp), rounded down."""
        return self.gbs // max(1, self.mbs * self.dp)

    @property
    def stages(self) -> int:
        """Virtual pipeline stages, pp * vpp."""
        return self.pp * self.vpp

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of dense sharded state (1 without sharding)."""
        if self.sharding == "none":
            return 1
        return self.shard_group or self.dp * self.cp

    @property
    def expert_shard_size(self) -> int:
        """Ranks that share one copy of sharded expert state (1 without sharding)."""
        if self.sharding == "none":
            return 1
        copies = max(1, self.dp * self.cp // self.shard_size)
        return max(1, self.edp // copies)

    def with_world(self, world: int) -> Layout:
        """This layout on `world` ranks: dp becomes world / (tp * cp * pp), rounded down and at least 1."""
        return replace(self, dp=max(1, world // max(1, self.tp * self.cp * self.pp)))

    def replace(self, **changes: Any) -> Layout:
        return replace(self, **changes)

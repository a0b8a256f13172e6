"""The configuration of a run: sections and keys of Megatron Bridge.

A recipe is a function that returns a `RunConfig`; overrides change single keys. What the runner does not act on is not a key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Family = str  # `model_type` of a transformers config


@dataclass(kw_only=True)
class ModelConfig:
    """The model and its layout. `hf` holds the fields of its transformers config; the named architecture keys override them."""

    model_type: Family = "llama"
    hf: dict[str, Any] = field(default_factory=dict)
    num_layers: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    vocab_size: int | None = None
    num_moe_experts: int | None = None
    moe_router_topk: int | None = None
    moe_ffn_hidden_size: int | None = None
    seq_length: int = 4096

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    cp_comm_type: str | None = None
    hierarchical_context_parallel_sizes: list[int] | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    pipeline_schedule: str = "1f1b"

    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "none"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_bias_update_rate: float = 0.0
    moe_expert_capacity_factor: float | None = None
    moe_token_dispatcher_type: Literal["alltoall"] = "alltoall"

    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None


@dataclass(kw_only=True)
class TrainConfig:
    train_iters: int = 300_000
    global_batch_size: int = 32
    micro_batch_size: int = 2
    exit_interval: int | None = None
    exit_duration_in_mins: float | None = None


@dataclass(kw_only=True)
class ValidationConfig:
    """eval_interval 0 or null: no evaluation during training."""

    eval_iters: int = 32
    eval_interval: int | None = 500


@dataclass(kw_only=True)
class OptimizerConfig:
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 3e-4
    min_lr: float = 3e-5
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = True


@dataclass(kw_only=True)
class SchedulerConfig:
    """lr_decay_iters null: train_iters."""

    lr_decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    lr_decay_iters: int | None = None
    lr_warmup_iters: int = 500
    lr_warmup_init: float = 0.0


@dataclass(kw_only=True)
class DDPConfig:
    use_distributed_optimizer: bool = True
    use_torch_fsdp2: bool = False
    shard_group_size: int | None = None  # ranks that share one copy under FSDP2; null: all of them


@dataclass(kw_only=True)
class DatasetConfig:
    """data_path null: mock data. Else .txt, .jsonl, .parquet or .bin (token numbers) files; see `shardwise.train.data`."""

    data_path: list[str] | None = None
    text_key: str = "text"
    random_seed: int = 1234
    eval_fraction: float = 0.0002
    reset_attention_mask: bool = False  # attention and positions stay inside documents
    mock_documents: int = 100_000


@dataclass(kw_only=True)
class TokenizerConfig:
    """tokenizer_type: NullTokenizer (numbers, mock data), ByteTokenizer, or HuggingFaceTokenizer with a local tokenizer file."""

    tokenizer_type: Literal["NullTokenizer", "ByteTokenizer", "HuggingFaceTokenizer"] = "NullTokenizer"
    tokenizer_model: str | None = None
    vocab_size: int | None = 32_000


@dataclass(kw_only=True)
class LoggerConfig:
    log_interval: int = 10
    log_throughput: bool = False
    jsonl: str | None = None
    tensorboard_dir: str | None = None
    wandb_project: str | None = None


@dataclass(kw_only=True)
class CheckpointConfig:
    """save_interval 0: only at the end and on SIGTERM, where `save` is given. load: where to resume from, if a checkpoint is there."""

    save: str | None = None
    load: str | None = None
    save_interval: int = 500
    pretrained_checkpoint: str | None = None  # a folder of Hugging Face safetensors to start from
    most_recent_k: int = -1


@dataclass(kw_only=True)
class DistConfig:
    distributed_timeout_minutes: float = 10


@dataclass(kw_only=True)
class RngConfig:
    seed: int = 1234


@dataclass(kw_only=True)
class ProfilingConfig:
    use_pytorch_profiler: bool = False
    profile_step_start: int = 10
    profile_step_end: int = 12
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    record_memory_history: bool = False
    memory_snapshot_path: str = "snapshot.pickle"


@dataclass(kw_only=True)
class RunConfig:
    """mixed_precision null: bf16_mixed on a GPU, fp32 on a CPU (where bf16 products are some 40 times slower)."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ddp: DDPConfig = field(default_factory=DDPConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    rng: RngConfig = field(default_factory=RngConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    mixed_precision: Literal["bf16_mixed", "fp32"] | None = None

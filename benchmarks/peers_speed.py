"""One training step of a small Llama under a layout, side by side with torchtitan: tokens per second of both, and their ratio.

    python -m benchmarks.peers_speed                      # tp, sp, dp, fsdp2 and pp on two ranks
    python -m benchmarks.peers_speed --layouts tp pp --rounds 20

The same sizes, data, layout, precision (fp32) and optimizer (AdamW, clipping at 1.0) in the same processes; steps of both alternate, so
both see the same machine. shardwise trains the unmodified Llama of `transformers`, torchtitan its own Llama with its `Trainer.train_step`,
both with torch's fused attention. Without torchtitan the column is left out. It needs an environment with torch and shardwise, and

    pip install --no-deps torchtitan==0.3.0 torchdata torch_checkpointing spmd_types==0.2.3 tyro docstring_parser typeguard shtab \\
        triton tensorboard einops datasets dill multiprocess xxhash pyarrow pandas httpx httpcore h11 anyio

torchtitan has no CPU backend: the few names of `torch.cpu` that it asks for (a device's name, its memory) are filled in here.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

LAYOUTS = {
    "tp": ("tp=2 sharding=none", {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}),
    "sp": ("tp=2 sp=true sharding=none", {"tensor_parallel_degree": 2}),
    "dp": ("sharding=none", {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}),
    "fsdp2": ("sharding=fsdp2", {"data_parallel_shard_degree": 2}),
    "pp": (
        "pp=2 sharding=none",
        {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        },
    ),
}
DIM, HIDDEN, LAYERS, HEADS, KEY_HEADS, VOCAB = 256, 768, 4, 8, 4, 2048
Step = Callable[[], float]


def tokens_of(number: int, batch: int, length: int) -> torch.Tensor:
    """The global batch of a step: [batch, length + 1]."""
    return torch.randint(0, VOCAB, (batch, length + 1), generator=torch.Generator().manual_seed(number))


def shardwise_step(words: str, batch: int, length: int) -> Step:
    """A step of this library; returns the loss."""
    from shardwise.parallel.build import parallelize_model
    from shardwise.parallel.step_optimizer import StepOptimizer
    from shardwise.parallel.topology import connect
    from shardwise.recipes.pretrain import recipe
    from shardwise.spec import grammar
    from shardwise.train.batches import simple_samples
    from shardwise.train.loop import make_optimizer
    from shardwise.train.model import transformers_config
    from shardwise.train.step import Trainer

    fields = {
        "model_type": "llama", "hidden_size": DIM, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS, "vocab_size": VOCAB, "max_position_embeddings": length,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    }  # fmt: skip
    numbers = [f"gbs={batch}", "mbs=1", "precision=fp32", "param_dtype=fp32", "master_dtype=none"]
    layout = grammar.parse([*words.split(), *numbers], world=dist.get_world_size())
    topology = connect(layout)
    model = parallelize_model(transformers_config(fields), topology, seed=1, device=torch.device("cpu"))
    run = recipe("llama32_1b_tiny_pretrain_config")
    trainer = Trainer(model, StepOptimizer(model, lambda groups: make_optimizer(run, groups), 1.0))
    each = batch // layout.dp
    number = 0

    def step() -> float:
        nonlocal number
        number += 1
        return trainer.train(
            simple_samples(tokens_of(number, batch, length)).rows(topology.dp_rank * each, (topology.dp_rank + 1) * each)
        ).loss

    return step


def torchtitan_step(parallelism: dict[str, Any], batch: int, length: int) -> Step:
    """A step of torchtitan's trainer; it reports no loss between logged steps (nan)."""
    _lend_device()
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

    llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()
    rope = ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=length, theta=500_000.0, scaling="none")
    model = llama3.Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM, param_init=llama3._EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=llama3._output_linear_init(DIM)),
        layers=llama3._build_llama3_layers(
            fuse_qkv=False, n_layers=LAYERS, dim=DIM, n_heads=HEADS, n_kv_heads=KEY_HEADS, hidden_dim=HIDDEN, rope=rope, attn_backend="sdpa"
        ),
    )
    spec = ModelSpec(
        name="llama3", flavor="small", model=model, parallelize_fn=llama3.parallelize_llama, pipelining_fn=llama3.pipeline_llm,
        post_optimizer_build_fn=None, state_dict_adapter=None,
    )  # fmt: skip
    schedule = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8, decay_type="linear", min_lr_factor=0.0)
    local = batch if "pipeline_parallel_degree" in parallelism else 1
    replicas = int(os.environ["WORLD_SIZE"]) if any(name.startswith("data") for name in parallelism) else 1
    config = Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB),
        model_spec=spec,
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=schedule,
        training=TrainingConfig(
            local_batch_size=local, global_batch_size=batch, seq_len=length, steps=10_000, disable_cuda_graphs=True,
            mixed_precision_param="float32", dtype="float32",
        ),
        metrics=MetricsProcessor.Config(log_freq=10**6),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallelism),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
    )  # fmt: skip
    config.dataloader = config.tokenizer = SimpleNamespace(build=lambda **_: None)  # samples are handed to `train_step`
    trainer = Trainer(config)
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    if trainer.parallel_dims.pp_enabled and "arg_mbs" not in inspect.signature(trainer.pp_schedule.step).parameters:
        _give_micro_batches(trainer.pp_schedule)
    rank = dist.get_rank() if replicas > 1 else 0

    def samples() -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        number, each = 0, batch // replicas
        while True:
            number += 1
            for row in tokens_of(number, batch, length)[rank * each : (rank + 1) * each].split(1):
                yield {"input": row[:, :-1]}, row[:, 1:].contiguous()

    source, trainer.step = samples(), 1

    def step() -> float:
        trainer.step += 1
        trainer.train_step(source)
        return float("nan")

    return step


def _give_micro_batches(schedule: Any) -> None:
    """torch 2.13's schedules take whole batches only; torchtitan hands over micro batches, as later ones take them."""

    def step(**given: Any) -> None:
        schedule._stage.has_backward = True
        schedule._stage.clear_runtime_states()
        schedule._step_microbatches(**given)

    schedule.step = step


def _lend_device() -> None:
    """What torchtitan asks of a device module and `torch.cpu` has not."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda *_: "cpu"
    torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1)
    torch.cpu.memory_stats = lambda *_: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = torch.cpu.set_device = lambda *_: None
    torch.cpu.device_count = lambda: 1


def measure(name: str, rounds: int, batch: int, length: int, profile: bool) -> None:
    """On the ranks of one launch."""
    torch.set_num_threads(1)
    words, parallelism = LAYOUTS[name]
    steps: dict[str, Step] = {}
    try:
        steps["torchtitan"] = torchtitan_step(parallelism, batch, length)
    except ImportError as error:
        print(f"torchtitan is not measured: {error}", flush=True)
        dist.init_process_group("gloo")
    steps["shardwise"] = shardwise_step(words, batch, length)
    gc.enable()  # torchtitan turns it off in its process and collects every 50 steps
    wall: dict[str, list[float]] = {library: [] for library in steps}
    work: dict[str, list[float]] = {library: [] for library in steps}
    for number in range(rounds + 3):
        for library, step in steps.items():
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            step()
            took = torch.tensor([time.perf_counter() - began, time.process_time() - cpu], dtype=torch.float64)
            whole = took.clone()
            dist.all_reduce(took, dist.ReduceOp.MAX)
            dist.all_reduce(whole)
            if number >= 3:
                wall[library].append(float(took[0]))
                work[library].append(float(whole[1]))
    if dist.get_rank() == 0:
        for library in steps:
            speed = batch * length / statistics.median(wall[library])
            print(
                f"{name:6}{library:12}{speed:9,.0f} tokens/s  {1e3 * statistics.median(work[library]):8.1f} ms CPU of all ranks", flush=True
            )
        if "torchtitan" in steps:
            ratio = statistics.median(b / a for a, b in zip(wall["shardwise"], wall["torchtitan"], strict=True))
            cpu_ratio = statistics.median(work["torchtitan"]) / statistics.median(work["shardwise"])
            print(f"{name:6}shardwise / torchtitan: tokens/s {ratio:.2f}, per CPU second {cpu_ratio:.2f}", flush=True)
    if profile:
        with torch.profiler.profile() as profiler:
            steps["shardwise"]()
        if dist.get_rank() == 0:
            print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=8, help="samples of a step, over all ranks")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--profile", action="store_true", help="print where a step of shardwise spends its time")
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.layouts[0], given.rounds, given.batch, given.length, given.profile)
        return 0
    for name in given.layouts:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "benchmarks.peers_speed"]
        options = ["--layouts", name, "--rounds", str(given.rounds), "--batch", str(given.batch), "--length", str(given.length)]
        options += ["--profile"] * given.profile
        code = subprocess.call([*command, *options], env={"OMP_NUM_THREADS": "1", **os.environ})
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Checkpoints move between layouts: bit-equal weights, equal next loss, safetensors that transformers loads."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from tests.parallel import cases

from shardwise.parallel.build import parallelize_model
from shardwise.parallel.step_optimizer import StepOptimizer
from shardwise.parallel.topology import connect
from shardwise.planner.rules import check_layout, is_legal
from shardwise.spec import hf
from shardwise.testing import ranks
from shardwise.train import dist_checkpoint
from shardwise.train.step import Trainer
from shardwise.train.verify import Rules, make_adamw

LAYOUTS = (
    "tp=4", "tp=2 sp=true pp=2", "pp=4", "pp=2 vpp=2 schedule=zbv", "pp=2 vpp=2", "sharding=fsdp2", "tp=2 sp=true sharding=fsdp2", "cp=4",
    "sharding=none", "ep=4", "ep=2 etp=2", "tp=2 ep=4 sp=true", "pp=2 ep=2 vpp=2", "ep=2 sharding=fsdp2",
    "tp=2 pp=2 ep=2 sp=true sharding=fsdp2",
    "sharding=fsdp2 shard_group=2",
)  # fmt: skip
PAIRS = 30


def trainer(family: str, words: str, *, seed: int = 5) -> Trainer:
    topology = connect(cases.layout(4, words))
    model = parallelize_model(cases.config(family), topology, seed=seed, device=torch.device("cpu"))
    return Trainer(model, StepOptimizer(model, lambda groups: make_adamw(Rules(mbs=1), groups), 1.0))


def step(run: Trainer, number: int) -> float:
    data, dp = cases.samples(number, gbs=4, length=8), run.topology.layout.dp
    each = data.size // dp
    return run.train(data.rows(run.topology.dp_rank * each, (run.topology.dp_rank + 1) * each)).loss


def fits(family: str, words: str) -> bool:
    dense = "ep=" not in words
    return dense or is_legal(check_layout(hf.from_config(cases.FAMILIES[family], family), cases.layout(4, words), None, seq_len=48))


@ranks(4, processes=True, timeout=400)
def test_a_checkpoint_of_any_layout_loads_under_any_other(world, tmp_path):
    torch.set_num_threads(1)
    chosen = random.Random(0)
    for family in ("llama", "qwen3_moe"):
        usable = [words for words in LAYOUTS if fits(family, words) and not (family == "llama" and "ep=" in words)]
        order = [chosen.choice(usable) for _ in range(PAIRS // 2 + 1)]
        run, number = trainer(family, order[0]), 0
        step(run, number)
        for after in order[1:]:
            number += 1
            path = dist_checkpoint.save(Path(tmp_path) / family, number, run.model, run.optimizer, {})
            before = dist_checkpoint.read_whole(path)
            other = trainer(family, after, seed=6)  # other initial weights: all must come from the checkpoint
            dist_checkpoint.load(path, other.model, other.optimizer)
            for name, value in dist_checkpoint.weights(other.model).items():
                whole = before[name]
                assert torch.equal(value.as_subclass(torch.Tensor), value.part.take(whole)), f"{after}: {name}"
            first, second = step(run, number), step(other, number)
            assert abs(first - second) <= 1e-6 * abs(first), (run.topology.layout, after)
            run = other
        if dist.get_rank() == 0:
            shutil.rmtree(Path(tmp_path) / family)


@ranks(2, processes=True, timeout=400)
def test_exported_weights_load_in_transformers_and_back(world, tmp_path):
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    for family in ("llama", "qwen3_moe", "deepseek_v3"):
        topology = connect(cases.layout(2, "tp=2 sp=true"))
        model = parallelize_model(cases.config(family), topology, seed=5, device=torch.device("cpu"))
        run = Trainer(model, StepOptimizer(model, lambda groups: make_adamw(Rules(mbs=1), groups), 1.0))
        data = cases.samples(0, gbs=4, length=8)
        run.train(data)
        loss = run.evaluate(data).loss
        path = dist_checkpoint.save(Path(tmp_path) / family, 1, run.model, run.optimizer, {})
        folder = Path(tmp_path) / f"{family}_hf"
        if world.rank == 0:
            dist_checkpoint.export(path, folder, cases.FAMILIES[family])
        dist.barrier()
        plain = AutoModelForCausalLM.from_pretrained(folder)
        logits = plain(input_ids=data.tokens).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data.labels.flatten())
        assert abs(loss - float(expected)) <= 1e-5 * loss, family
        source = dist_checkpoint.import_pretrained(folder)
        again = parallelize_model(cases.config(family), connect(cases.layout(2, "pp=2")), seed=9, device=torch.device("cpu"), source=source)
        back = Trainer(again, StepOptimizer(again, lambda groups: make_adamw(Rules(mbs=1), groups), 1.0))
        assert abs(back.evaluate(data).loss - loss) <= 1e-5 * loss, family

"""bf16 mixed precision: the plain recipe of bf16 passes and float32 updates, whatever is kept or made again between them."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.parallel import cases

from shardwise.parallel.build import parallelize_model
from shardwise.parallel.stage import build_meta
from shardwise.parallel.step_optimizer import StepOptimizer
from shardwise.parallel.topology import connect
from shardwise.parallel.weights import initial_state
from shardwise.testing import ranks
from shardwise.train import dist_checkpoint
from shardwise.train.step import Trainer
from shardwise.train.verify import Rules, make_adamw

RULES = Rules(mbs=1)
SEED = 5
# norms, q and k norms, rotary halves, gated and plain activation functions, parallel blocks, routers, latents
FAMILIES = ("llama", "qwen3", "gemma", "olmo2", "gpt_neox", "qwen3_moe", "deepseek_v3")


def trainer(family: str, words: str, world: int, *, seed: int = SEED) -> Trainer:
    layout = cases.layout(world, words)
    model = parallelize_model(cases.config(family), connect(layout), seed=seed, device=torch.device("cpu"), dtype=torch.bfloat16)
    return Trainer(model, StepOptimizer(model, lambda groups: make_adamw(RULES, groups), RULES.clip))


def steps(run: Trainer, count: int, first: int = 0) -> list[float]:
    layout, losses = run.topology.layout, []
    for data in cases.steps(first + count)[first:]:
        each = data.size // layout.dp
        losses.append(run.train(data.rows(run.topology.dp_rank * each, (run.topology.dp_rank + 1) * each)).loss)
    return losses


def by_hand(family: str, count: int) -> list[float]:
    """The model in bf16 in one process; gradients of its micro batches and the weights that are updated in float32."""
    from transformers import AutoModelForCausalLM

    config = cases.config(family)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.load_state_dict(initial_state(build_meta(config), SEED), strict=False)
    model.tie_weights()
    model.train()
    for parameter in model.parameters():  # buffers keep their format
        parameter.data = parameter.data.bfloat16()
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    groups = [{"params": [x for x in masters if (x.ndim > 1) == decayed], "decayed": decayed} for decayed in (True, False)]
    optimizer, losses = make_adamw(RULES, groups), []
    for data in cases.steps(count):
        total = 0.0
        for master in masters:
            master.grad = torch.zeros_like(master)
        for start in range(data.size):
            rows = data.rows(start, start + 1)
            logits = model(input_ids=rows.tokens, position_ids=rows.positions, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), rows.labels.flatten(), reduction="sum") / data.labels.numel()
            loss.backward()
            total += float(loss.detach())
            for parameter, master in zip(model.parameters(), masters, strict=True):
                if parameter.grad is not None:
                    master.grad += parameter.grad.float()
                parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, RULES.clip)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        losses.append(total)
    return losses


@ranks(1, timeout=300)
def test_one_rank_is_the_plain_recipe(world):
    torch.set_num_threads(1)
    for family in FAMILIES:
        found, expected = steps(trainer(family, "sharding=none", 1), 3), by_hand(family, 3)
        # the first step has the same numbers, bit by bit, where attention is the same kernel; later ones differ by clipping's rounding
        if family != "deepseek_v3":
            assert abs(found[0] - expected[0]) <= 1e-6 * expected[0], (family, found, expected)
        assert max(abs(a - b) / b for a, b in zip(found, expected, strict=True)) <= 2e-3, (family, found, expected)


@ranks(2, processes=True, timeout=400)
def test_layouts_agree_within_the_rounding_of_bf16(world):
    torch.set_num_threads(1)
    dense = ("dp=2", "dp=2 sharding=none", "sharding=fsdp2", "tp=2", "tp=2 sp=true recompute=full", "cp=2", "pp=2 schedule=zb-h1")
    for family, layouts in (("llama", dense), ("qwen3_moe", ("ep=2", "tp=2 sp=true ep=2", "sharding=fsdp2"))):
        alone = by_hand(family, 3)
        for words in layouts:
            found = steps(trainer(family, words, 2), 3)
            # a sum of shares rounds each share: some of the 8 bits of bf16, averaged over 52 tokens
            assert max(abs(a - b) / b for a, b in zip(found, alone, strict=True)) <= 2e-3, (family, words, found, alone)


@ranks(2, processes=True, timeout=400)
def test_what_is_made_again_is_what_would_have_been_kept(world):
    torch.set_num_threads(1)
    for family, words in (("llama", "tp=2 sp=true"), ("gpt_neox", "tp=2"), ("deepseek_v3", "tp=2 sp=true ep=2")):
        gradients = []
        for active in (True, False):
            run = trainer(family, words, 2)
            run.model.savings.active = active
            steps(run, 1)
            gradients.append([parameter.grad for parameter, _ in run.model.parameters])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)), (family, words)


@ranks(2, processes=True, timeout=300)
def test_a_resumed_run_has_the_float32_weights(world, tmp_path):
    torch.set_num_threads(1)
    run = trainer("llama", "dp=2", 2)
    steps(run, 2)
    path = dist_checkpoint.save(Path(tmp_path), 2, run.model, run.optimizer, {})
    saved = copy.deepcopy(dist_checkpoint.read_whole(path))
    assert all(value.dtype == torch.float32 for value in saved.values() if value.is_floating_point())
    further = steps(run, 2, first=2)
    for words in ("dp=2", "dp=2 sharding=none", "tp=2"):
        again = trainer("llama", words, 2, seed=6)
        dist_checkpoint.load(path, again.model, again.optimizer)
        for each in again.optimizer.updated:
            assert torch.equal(each.value.detach(), each.part.take(saved[each.held.name])), words
        found = steps(again, 2, first=2)
        if words == "dp=2":
            assert found == further
        assert max(abs(a - b) / b for a, b in zip(found, further, strict=True)) <= 2e-3, words

"""Any sequence length under context parallelism: no token lost, none leaked, the same loss as one process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.parallel import cases

from shardwise.parallel.build import parallelize_model
from shardwise.parallel.stage import build_meta
from shardwise.parallel.step_optimizer import StepOptimizer
from shardwise.parallel.token_loss import IGNORED
from shardwise.parallel.topology import connect
from shardwise.parallel.weights import initial_state
from shardwise.testing import ranks
from shardwise.train.batches import Samples
from shardwise.train.step import Trainer
from shardwise.train.verify import Rules, make_adamw

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}


def hold(cp: int) -> None:
    """Lengths 1 to 130: a whole sequence with one whose last third is padding, then one of packed documents."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    config = cases.config("llama", **SMALL)
    plain = AutoModelForCausalLM.from_config(config).eval()
    plain.load_state_dict(initial_state(build_meta(config), 3), strict=False)
    plain.tie_weights()
    topology = connect(cases.layout(cp, f"cp={cp}", gbs=2))
    model = parallelize_model(config, topology, seed=3, device=torch.device("cpu"))
    trainer = Trainer(model, StepOptimizer(model, lambda groups: make_adamw(Rules(mbs=1), groups), 0.0))
    for length in range(1, 131):
        padded = cases.samples(length, gbs=2, length=length)
        padded.labels[1, length - length // 3 :] = IGNORED
        for samples in (padded, cases.samples(-length, gbs=1, length=length, packed=True)):
            with torch.no_grad():
                expected = loss_of(plain, samples)
            loss = trainer.evaluate(samples).loss
            assert abs(loss - expected) <= 1e-5 * max(expected, 1e-3), f"length {length}: {loss} and {expected}"


def loss_of(plain: torch.nn.Module, samples: Samples) -> float:
    logits = plain(input_ids=samples.tokens, position_ids=samples.positions, use_cache=False).logits
    count = max(1, int((samples.labels != IGNORED).sum()))
    return float(F.cross_entropy(logits.flatten(0, 1), samples.labels.flatten(), ignore_index=IGNORED, reduction="sum")) / count


@ranks(2, processes=True, timeout=400)
def test_lengths_over_two_ranks(world):
    hold(2)


@ranks(3, processes=True, timeout=400)
def test_lengths_over_three_ranks(world):
    hold(3)


@ranks(4, processes=True, timeout=400)
def test_lengths_over_four_ranks(world):
    hold(4)

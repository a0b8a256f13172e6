"""Every axis, alone and combined, against `transformers`' own model in one process: losses of 5 steps, gradients, weights after."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from tests.parallel import cases

from shardwise.errors import ModelError
from shardwise.parallel.router import Balance
from shardwise.planner.rules import check_layout, is_legal
from shardwise.spec import hf
from shardwise.spec.layout import Layout
from shardwise.testing import ranks
from shardwise.train.verify import Rules, compare, reference

RULES = Rules(mbs=1)
# Some gradients are zero but for rounding: those of a key's bias, and of queries that see one key. Adam divides them by their own size, so
# such models are compared with a large eps.
STEADY = Rules(mbs=1, eps=1e-3)
BIASED = ("qwen2", "phi", "gpt_neox")


def legal(family: str, layout: Layout) -> bool:
    """By the planner's rules, at a sequence length without remainders; families it does not describe are not judged."""
    if family in cases.SPECIAL:
        return True
    described = family if family in hf.model_types() else "llama"
    return is_legal(check_layout(hf.from_config({**cases.FAMILIES[family], "model_type": described}), layout, None, seq_len=48))


def hold(family: str, layouts: Sequence[str], *, rules: Rules = RULES, length: int = 13, packed: bool = False) -> None:
    """Each layout equals one process. Runs on the ranks of a test."""
    torch.set_num_threads(1)
    config, data = cases.config(family), cases.steps(length=length, packed=packed)
    expected = reference(config, data, rules) if dist.get_rank() == 0 else None
    for words in layouts:
        layout = cases.layout(dist.get_world_size(), words)
        assert legal(family, layout), words
        parity = compare(config, layout, data, rules, expected)
        assert parity.equal, f"{family} {words}: {parity}"


@ranks(2, processes=True, timeout=400)
def test_llama_on_two_ranks(world):
    hold(
        "llama",
        [
            "dp=2", "dp=2 sharding=none", "dp=2 sharding=fsdp2", "tp=2", "tp=2 sp=true", "cp=2", "cp=2 cp_comm=a2a",
            "cp=2 cp_comm=all_gather", "pp=2", "pp=2 schedule=gpipe",
            "pp=2 vpp=2", "pp=2 schedule=zb-h1", "pp=2 vpp=2 schedule=zbv", "pp=2 vpp=2 schedule=dualpipev",
            "pp=2 first_stage_layers=1 last_stage_layers=3", "tp=2 sp=true recompute=full:uniform:3",
            "pp=2 recompute=selective:mlp+layernorm", "sharding=fsdp2 recompute=full:uniform:3",
        ],
    )  # fmt: skip


@ranks(4, processes=True, timeout=400)
def test_llama_on_four_ranks(world):
    hold(
        "llama",
        [
            "tp=4", "tp=2 pp=2 sp=true", "tp=2 cp=2 sp=true", "cp=2 pp=2 vpp=2", "cp=4 cp_comm=a2a+p2p cp_sizes=2x2", "pp=4",
            "pp=4 sharding=fsdp2",
            "tp=2 sp=true sharding=fsdp2", "pp=2 cp=2 sharding=fsdp2", "pp=2 vpp=2 schedule=zbv sharding=fsdp2",
            "sharding=fsdp2 shard_group=2",
        ],
    )  # fmt: skip


@ranks(3, processes=True, timeout=400)
def test_llama_on_three_ranks(world):
    hold("llama", ["cp=3", "pp=3"], length=16)
    hold("llama", ["pp=3"], length=17)
    # With these 17 tokens a few gate weights have gradients near Adam's eps, whose sign is rounding: eps is set above them.
    hold("llama", ["cp=3"], length=17, rules=Rules(mbs=1, eps=1e-6))


@ranks(2, processes=True, timeout=400)
def test_dense_families_on_two_ranks(world):
    for family in ("qwen2", "qwen3", "mistral", "gemma", "olmo", "olmo2", "phi", "gpt_neox"):
        layouts = ["tp=2 sp=true", "pp=2"] + ["cp=2"] * (family in ("mistral", "gemma", "qwen3"))
        hold(family, layouts, rules=STEADY if family in BIASED else RULES)


@ranks(2, processes=True, timeout=400)
def test_families_with_something_of_their_own(world):
    """Latent attention, shared experts with a gate, learned positions, soft caps, sliding windows, fused projections, sinks."""
    for family, (_, layouts) in cases.SPECIAL.items():
        hold(family, layouts, rules=STEADY)


@ranks(2, processes=True, timeout=400)
def test_sequence_parallel_needs_a_known_attention_block(world):
    with pytest.raises(ModelError, match="attn"):
        hold("gpt2", ["tp=2 sp=true"])


@ranks(4, processes=True, timeout=400)
def test_experts_on_four_ranks(world):
    for family in cases.MIXTURES:
        hold(family, ["tp=2 ep=4 sp=true", "pp=2 ep=2 cp=2", "ep=2 etp=2"])
    hold(
        "qwen3_moe", ["tp=2 ep=4", "tp=2 ep=2 etp=2 sp=true", "ep=2 sharding=fsdp2", "tp=2 pp=2 ep=2 sp=true vpp=2", "ep=4 recompute=full"]
    )


@ranks(8, processes=True, timeout=400)
def test_all_axes_on_eight_ranks(world):
    hold("qwen3_moe", ["tp=2 pp=2 cp=2 ep=4 sp=true"])
    hold("deepseek_v3", ["tp=2 pp=2 ep=2 etp=2 sp=true sharding=fsdp2"])


@ranks(4, processes=True, timeout=400)
def test_auxiliary_losses_reach_the_router(world):
    for kind in ("aux_loss", "seq_aux_loss"):
        rules = Rules(mbs=2, balance=Balance(kind=kind, coefficient=0.5, z_coefficient=0.1))
        hold("qwen3_moe", ["tp=2 ep=4 sp=true mbs=2", "pp=2 ep=2 cp=2 mbs=2", "tp=2 cp=2 ep=2 mbs=2"], rules=rules)


@ranks(2, processes=True, timeout=400)
def test_expert_bias_moves_alike(world):
    rules = Rules(mbs=1, balance=Balance(kind="seq_aux_loss", coefficient=0.01, score="sigmoid", bias_rate=0.05))
    hold("deepseek_v3", ["ep=2 recompute=full", "pp=2", "tp=2 sp=true"], rules=rules)


@ranks(2, processes=True, timeout=400)
def test_packed_documents_do_not_see_each_other(world):
    hold("llama", ["dp=2", "cp=2", "cp=2 cp_comm=a2a", "cp=2 cp_comm=all_gather", "tp=2 sp=true", "pp=2"], packed=True, length=23)


@ranks(4, processes=True, timeout=400)
def test_sequences_shorter_than_the_ranks(world):
    for length in (1, 2, 3, 5):
        hold("llama", ["cp=4", "tp=2 cp=2 sp=true"], length=length, rules=STEADY)
    hold("qwen3_moe", ["tp=4 ep=4 sp=true"], length=2, rules=STEADY)  # two ranks have no token to send to the experts

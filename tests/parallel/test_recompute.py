"""Which layers are recomputed, from how many kept inputs, and that nothing but memory changes."""

from __future__ import annotations

import pytest
import torch
from tests.parallel import cases

from shardwise.errors import ModelError
from shardwise.parallel import recompute
from shardwise.parallel.router import Balance, RouterLosses
from shardwise.spec.grammar import read_recompute


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize(("words", "kept"), [("full:uniform:1", 4), ("full:uniform:2", 2), ("full:uniform:3", 2), ("full:block:3", 3)])
def test_one_input_is_kept_per_run_of_layers(monkeypatch, family, words, kept):
    from transformers import AutoModelForCausalLM

    calls = []
    plain = recompute.checkpoint
    monkeypatch.setattr(recompute, "checkpoint", lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs))
    tokens = cases.samples(0, gbs=2, length=9).tokens
    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(cases.config(family)).train()
        if again:
            recompute.apply_recompute(model, read_recompute(words), RouterLosses(topology=None, balance=Balance()))
        model(input_ids=tokens, use_cache=False).logits.square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert len(calls) == kept
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_layers_that_return_more_than_hidden_states_are_not_recomputed_together():
    from transformers import AutoModelForCausalLM

    fields = {"model_type": "bloom", "vocab_size": 64, "hidden_size": 32, "n_layer": 4, "n_head": 4}
    model = AutoModelForCausalLM.from_config(cases.transformers_config(fields)).train()
    recompute.apply_recompute(model, read_recompute("full:uniform:2"), RouterLosses(topology=None, balance=Balance()))
    with pytest.raises(ModelError, match=r"BloomBlock returns more than its hidden states.*recompute_num_layers=1"):
        model(input_ids=torch.arange(18).view(2, 9), use_cache=False)


def test_a_region_that_runs_again_inside_another_leaves_the_outer_one_running_again():
    routers = RouterLosses(topology=None, balance=Balance())
    with routers.running_again():
        with routers.running_again():
            pass
        routers.add("loss", torch.ones(()))
    assert routers.values == {}

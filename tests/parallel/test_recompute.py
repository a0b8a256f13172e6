"""Which layers are recomputed, from how many kept inputs, and that nothing but memory changes."""

from __future__ import annotations

import pytest
import torch
from tests.parallel import cases

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

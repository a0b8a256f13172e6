"""What a step reports, and what must stay the same on ranks that hold copies."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.parallel import cases

from shardwise.errors import ModelError
from shardwise.parallel.build import parallelize_model
from shardwise.parallel.gradients import local
from shardwise.parallel.step_optimizer import StepOptimizer
from shardwise.parallel.topology import connect
from shardwise.testing import ranks
from shardwise.train.step import Trainer
from shardwise.train.verify import Rules, make_adamw


@ranks(4, processes=True, timeout=400)
def test_tied_copies_stay_equal_and_tokens_are_counted_once(world):
    torch.set_num_threads(1)
    for words in ("pp=2 tp=2 sp=true", "pp=2 cp=2", "pp=2 sharding=none", "pp=2 sharding=fsdp2"):
        topology = connect(cases.layout(4, words))
        model = parallelize_model(cases.config("llama"), topology, seed=3, device=torch.device("cpu"))
        trainer = Trainer(model, StepOptimizer(model, lambda groups: make_adamw(Rules(mbs=1), groups), 1.0))
        each = 4 // topology.layout.dp
        for step in range(3):
            result = trainer.train(cases.samples(step, gbs=4, length=13).rows(topology.dp_rank * each, (topology.dp_rank + 1) * each))
            assert result.tokens == 4 * 13, words
        tied = [local(parameter).detach() for parameter, held in model.parameters if held.name.endswith("embed_tokens.weight")]
        assert len(tied) == 1
        other = torch.empty_like(tied[0])
        ends = topology.ends
        partner = ends.ranks[1 - ends.rank]
        works = [dist.isend(tied[0].contiguous(), partner), dist.irecv(other, partner)]
        for work in works:
            work.wait()
        torch.testing.assert_close(tied[0], other, rtol=0, atol=0)


@ranks(2)
def test_dropout_is_refused_with_the_fields_to_set(world):
    topology = connect(cases.layout(2, "tp=2"))
    with pytest.raises(ModelError, match=r"model\.hf\.resid_pdrop=0"):
        parallelize_model(cases.config("gpt2", resid_pdrop=0.1), topology, seed=1, device=torch.device("cpu"))
    with pytest.raises(ModelError, match=r"model\.hf\.attention_dropout=0"):
        parallelize_model(cases.config("llama", attention_dropout=0.1), topology, seed=1, device=torch.device("cpu"))
    with pytest.raises(ModelError, match=r"model\.hf\.router_jitter_noise=0"):  # random numbers that no module of dropout draws
        parallelize_model(cases.config("mixtral", router_jitter_noise=0.1), topology, seed=1, device=torch.device("cpu"))
    bloom = {"model_type": "bloom", "vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1}
    with pytest.raises(ModelError, match=r"model\.hf\.hidden_dropout=0$"):
        parallelize_model(cases.transformers_config(bloom), topology, seed=1, device=torch.device("cpu"))

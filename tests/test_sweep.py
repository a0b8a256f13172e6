"""The sweep: its cases are right, are the same for a seed, and what is wrong, refused or hung is called so."""

import time

import pytest
import torch
import torch.distributed as dist

from shardwise import MissingShardPatch, ShardTensor
from tests import sweep
from tests.samples import Sample, T, all_samples

SAMPLES = all_samples()


def test_cases_of_a_seed_are_right_or_refused():
    cases = [sweep.draw(SAMPLES, 7, number) for number in range(150)]
    assert [str(case) for case in cases] == [str(sweep.draw(SAMPLES, 7, number)) for number in range(150)]
    verdicts = [(case, sweep.run(case)) for case in cases]
    assert [(str(case), verdict) for case, verdict in verdicts if verdict.kind not in ("right", "refused")] == []
    assert sum(verdict.kind == "right" for _, verdict in verdicts) > 140


def sharded(action):
    """A function that does `action(x)` on a sharded tensor only."""
    return lambda x: action(x) if isinstance(x, ShardTensor) else x * 2


def refuse(x):
    raise MissingShardPatch("this", "because", "that")


def refuse_on_one(x):
    if dist.get_rank() == 0:
        refuse(x)
    return x * 2


def raise_on_one(x):
    if dist.get_rank() == 0:
        raise RuntimeError("no")
    dist.barrier()


def wait_for_ever(x):
    while dist.get_rank() == 0:
        time.sleep(0.01)
    dist.barrier()


@pytest.mark.parametrize(
    ("action", "kind", "summary"),
    [
        (lambda x: x * 2, "right", ""),
        (lambda x: x * 3, "wrong", "Tensor-likes are not close"),
        (lambda x: x * (2 + dist.get_rank()), "wrong", "Tensor-likes are not close"),
        (refuse, "refused", "MissingShardPatch: given: this"),
        (refuse_on_one, "hung", ""),
        (raise_on_one, "wrong", "RuntimeError: no (raised by rank 0 of "),
        (wait_for_ever, "hung", "not done after 2 s"),
    ],
)
def test_verdicts(action, kind, summary, monkeypatch):
    monkeypatch.setattr(sweep, "TIMEOUT_S", 2)
    sample = Sample(name="op", function=sharded(action), inputs=(T("nc"),), split="n", dtypes=(torch.float64,))
    verdict = sweep.run(sweep.draw([sample], 0, 1))
    assert (verdict.kind, summary in verdict.summary) == (kind, True), verdict


@pytest.mark.parametrize(
    ("factor", "code", "counts"), [(2, 0, "3 right, 0 refused on all ranks, 0 wrong"), (1, 1, "0 right, 0 refused on all ranks, 3 wrong")]
)
def test_command_counts_and_returns_1_when_a_case_is_wrong(factor, code, counts, monkeypatch, capsys):
    sample = Sample(name="op", function=sharded(lambda x: x * factor), inputs=(T("nc"),), split="n", dtypes=(torch.float64,))
    monkeypatch.setattr("sys.argv", ["sweep", "--cases", "3"])
    monkeypatch.setattr(sweep, "all_samples", lambda: [sample])
    assert sweep.main() == code
    assert counts in capsys.readouterr().out

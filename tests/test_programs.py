"""Random programs: some of them are right, they are the same for a seed, and a wrong one is cut down to the lines that make it so."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor.placement_types import Shard

from shardwise import ShardTensor
from tests import programs
from tests.program_steps import ONE, SEVERAL, WRITES

COUNT = 60


@pytest.fixture(scope="module")
def drawn():
    return [programs.draw(0, number) for number in range(COUNT)]


def test_programs_of_a_seed_are_right_or_refused(drawn):
    verdicts = [(program, programs.run(program)) for program in drawn]
    assert [(str(program), verdict) for program, verdict in verdicts if verdict.kind not in ("right", "refused")] == []
    assert sum(verdict.kind == "right" for _, verdict in verdicts) > 0.85 * COUNT


def test_programs_are_those_of_their_seed(drawn):
    assert [str(programs.draw(0, number)) for number in range(10)] == [str(program) for program in drawn[:10]]
    assert len({str(program) for program in drawn}) == COUNT
    assert {len(program.mesh) for program in drawn} == {1, 2}
    assert {program.mode for program in drawn} == {"grad", "no_grad", "inference"}


def test_every_step_fits_some_program(monkeypatch):
    steps = set()
    line = programs._line

    def seen(*args):
        result = line(*args)
        steps.update([result[2]] if result else [])
        return result

    monkeypatch.setattr(programs, "_line", seen)
    for number in range(150):
        programs.draw(1, number)
    assert len({*ONE, *SEVERAL, *WRITES} - steps) < 10


def distort(x):
    return x * 1.5 if isinstance(x, ShardTensor) else x * 1


def test_a_wrong_program_is_cut_down(monkeypatch, capsys):
    monkeypatch.setitem(programs.CALLED, "distort", distort)
    lines = ("v1 = x0.sin()", "v2 = distort(v1)", "v3, v4 = v2.split([1, 2], 0)", "v5 = v3 + v1[:1]", "v1.mul_(2)")
    given = programs.Input(shape=(3, 2), kind="shard", placements=(Shard(0),), rows=((0, (1, 2)),))
    program = programs.Program(number=3, mesh=(2,), inputs=(given,), lines=lines, mode="grad")
    verdict = programs.run(program)
    assert verdict.kind == "wrong"
    assert programs.shrunk(program, verdict).lines == ("v2 = distort(x0)",)
    right = replace(program, lines=(lines[0], *(line.replace("v2", "v1") for line in lines[2:4])))
    assert programs.run(right).kind == "right"
    monkeypatch.setattr(programs, "draw", lambda *args: program)
    monkeypatch.setattr("sys.argv", ["programs", "--cases", "1"])
    assert programs.main() == 1
    out = capsys.readouterr().out
    assert "v2 = distort(x0)" in out and "1 wrong, 0 hung" in out


def test_a_line_that_others_need_is_kept():
    program = programs.Program(number=0, mesh=(2,), inputs=(), lines=("v1 = torch.ones(3)", "v2 = v1 * 2"), mode="grad")
    assert programs._without(program, 0) is None
    assert programs._without(program, 1).lines == ("v1 = torch.ones(3)",)
    assert torch.equal(programs.values_of(program)["v2"], torch.full((3,), 2.0))

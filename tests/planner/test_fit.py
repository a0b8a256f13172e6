"""The fit: it recovers what it should, leaves alone what no run speaks for, and its file can be read back."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.planner.fit import Problem, dump, sensitive, solve, start_tables
from shardwise.planner.runs import read_runs, read_table

TABLE = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.csv"


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Six runs of one framework, said to take exactly 1.25 times what the starting values predict."""
    runs, _ = read_runs(row for row in read_table(TABLE) if row["id"].startswith("kor5"))
    start = start_tables()
    guess = Problem(runs, start)
    still = guess.tables([0.0] * len(guess.free))
    slower = [replace(run, seconds=run.seconds * math.exp(guess.error(index, still)) * 1.25) for index, run in enumerate(guess.runs)]
    return Problem(slower, start)


def test_a_common_slowdown_is_found(problem: Problem) -> None:
    before = problem.errors([0.0] * len(problem.free))
    assert all(error == pytest.approx(-math.log(1.25)) for error in before)
    after = problem.errors(solve(problem, iterations=4))
    assert max(abs(error) for error in after) < 0.03


def test_numbers_without_runs_keep_their_prior(problem: Problem) -> None:
    values = dict(zip((free.path for free in problem.free), solve(problem, iterations=4)))
    for path, value in values.items():
        if path[2] in ("matmul_fp4", "grouped", "permute", "scan", "moe"):
            assert value == 0.0


def test_derivatives_cover_what_a_run_depends_on(problem: Problem) -> None:
    """Changing a number that `sensitive` leaves out does not change the prediction."""
    run = problem.runs[0]
    base = problem.error(0, problem.tables([0.0] * len(problem.free)))
    for column, free in enumerate(problem.free):
        if free.applies(run) and (free.path[0], free.path[2]) not in sensitive(run):
            values = [0.0] * len(problem.free)
            values[column] = 0.5
            assert problem.error(0, problem.tables(values)) == pytest.approx(base), free.path


def test_the_file_reads_back(problem: Problem) -> None:
    tables = problem.tables([0.01] * len(problem.free))
    read = tomllib.loads(dump(tables))
    for kind, entries in tables.items():
        for name, entry in entries.items():
            for key, value in entry.items():
                assert read[kind][name][key] == pytest.approx(value, rel=1e-4)

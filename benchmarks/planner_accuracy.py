"""Prints the tables of `docs/planner_accuracy.md`: predictions against published runs.

python benchmarks/planner_accuracy.py [RUNS.csv]
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise.planner.runs import read_table
from shardwise.planner.validate import Summary, validate

TABLE = Path(__file__).with_name("data") / "published_runs.csv"


def percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.1%}"


def table(title: str, lines: list[Summary], quantity: str) -> None:
    print(f"\n### {title}\n\n| | rows | judged | median | p90 | bias | furthest under |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for line in lines:
        if line.quantity == quantity and line.covered:
            numbers = (percent(line.median), percent(line.p90), percent(line.bias, "+"), percent(line.worst_under))
            print(f"| {line.name} | {line.rows} | {line.covered} | {' | '.join(numbers)} |")


def main() -> None:
    result = validate(read_table(sys.argv[1] if len(sys.argv) > 1 else TABLE))
    reasons = [row.reason for row in result.rows if row.reason]
    print(f"{len(result.rows)} rows, {len(reasons)} not expressible: ", end="")
    print(", ".join(f"{reasons.count(reason)} x {reason}" for reason in sorted(set(reasons), key=reasons.count, reverse=True)))
    for by, title in (("family", "dense and MoE"), ("source", "source"), ("gpu", "GPU"), ("arch", "architecture")):
        table(f"Step time by {title}", [line for line in result.summary if line.by == by], "step_time")
    for by, title in (("memory_meaning", "what is reported"), ("source", "source")):
        table(f"Memory by {title}", [line for line in result.summary if line.by == by], "memory")
    print("\n### Sweeps\n\n| model | layouts | best within | Kendall tau |\n| --- | ---: | ---: | ---: |")
    for sweep in result.sweeps:
        parts = sweep.name.split("|")
        print(
            f"| {parts[0]}, heads {parts[3]}, batch {parts[5]}, {parts[9]} GPUs | {sweep.layouts} | {sweep.regret:.1%} | {sweep.tau:.2f} |"
        )
    taus = sorted(sweep.tau for sweep in result.sweeps)
    within = sum(sweep.regret <= 0.05 for sweep in result.sweeps)
    print(f"\nMedian tau {taus[len(taus) // 2]:.2f}; best within 5 % in {within} of {len(taus)}.")


if __name__ == "__main__":
    main()

"""Fits the efficiencies in ``data/efficiency.toml`` to published runs.

    python -m shardwise.planner.fit RUNS.csv --write        refit and store
    python -m shardwise.planner.fit RUNS.csv --cross 5      fit on four fifths of the models (or sources, rows: `--by`), judge on the rest

Free are: per architecture and GPU type the share of peak that matrix products, expert products, attention and memory-bound kernels
reach; per link its usable share, and the share of that which the exchange of experts reaches; how much of each kind of communication stays
exposed; per framework and release a speed factor, the host time per kernel and per step, and factors for attention, network and exchange.
Everything is a logarithm with a normal prior, so a value moves away from its parent's (GPU to architecture, release to framework) only as
far as the runs ask for it.  Least squares on ``log(predicted / measured)`` with a soft-L1 loss, which outliers do not dominate.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise.planner.estimator import Estimator
from shardwise.planner.rates import LINE_RATE, profile, rates
from shardwise.planner.runs import Run, read_runs, read_table
from shardwise.planner.validate import quantile
from shardwise.spec.blocks import Attention, Mla

GPU_KEYS = ("matmul_bf16", "matmul_fp8", "matmul_fp4", "grouped", "attention", "memory", "permute", "quantise", "scan", "accumulate")
PROFILE_KEYS = ("speed", "launch_us", "step_ms", "moe", "attention", "network")
EXPOSED_KEYS = ("tp", "tp_overlapped", "ep", "ep_overlapped", "cp", "pp", "dp_hidden")
LOSS_SCALE = 0.12
NOISE = 0.05  # of a measured step time, as a logarithm; weighs runs against priors
PRIOR = {"root": 0.35, "arch": 0.25, "gpu": 0.12, "framework": 0.3, "release": 0.12, "link": 0.15, "exposed": 0.4}
WIDE = {"launch_us": 3.0, "step_ms": 1.5, "moe": 1.5, "network": 0.9}  # priors of these are wider or narrower by the factor

Tables = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Free:
    """One fitted number: where it is stored (table, entry, key) and how wide its prior is."""

    path: tuple[str, str, str]
    width: float

    def applies(self, run: Run) -> bool:
        """Whether the number can change the prediction of ``run``."""
        kind, name, _ = self.path
        if kind == "common" or name == "default":
            return True
        gpu = run.cluster.gpu
        used = {"gpu": (gpu.arch, gpu.name), "profile": (run.profile.split("/")[0], run.profile), "link": (run.cluster.inter.name,)}
        return name in used[kind]


class Problem:
    """Residuals of a set of runs as a function of the fitted logarithms."""

    def __init__(self, runs: Sequence[Run], start: Tables) -> None:
        self.runs = [run for run in runs if run.seconds and run.comparable]
        self.start = start
        self.estimators = [
            Estimator(run.model, run.cluster, seq_len=run.seq_len, stack=profile("default", start), document=run.document)
            for run in self.runs
        ]
        self.free = self._free()

    def _free(self) -> list[Free]:
        runs = self.runs
        levels = (
            ("gpu", GPU_KEYS, "root", ["default"]),
            ("gpu", GPU_KEYS, "arch", sorted({run.cluster.gpu.arch for run in runs})),
            ("gpu", GPU_KEYS, "gpu", sorted({run.cluster.gpu.name for run in runs})),
            ("profile", PROFILE_KEYS[1:], "root", ["default"]),  # the default speed is 1: GPU entries set the scale
            ("profile", PROFILE_KEYS, "framework", sorted({run.profile.split("/")[0] for run in runs})),
            ("profile", PROFILE_KEYS, "release", sorted({run.profile for run in runs if "/" in run.profile})),
            ("link", ("efficiency",), "link", sorted({run.cluster.inter.name for run in runs})),
            ("common", EXPOSED_KEYS, "exposed", ["exposed"]),
            ("common", ("far",), "exposed", ["exchange"]),
        )
        return [
            Free(path=(kind, name, key), width=PRIOR[level] * (WIDE.get(key, 1.0) if kind == "profile" else 1.0))
            for kind, keys, level, names in levels
            for key in keys
            for name in names
        ]

    def tables(self, values: Sequence[float]) -> Tables:
        """The efficiency tables these logarithms stand for; children store what their parents do not."""
        tables = copy.deepcopy(self.start)
        factor = {free.path: math.exp(value) for free, value in zip(self.free, values)}
        result: Tables = {"gpu": {}, "profile": {}, "link": dict(tables["link"]), "common": copy.deepcopy(tables["common"])}
        base = tables["gpu"]["default"]
        archs = {run.cluster.gpu.name: run.cluster.gpu.arch for run in self.runs}
        for key in GPU_KEYS:
            root = base[key] * factor["gpu", "default", key]
            result["gpu"].setdefault("default", {})[key] = root
            for arch in set(archs.values()):
                result["gpu"].setdefault(arch, {})[key] = root * factor["gpu", arch, key]
            for name, arch in archs.items():
                result["gpu"].setdefault(name, {})[key] = root * factor["gpu", arch, key] * factor["gpu", name, key]
        for name, entry in tables["profile"].items():
            result["profile"][name] = dict(entry)
        for key in PROFILE_KEYS:
            root = tables["profile"]["default"][key] * factor.get(("profile", "default", key), 1.0)
            result["profile"]["default"][key] = root
            for free in self.free:
                kind, name, which = free.path
                if kind != "profile" or which != key or name == "default":
                    continue
                parent = root if "/" not in name else root * factor["profile", name.split("/")[0], key]
                result["profile"].setdefault(name, {})[key] = parent * factor[free.path]
        for free in self.free:
            kind, name, which = free.path
            if kind == "link":
                start = tables["link"].get(name, tables["link"]["default"])["efficiency"]
                result["link"][name] = {which: min(LINE_RATE, start * factor[free.path])}
            elif kind == "common":
                result["common"][name][which] = min(1.0, tables["common"][name][which] * factor[free.path])
        return result

    def error(self, index: int, tables: Tables) -> float:
        """``log(predicted / measured)`` of one run."""
        run, estimator = self.runs[index], self.estimators[index]
        estimator.stack = profile(run.profile, tables)
        precisions = {run.layout.precision}
        estimator.reprice({name: rates(run.cluster, name, estimator.stack, tables) for name in precisions})
        return math.log(estimator.step_time(run.layout).seconds / run.seconds)  # type: ignore[operator]

    def errors(self, values: Sequence[float]) -> list[float]:
        tables = self.tables(values)
        return [self.error(index, tables) for index in range(len(self.runs))]


STEP = 1e-2  # of a logarithm, for derivatives


def sensitive(run: Run) -> set[tuple[str, str]]:
    """(table, key) of the numbers that the prediction of a run depends on."""
    layout, moe = run.layout, run.model.moe is not None
    low = layout.precision not in ("bf16", "fp16", "fp32")
    hybrid = any(not isinstance(layer.mixer, (Attention, Mla)) and layer.mixer is not None for layer in run.model.kinds)
    keys = {("gpu", key) for key in ("matmul_bf16", "attention", "memory", "accumulate")}
    keys |= {("profile", key) for key in ("speed", "launch_us", "step_ms", "attention")}
    wanted = {
        ("gpu", "matmul_fp4"): layout.precision == "nvfp4",
        ("gpu", "matmul_fp8"): low and layout.precision != "nvfp4",
        ("gpu", "quantise"): low,
        ("gpu", "grouped"): moe,
        ("gpu", "permute"): moe,
        ("gpu", "scan"): hybrid,
        ("profile", "moe"): moe,
        ("common", "ep"): moe and not layout.overlap_moe,
        ("common", "ep_overlapped"): moe and layout.overlap_moe,
        ("common", "far"): moe and run.cluster.gpus > run.cluster.domain,
        ("common", "tp"): layout.tp > 1,
        ("common", "tp_overlapped"): layout.tp > 1,
        ("common", "cp"): layout.cp > 1,
        ("common", "pp"): layout.pp > 1,
        ("common", "dp_hidden"): layout.world > 1,
        ("profile", "network"): run.cluster.gpus > run.cluster.domain,
        ("link", "efficiency"): run.cluster.gpus > run.cluster.domain,
    }
    return keys | {key for key, needed in wanted.items() if needed}


def scaled(tables: Tables, kind: str, key: str) -> Tables:
    """The tables with every entry of one key larger by a step."""
    entries = {
        name: {each: value * math.exp(STEP) if each == key else value for each, value in entry.items()}
        for name, entry in tables[kind].items()
    }
    return {**tables, kind: entries}


def solve(problem: Problem, iterations: int = 12) -> list[float]:
    """Gauss-Newton with priors and soft-L1 weights.

    A number and its parents multiply the same rate, so a run has one derivative per key, which all of them share.
    """
    import numpy as np

    count, runs = len(problem.free), problem.runs
    values: Any = np.zeros(count)
    widths = np.array([free.width for free in problem.free])
    columns: dict[tuple[str, str], list[int]] = {}
    for column, free in enumerate(problem.free):
        columns.setdefault((free.path[0], free.path[2]), []).append(column)
    touched = [sensitive(run) for run in runs]
    weights = _source_weights(runs)
    damping = 1.0

    def objective(errors: Any, at: Any) -> float:
        robust = 2 * LOSS_SCALE**2 * (np.sqrt(1 + (errors / LOSS_SCALE) ** 2) - 1)
        return float((weights * robust).sum() / NOISE**2 + ((at / widths) ** 2).sum())

    errors: Any = np.array(problem.errors(values))
    best = objective(errors, values)
    for _ in range(iterations):
        jacobian = np.zeros((len(runs), count))
        base = problem.tables(values)
        for (kind, key), same in columns.items():
            larger = scaled(base, kind, key)
            for index, run in enumerate(runs):
                if (kind, key) in touched[index]:
                    slope = (problem.error(index, larger) - errors[index]) / STEP
                    for column in same:
                        if problem.free[column].applies(run):
                            jacobian[index, column] = slope
        robust = weights / np.sqrt(1 + (errors / LOSS_SCALE) ** 2) / NOISE**2
        normal = jacobian.T @ (jacobian * robust[:, None]) + np.diag(1 / widths**2)
        gradient = jacobian.T @ (robust * errors) + values / widths**2
        improved = False
        while damping < 1e6:
            move = np.linalg.solve(normal + np.diag(np.diag(normal)) * (damping - 1 if damping > 1 else 0), gradient)
            trial = values - np.clip(move, -0.5, 0.5)
            trial_errors: Any = np.array(problem.errors(trial))
            score = objective(trial_errors, trial)
            if score < best:
                improved = best - score > 1e-3 * best
                values, errors, best = trial, trial_errors, score
                damping = max(1.0, damping / 4)
                break
            damping *= 4
        print(f"objective {best:.1f}, median |error| {np.median(np.abs(errors)):.4f}", file=sys.stderr, flush=True)
        if not improved:
            break
    return [float(value) for value in values]


def _source_weights(runs: Sequence[Run]) -> Any:
    """Runs of large sources count less, so that one source does not decide alone."""
    import numpy as np

    sizes: dict[str, int] = {}
    for run in runs:
        sizes[run.source] = sizes.get(run.source, 0) + 1
    return np.array([max(1.0, 30 / sizes[run.source]) ** 0.5 if sizes[run.source] < 30 else 1.0 for run in runs])


def start_tables() -> Tables:
    """Starting values and what is not fitted."""
    text = resources.files("shardwise.planner").joinpath("data", "efficiency_start.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def dump(tables: Tables) -> str:
    """The tables as TOML."""
    lines = ["# Written by `python -m shardwise.planner.fit`; starting values and fixed numbers are in efficiency_start.toml."]
    for kind in ("gpu", "link", "common", "profile"):
        for name, entry in tables[kind].items():
            lines.append(f'\n[{kind}."{name}"]')
            lines += [f"{key} = {value:.5g}" for key, value in entry.items()]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Fit efficiencies to published runs.")
    parser.add_argument("table", type=Path)
    parser.add_argument("--write", action="store_true", help="store the result in the package")
    parser.add_argument("--cross", type=int, default=0, help="folds for cross-validation")
    parser.add_argument("--by", choices=("model", "source", "row"), default="model", help="what a fold leaves out")
    parser.add_argument("--iterations", type=int, default=12)
    options = parser.parse_args(arguments)
    runs, _ = read_runs(read_table(options.table))
    if options.cross:
        cross_validate(runs, options.cross, options.iterations, options.by)
        return
    problem = Problem(runs, start_tables())
    tables = problem.tables(solve(problem, options.iterations))
    text = dump(tables)
    if options.write:
        Path(__file__).with_name("data").joinpath("efficiency.toml").write_text(text, encoding="utf-8")
    else:
        print(text)


def cross_validate(runs: Sequence[Run], folds: int, iterations: int, by: str) -> None:
    """Fit without one part of the runs in turn and print the errors on the part left out.

    by: `model` leaves out whole models, so that only other models tell how fast a GPU and a stack are; `source` whole sources, so that
    their software profile is unknown too; `row` every so many-th row.
    """
    used = [run for run in runs if run.seconds and run.comparable]
    groups = {run.id: {"model": run.model.name, "source": run.source, "row": run.id}[by] for run in used}
    order = sorted(set(groups.values()))
    part = {run: order.index(group) % folds for run, group in groups.items()}
    found: dict[str, list[float]] = {}
    for fold in range(folds):
        problem = Problem([run for run in used if part[run.id] != fold], start_tables())
        tables = problem.tables(solve(problem, iterations))
        judged = Problem([run for run in used if part[run.id] == fold], start_tables())
        for index, run in enumerate(judged.runs):
            error = math.expm1(judged.error(index, tables))
            for group in ("moe" if "moe" in run.arch else "dense", f"source {run.source}"):
                found.setdefault(group, []).append(error)
    print(f"left out by {by}, {folds} folds\n\n| group | rows | median | p90 | bias |\n| --- | ---: | ---: | ---: | ---: |")
    for group, errors in sorted(found.items()):
        size, signed = sorted(map(abs, errors)), sorted(errors)
        print(f"| {group} | {len(errors)} | {quantile(size, 0.5):.1%} | {quantile(size, 0.9):.1%} | {quantile(signed, 0.5):+.1%} |")


if __name__ == "__main__":
    main()

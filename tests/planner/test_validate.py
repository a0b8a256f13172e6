"""Published runs: how rows are read, FLOP conventions, accuracy on the committed table, and that no row can crash it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import InputError
from shardwise.planner.flops import model_flops
from shardwise.planner.run_models import Inexpressible, model_from_row
from shardwise.planner.runs import layout_from_row, measured_seconds, parse_recompute, read_runs, read_table, run_from_row, source_of
from shardwise.planner.validate import Summary, Validation, kendall_tau, validate

TABLE = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.csv"


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, str]]:
    return {row["id"]: row for row in read_table(TABLE)}


@pytest.fixture(scope="module")
def result(rows: dict[str, dict[str, str]]) -> Validation:
    return validate(rows.values())


def summary(result: Validation, by: str, name: str, quantity: str) -> Summary:
    return next(line for line in result.summary if (line.by, line.name, line.quantity) == (by, name, quantity))


def test_nearly_every_complete_row_is_covered(rows: dict[str, dict[str, str]], result: Validation) -> None:
    needed = ("num_layers", "hidden", "gpu_type", "tp", "pp", "mbs", "gbs")
    speed = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
    complete = {name for name, row in rows.items() if all(row[key] for key in needed) and any(row[key] for key in speed)}
    predicted = {row.id for row in result.rows if row.predicted_s}
    assert len(complete & predicted) >= 0.95 * len(complete)
    assert len(result.rows) == len(rows)
    assert all(row.reason for row in result.rows if row.predicted_gib is None)


@pytest.mark.parametrize(("family", "median", "p90"), [("dense", 0.10, 0.25), ("moe", 0.18, 0.40)])
def test_step_time_is_as_accurate_as_promised(result: Validation, family: str, median: float, p90: float) -> None:
    found = summary(result, "family", family, "step_time")
    assert found.median is not None and found.median <= median
    assert found.p90 is not None and found.p90 <= p90
    assert found.bias is not None and abs(found.bias) <= 0.05


def test_allocated_memory_is_as_accurate_as_promised(result: Validation) -> None:
    found = summary(result, "memory_meaning", "allocated", "memory")
    assert found.median is not None and found.median <= 0.03
    assert found.p90 is not None and found.p90 <= 0.08


def test_sweeps_are_ranked(result: Validation) -> None:
    taus = sorted(sweep.tau for sweep in result.sweeps)
    assert len(taus) >= 15
    assert taus[len(taus) // 2] >= 0.7


@pytest.mark.parametrize(
    ("run", "gflop", "attention"),
    [
        ("mbperf-171", 449.2, 1.0),  # Llama-3-70B at 8192, causal: what Megatron Bridge prints
        ("mbperf-171", 481.4, 2.0),  # full square: NeMo 24
        ("mlmllama-001", 57.9, 2.0),  # Llama-3-8B
        ("mlmllama-001", 51.5, 1.0),
        ("mbperf-188", 23.0, 1.0),  # Qwen3-30B-A3B at 4096
        ("mbperf-148", 148.0, 1.0),  # Qwen3-235B-A22B
        ("mbperf-001", 260.0, 1.0),  # DeepSeek-V3 with its MTP layer
        ("dgxc-090", 2105.0, 2.0),  # Nemotron-4-340B
    ],
)
def test_flops_per_token_as_the_sources_count_them(rows: dict[str, dict[str, str]], run: str, gflop: float, attention: float) -> None:
    model = model_from_row(rows[run])
    assert model_flops(model, int(rows[run]["seq_len"]), attention=attention) / 1e9 == pytest.approx(gflop, rel=0.006)


def test_printed_rates_agree_with_the_convention(rows: dict[str, dict[str, str]]) -> None:
    """TFLOP/s turned into seconds by a source's convention matches seconds from its tokens/s."""
    for name in ("mbperf-171", "mbperf-148", "nemo-005", "mbcard-077"):
        row = rows[name]
        source, model, seq = source_of(row), model_from_row(row), int(row["seq_len"])
        gbs, gpus = int(row["gbs"]), int(row["gpus"])
        direct = measured_seconds({**row, "step_time_s": ""}, model, source, seq, gbs, gpus)
        derived = measured_seconds({**row, "step_time_s": "", "tokens_per_s_per_gpu": ""}, model, source, seq, gbs, gpus)
        assert derived == pytest.approx(direct, rel=0.02)


def test_layout_of_a_row(rows: dict[str, dict[str, str]]) -> None:
    run = run_from_row(rows["zoo-001"])
    layout = run.layout
    assert (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp, layout.dp, layout.edp) == (2, 8, 4, 1, 32, 1, 16, 1)
    assert layout.sp and layout.dispatcher == "deepep" and layout.recompute.modules == ("layernorm", "moe_act")
    assert layout.microbatches == 128
    assert run.seconds == pytest.approx(19.7)
    assert run.profile == "megatron-lm/moe-zoo"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "none"),
        ("none", "none"),
        ("selective:none", "none"),
        ("full", "full:uniform:1"),
        ("full:block:4", "full:block:4"),
        ("selective:mla_up_proj+mlp", "selective:mla_up_proj+mlp"),
        ("selective:[layernorm mla_up_proj mlp moe_act]", "selective:layernorm+mla_up_proj+mlp+moe_act"),
        ("selective:layernorm+MoE activation", "selective:layernorm+moe_act"),
        ("selective:core-attention, GDN output-norm,+MoE-activation", "selective:core_attn+moe_act"),
    ],
)
def test_recompute_words(text: str, found: str) -> None:
    assert str(parse_recompute(text)) == found


@pytest.mark.parametrize("column", ["num_layers", "hidden", "tp", "pp", "mbs", "gbs", "gpus", "seq_len"])
def test_a_missing_number_is_named(rows: dict[str, dict[str, str]], column: str) -> None:
    row = {**rows["zoo-001"], column: ""}
    runs, reasons = read_runs([row])
    assert not runs and reasons["zoo-001"] == f"{column} not given"


def test_degrees_that_do_not_fit_are_named(rows: dict[str, dict[str, str]]) -> None:
    row = {**rows["zoo-001"], "gpus": "100"}
    with pytest.raises(Inexpressible, match="not a multiple of tp"):
        layout_from_row(row, model_from_row(row), source_of(row))


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"a,b\n1,2\n", "columns are missing"), (b"\x80\x81\xff", "not UTF-8"), (b"id,\0source\n", "binary"), (b"", "columns are missing")],
)
def test_files_that_are_not_tables(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=why):
        read_table(path)
    with pytest.raises(InputError, match="No such file"):
        read_table(tmp_path / "absent.csv")


WORDS = ["", "0", "1", "2", "3", "7", "8", "64", "1024", "-1", "1e9", "nan", "inf", "True", "full", "x" * 50]
CELLS = st.one_of(st.sampled_from(WORDS), st.text(max_size=12))


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_no_row_crashes(rows: dict[str, dict[str, str]], data: st.DataObject) -> None:
    row = dict(data.draw(st.sampled_from(list(rows.values()))))
    for column in data.draw(st.lists(st.sampled_from(list(row)), max_size=6)):
        row[column] = data.draw(CELLS)
    found = validate([row]).rows
    assert len(found) == 1
    assert found[0].reason or found[0].predicted_gib is not None


@pytest.mark.parametrize(
    ("left", "right", "tau"),
    [([1, 2, 3], [1, 2, 3], 1.0), ([1, 2, 3], [3, 2, 1], -1.0), ([1, 2, 3, 4], [1, 2, 4, 3], 2 / 3), ([1, 1], [1, 2], 0.0)],
)
def test_kendall_tau(left: list[float], right: list[float], tau: float) -> None:
    assert kendall_tau(left, right) == pytest.approx(tau)

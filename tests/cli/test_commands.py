"""The commands of the contract: exit codes, JSON keys and worked cases."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.commands import GOOD, LLAMA_70B, RUNS, run, run_json

from shardwise.cli import COMMANDS, framework_options
from shardwise.planner.exporters import WRITERS

# min-gpus -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "least", "dp", "edp"),
    [
        # the table of Megatron Bridge's guide
        ("pp=1 tp=2 cp=1 ep=8 etp=1", 8, 4, 1),
        ("pp=1 tp=4 cp=1 ep=8 etp=1", 8, 2, 1),
        ("pp=1 tp=2 cp=2 ep=8 etp=1", 8, 2, 1),
        ("pp=1 tp=2 cp=4 ep=8 etp=1", 8, 1, 1),
        ("pp=2 tp=2 cp=1 ep=8 etp=1", 16, 4, 1),
        ("pp=1 tp=2 cp=1 ep=4 etp=2", 8, 4, 1),
        # worked cases with their literal answers
        ("tp=4 ep=4 etp=1", 4, 1, 1),
        ("tp=2 ep=4 etp=2", 8, 4, 1),
        ("tp=2 ep=4 etp=1", 4, 2, 1),
        ("tp=2 cp=2 ep=8", 8, 2, 1),
        ("tp=2 pp=2 ep=32", 64, 16, 1),
        ("tp=8 cp=2 pp=15 ep=16", 240, 1, 1),
        ("tp=4 cp=3 pp=2 ep=8", 48, 2, 3),
    ],
)
def test_min_gpus_of_a_layout(capsys: pytest.CaptureFixture[str], words: str, least: int, dp: int, edp: int) -> None:
    code, answer = run_json(capsys, "min-gpus", *words.split())
    assert code == 0 and (answer["min_gpus"], answer["dp"], answer["edp"]) == (least, dp, edp)


def test_min_gpus_names_the_wrong_products_and_whose_rule_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "min-gpus", "tp=4", "cp=3", "pp=2", "ep=8")
    assert code == 0 and "min GPUs 48" in out and "not 192" in out and "not 24" in out
    assert "Megatron Bridge" in out and "ETP=1" in out
    _, out, _ = run(capsys, "min-gpus", "tp=4", "ep=4", "--framework", "megatron-core")
    assert "min GPUs 16" in out and "ETP=4" in out and "follows TP" in out


def test_data_parallel_sizes_on_a_given_world(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "min-gpus", "tp=2", "cp=2", "ep=4", "--gpus", "8")
    assert code == 0 and answer["gpus"] == {"gpus": 8, "legal": True, "dp": 2, "edp": 2}
    code, answer = run_json(capsys, "min-gpus", "tp=2", "cp=2", "ep=4", "--gpus", "9")
    assert code == 1 and answer["gpus"]["nearest"] == [8, 12]


def test_experts_that_do_not_divide_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "min-gpus", "ep=48", "--model", "qwen3-235b-a22b")
    assert code == 1 and any(finding["rule"] == "E2" and "128" in finding["given"] for finding in answer["findings"])


def test_min_gpus_of_a_model_comes_with_a_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "min-gpus", "--model", "llama-3.1-8b", "--gpu", "h100-sxm", "--seq-len", "8192")
    assert code == 0 and answer["min_gpus"] >= 2 and answer["dp"] >= 1
    assert [world["fits"] for world in answer["worlds"]] == [False] * (len(answer["worlds"]) - 1) + [True]
    assert all(world["constraint"] for world in answer["worlds"])


# check ----------------------------------------------------------------------------------------------------------------


def test_check_has_the_keys_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "check", *LLAMA_70B, *GOOD)
    assert code == 0 and answer["fits"] is True
    assert {"tp", "pp", "vpp", "cp", "ep", "etp", "sp", "dp", "edp", "mbs", "gbs", "recompute"} <= set(answer["layout"])
    assert (answer["layout"]["dp"], answer["layout"]["sp"], answer["layout"]["recompute"]) == (2, True, "full:uniform:1")
    memory, time = answer["memory"], answer["step_time"]
    assert {"allocated_gib", "reserved_gib", "capacity_gib", "terms", "stage"} <= set(memory)
    assert sum(memory["terms"].values()) == pytest.approx(memory["allocated_gib"])
    assert sum(time["terms"].values()) == pytest.approx(time["seconds"])
    assert answer["tokens_per_s_per_gpu"] == pytest.approx(128 * 8192 / 64 / time["seconds"])


def test_check_reports_everything_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "check", *LLAMA_70B, "tp=3", "pp=7", "cp=5", "ep=2", "gbs=10", "mbs=4")
    assert code == 1
    rules = {finding["rule"] for finding in answer["findings"] if finding["severity"] == "error"}
    assert len(rules) >= 4
    assert all(finding["given"] and finding["why"] and finding["try"] and finding["source"] for finding in answer["findings"])


@pytest.mark.parametrize("framework", ["bridge", "megatron-core", "torchtitan", "shardwise"])
@pytest.mark.parametrize("words", ["tp=1", "tp=2", "tp=2 cp=2", "tp=2 pp=2", "ep=4", "ep=4 tp=2 sp=true"])
def test_what_was_not_given_is_legal_under_every_framework(capsys: pytest.CaptureFixture[str], framework: str, words: str) -> None:
    model = "qwen3-30b-a3b" if "ep" in words else "llama-3.1-8b"
    given = ("--model", model, "--gpus", "8", "--framework", framework)
    _, answer = run_json(capsys, "check", *given, *words.split(), "mbs=1", "gbs=64")
    assert answer["legal"], answer["findings"]
    etp = 2 if framework == "megatron-core" and "ep" in words and "tp=2" in words else 1
    assert answer["layout"]["etp"] == etp
    _, answer = run_json(capsys, "min-gpus", "--model", model, "--framework", framework, *words.split())
    assert not [finding for finding in answer["findings"] if finding["severity"] == "error"]


def test_a_dense_model_has_no_expert_tensor_size(capsys: pytest.CaptureFixture[str]) -> None:
    dense = ("--model", "llama-3.1-8b", "--gpus", "8", "--framework", "megatron-core")
    _, answer = run_json(capsys, "diff", "tp=2 mbs=1 gbs=8", "tp=4 mbs=1 gbs=8", *dense)
    assert "etp" not in {change["name"] for change in answer["changes"]}
    _, answer = run_json(capsys, "plan", *dense, "--global-batch", "64", "--top", "1", "--why-not", "tp=8 sp=true")
    assert not any("E1" in reason for reason in answer["why_not"]["reasons"])


@pytest.mark.parametrize("target", sorted(WRITERS))
def test_degrees_alone_can_be_written_for_every_framework(capsys: pytest.CaptureFixture[str], target: str) -> None:
    code, answer = run_json(capsys, "export", "--to", target, "tp=4", "mbs=1", "gbs=8", "--gpus", "8")
    assert code == 0 and answer["reads_back"] and answer["layout"]["tp"] == 4


def test_rules_read_options_of_the_framework(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    check = ("check", "--model", "qwen3-30b-a3b", "--gpus", "8")

    def rules(*words: str) -> set[str]:
        _, answer = run_json(capsys, *check, *words)
        return {finding["rule"] for finding in answer["findings"]}

    plain = ("ep=8", "sp=true", "tp=2")
    assert "E13" not in rules(*plain) and "E13" in rules(*plain, "moe_token_dispatcher_type=alltoall", "moe_flex_dispatcher_backend=deepep")
    assert "D15" not in rules(*plain) and "D15" in rules(*plain, "ddp.nccl_ub=true", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert "C13" in rules(*plain, "--calculate-per-token-loss", "--average-in-collective", "true")
    _, answer = run_json(capsys, *check, *plain, "moe_token_dispatcher_type=flex")
    assert answer["fits"] is not None
    path = tmp_path / "run.yaml"
    path.write_text("tp: 2\nsp: true\nep: 8\ncalculate_per_token_loss: true\naverage_in_collective: true\n")
    assert "C13" in rules(str(path)) and "C13" not in rules(str(path), "average_in_collective=false")


def test_every_option_a_rule_reads_can_be_given() -> None:
    source = Path(framework_options.__file__).parents[1] / "planner" / "rules"
    text = "".join(path.read_text() for path in source.glob("*.py"))
    read = set(re.findall(r"settings(?:\.get\(|\[)\"([\w.]+)\"|case\.count\(\"([\w.]+)\"\)", text))
    assert read and {first or second for first, second in read} <= framework_options.NAMES


def test_check_exits_with_1_when_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "check", *LLAMA_70B, "tp=1", "gbs=64")
    assert code == 1 and answer["legal"] and answer["fits"] is False


@pytest.mark.parametrize("name", ["short", "long", "yaml", "bridge yaml"])
def test_layouts_are_read_from_words_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    texts = {
        "yaml": "model: llama-3.1-70b\ngpus: 64\ntp: 8\npp: 4\nmbs: 1\ngbs: 128\nsp: true\n",
        "bridge yaml": "model:\n  tensor_model_parallel_size: 8\n  pipeline_model_parallel_size: 4\n  sequence_parallel: true\n"
        "train:\n  micro_batch_size: 1\n  global_batch_size: 128\n",
    }
    words = {
        "short": ["tp=8", "pp=4", "mbs=1", "gbs=128", "sp=true"],
        "long": [
            "tensor_model_parallel_size=8",
            "model.pipeline_model_parallel_size=4",
            "--micro-batch-size",
            "1",
            "global_batch_size=128",
            "--sequence-parallel",
        ],
    }
    if name in texts:
        path = tmp_path / "layout.yaml"
        path.write_text(texts[name])
        words[name] = [str(path)]
    _, answer = run_json(capsys, "check", *LLAMA_70B, *words[name])
    layout = answer["layout"]
    assert [layout[key] for key in ("tp", "pp", "mbs", "gbs", "sp", "dp")] == [8, 4, 1, 128, True, 2]


@pytest.mark.parametrize("target", sorted(WRITERS))
def test_check_reads_an_export_back(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str) -> None:
    words, rules = ["tp=8", "pp=2", "mbs=1", "gbs=64", "sp=true", "recompute=full"], "bridge"
    if target == "torchtitan":
        words, rules = [*words, "sharding=fsdp2", "cp_comm=all_gather"], "torchtitan"
    path = tmp_path / "exported"
    code, _, _ = run(capsys, "export", *words, "--gpus", "64", "--to", target, "--output", str(path))
    assert code == 0
    _, straight = run_json(capsys, "check", *LLAMA_70B, "--framework", rules, *words)
    _, back = run_json(capsys, "check", *LLAMA_70B, "--framework", rules, str(path))
    assert back["layout"] == straight["layout"] and back["step_time"] == straight["step_time"]


@pytest.mark.parametrize("target", ["megatron-lm", "megatron-bridge"])
def test_fsdp2_under_megatron_keeps_its_number_formats(capsys: pytest.CaptureFixture[str], target: str) -> None:
    """The weights are bf16 and the optimizer's copies float32, as under its other sharding modes."""
    code, text, _ = run(capsys, "export", "sharding=fsdp2", "tp=2", "gbs=8", "--gpus", "8", "--to", target)
    assert code == 0 and re.search("use.torch.fsdp2", text)


def test_export_refuses_what_the_target_cannot_say(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "export", "tp=2", "etp=2", "ep=2", "vpp=2", "pp=2", "first_stage_layers=3", "--to", "torchtitan")
    assert code == 2 and {"etp=2", "first_stage_layers=3"} <= {finding["given"] for finding in answer["findings"]}


@pytest.mark.parametrize("words", [("check", *LLAMA_70B, "tp=8", "pp=2", "gbs=64", "sp=true"), ("models",), ("min-gpus", "pp=2", "tp=2")])
@pytest.mark.parametrize("json", [(), ("--json",)])
def test_a_reader_that_goes_away_is_no_finding(words: tuple[str, ...], json: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "shardwise", *words, *json], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


# plan -----------------------------------------------------------------------------------------------------------------


def test_plan_has_the_keys_of_the_contract(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, trace = tmp_path / "plan.html", tmp_path / "trace.json"
    words = [
        "plan",
        "--model",
        "llama-3.1-8b",
        "--gpus",
        "8",
        "--gpu",
        "h100-sxm",
        "--seq-len",
        "8192",
        "--global-batch",
        "64",
        "--top",
        "3",
    ]
    code, answer = run_json(capsys, *words, "--html", str(page), "--trace", str(trace), "--why-not", "tp=8 mbs=1", "--fewer-gpus")
    assert code == 0 and len(answer["plans"]) == 3 and answer["min_gpus"] in (1, 2, 3, 4)
    times = [plan["step_time"]["seconds"] for plan in answer["plans"]]
    assert times == sorted(times) and all(plan["fits"] for plan in answer["plans"])
    assert any("slower" in reason for reason in answer["why_not"]["reasons"])
    worlds = [plan["layout"]["world"] for plan in answer["fewer_gpus"]]
    assert worlds == [size for size in (4, 2, 1) if size >= answer["min_gpus"]]
    assert answer["sizing"] and answer["rejected"] and answer["considered"] > answer["evaluated"] > 0
    text = page.read_text()
    assert text.count("<svg") >= 3 and "<script" not in text and "src=" not in text and "href=" not in text
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event["ph"] == "X" and event["dur"] > 0 for event in events)


def test_words_hold_the_search_to_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    _, answer = run_json(capsys, "plan", "--model", "llama-3.1-8b", "--gpus", "8", "--global-batch", "64", "tp=4", "recompute=full")
    assert answer["plans"] and {(plan["layout"]["tp"], plan["layout"]["recompute"]) for plan in answer["plans"]} == {(4, "full:uniform:1")}


def test_plan_that_does_not_fit_says_what_is_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "plan", "--model", "llama-3.1-405b", "--gpus", "8", "--gpu", "h100-sxm", "--global-batch", "8")
    assert code == 1 and not answer["plans"] and answer["nearest"]["fits"] is False and answer["min_gpus"] is None


def test_plan_of_a_traced_module(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--parameters", "31e6", "--activation-gib", "200", "--grid", "2048x2048", "--gpus", "8", "--gpu", "h100-sxm"]
    code, answer = run_json(capsys, "plan", *words, "--global-batch", "2")
    best = answer["plans"][0]
    assert code == 0 and answer["smallest_domain"] == 3 and (best["ddp"], best["domain"], best["wrapper"]) == (2, 4, "ddp")


# diff -----------------------------------------------------------------------------------------------------------------

FAULT = (
    "[rank{rank}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 0.50 GiB is free. "
    "Including non-PyTorch memory, this process has 78.6 GiB memory in use. Of the allocated memory {allocated} GiB "
    "is allocated by PyTorch, and {idle} GiB is reserved by PyTorch but unallocated."
)


def test_diff_names_what_changed_and_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "diff", "tp=4 pp=4 mbs=1 gbs=128 sp=true", "tp=8 pp=4 mbs=1 gbs=128 sp=true", *LLAMA_70B)
    assert code == 1
    assert {change["name"] for change in answer["changes"] if not change["derived"]} == {"tp", "dp"}
    assert answer["memory"]["after_gib"] < answer["memory"]["before_gib"]
    tp = next(term for term in answer["communication"]["terms"] if term["term"] == "tp")
    assert tp["change"] > 0
    assert any("TP 4 -> 8" in cause["evidence"] for cause in answer["causes"])
    code, answer = run_json(capsys, "diff", "tp=4 pp=4", "pp=4 tp=4")
    assert code == 0 and answer["changes"] == []


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (FAULT.format(rank=5, allocated=60.0, idle=17.0), "fragmentation"),
        (FAULT.format(rank=0, allocated=77.0, idle=0.5), "embedding and most micro batches in flight"),
        ("[rank63]: loss = cross_entropy(logits)\n" + FAULT.format(rank=63, allocated=77.0, idle=0.5), "logits, loss, MTP"),
        (
            "[rank9]: Traceback\n[rank9]:   optimizer.step()\n" + FAULT.format(rank=9, allocated=77.0, idle=0.5),
            "optimizer state appears then",
        ),
    ],
)
def test_a_log_leads_to_the_likely_cause(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, cause: str) -> None:
    log = tmp_path / "train.log"
    log.write_text(text + "\n")
    layout = "tp=4 pp=4 vpp=5 mbs=1 gbs=512 sp=true"
    code, answer = run_json(capsys, "diff", layout, layout, "--log", str(log), *LLAMA_70B)
    assert code == 1 and answer["causes"][0]["cause"] == cause
    remedies = answer["causes"][0]["remedies"]
    assert remedies
    fitting = [remedy["costs"] for remedy in remedies if remedy["fits"] and remedy["costs"] is not None]
    assert fitting == sorted(fitting)


STEP = " iteration {n:8d}/ 100 | consumed samples: 512 | elapsed time per iteration (ms): {ms} | lm loss: {loss} | grad norm: 1.0 |"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (FAULT.format(rank=5, allocated=60.0, idle=17.0), "1 out-of-memory text(s) on rank(s) 5; the first: 2.00 GiB asked for, 60.00"),
        (
            "\n".join(STEP.format(n=n, ms=ms, loss="1.0E+01") for n, ms in ((1, 90000.0), (2, 60000.0), (3, 62000.0))),
            "3 iteration line(s), 61.00 s per step; B is",
        ),
        (STEP.format(n=7, ms=60000.0, loss="nan"), "the loss is no number from iteration 7 on"),
        ("[titan] step: 10  loss:  7.6012  grad_norm:  1.2000  memory: 58.40GiB(73.83%)", "1 iteration line(s)"),
        (
            "[Rank 8] (after 2 iterations) memory (GB) | mem-max-allocated-gigabytes: 64.4245 | mem-max-reserved-gigabytes: 70.0",
            "peak of rank 8: 60.0 GiB allocated; B is predicted at",
        ),
    ],
)
def test_what_a_log_says_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, told: str) -> None:
    log = tmp_path / "train.log"
    log.write_text(text + "\n")
    layout = "tp=4 pp=4 mbs=1 gbs=512 sp=true"
    _, out, _ = run(capsys, "diff", layout, layout, "--log", str(log), *LLAMA_70B)
    assert f"log: {told}" in " ".join(out.split())


# validate, catalogs ---------------------------------------------------------------------------------------------------


def test_validate_judges_a_table_of_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = Path(__file__).parent.parent.joinpath("planner", "data", "recipes.csv").read_text().splitlines()
    table = tmp_path / "recipes.csv"
    table.write_text("\n".join([lines[0], lines[1], lines[-1]]) + "\n")
    code, answer = run_json(capsys, "validate", str(table))
    assert code == 1 and [row["legal"] for row in answer["rows"]] == [False, True]
    assert answer["summary"]["rows"] == 2 and answer["rows"][0]["findings"][0]["rule"] == "W2"
    code, out, _ = run(capsys, "validate", str(table))
    assert code == 1 and "1 refused" in out
    (tight,) = (line for line in lines if line.startswith("llama3_70b_pretrain_32gpu_gb200_fp8cs"))
    table.write_text(f"{lines[0]}\n{tight}\n")
    code, answer = run_json(capsys, "validate", str(table))
    (row,) = answer["rows"]
    assert code == 1 and not row["fits"] and not row["fits_named_gpus"] and row["gpus"] == 32 and row["fits_from_gpus"] == 64
    code, out, _ = run(capsys, "validate", str(table))
    assert code == 1 and "fits from 64 GPUs" in " ".join(out.split()) and answer["summary"]["of_these_fits_more_gpus"] == 1
    table.write_text("recipe,model\na,b\n")
    code, _, err = run(capsys, "validate", str(table))
    assert code == 2 and "gpu_type" in err


def test_validate_has_rows_and_summary(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(RUNS)
    code, answer = run_json(capsys, "validate", str(table))
    first, second = sorted(answer["rows"], key=lambda row: row["id"])
    assert code == 0 and first["predicted_s"] > 0 and first["time_error"] is not None
    assert second["reason"]
    assert {"rows", "covered", "median", "p90", "bias"} <= set(answer["summary"][0])
    code, out, _ = run(capsys, "validate", str(table), "--rows")
    assert code == 0 and "own-1" in out


def test_catalogs_list_names_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "models", "llama-3.1")
    assert code == 0 and {"llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"} <= {entry["name"] for entry in answer}
    assert all(entry["source"] and entry["parameters"] > 0 for entry in answer)
    code, answer = run_json(capsys, "hardware", "h100")
    assert code == 0 and all(entry["source"] for entry in answer["gpus"])
    assert run(capsys, "hardware", "abacus")[0] == 1


# the frame ------------------------------------------------------------------------------------------------------------


def test_overview_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(name in out for name in COMMANDS)
    assert run(capsys)[0] == 2
    for name in ("plan", "check", "min-gpus", "diff", "export", "validate", "models", "hardware"):
        code, out, _ = run(capsys, name, "--help")
        assert code == 0 and "--json" in out


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=os.environ, check=False, timeout=120)


def test_the_module_runs_and_keeps_torch_out() -> None:
    done = python("-m", "shardwise", "min-gpus", "pp=2", "tp=2", "cp=1", "ep=8", "etp=1")
    assert done.returncode == 0 and "min GPUs 16" in done.stdout
    code = (
        "import sys\nfrom shardwise.cli import main\ntry:\n    main(['check', '--model', 'llama-3.1-8b', '--gpus', '8', 'tp=2', 'gbs=8'])\n"
        "except SystemExit:\n    print([name for name in ('torch', 'numpy', 'pandas') if name in sys.modules])"
    )
    assert python("-c", code).stdout.strip().endswith("[]")
    help_text = "import sys\nfrom shardwise.cli import main\ntry:\n    main(['plan', '--help'])\nexcept SystemExit:\n    "
    done = python(
        "-c", help_text + "print([name for name in sys.modules if name.startswith(('rich', 'shardwise.planner', 'shardwise.spec'))])"
    )
    assert done.stdout.strip().endswith("[]")


@pytest.mark.parametrize("columns", ["80", "120"])
def test_tables_keep_to_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for words in (
        ["check", *LLAMA_70B, *GOOD],
        ["plan", "--model", "llama-3.1-8b", "--gpus", "8", "--global-batch", "64"],
        ["hardware", "h100"],
        ["min-gpus", "tp=4", "cp=3", "pp=2", "ep=8"],
    ):
        _, out, _ = run(capsys, *words)
        assert out and max(map(len, out.splitlines())) <= int(columns)
        assert "…" not in out

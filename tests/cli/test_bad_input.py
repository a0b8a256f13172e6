"""One clear message and exit code 2 for every kind of bad input, and no traceback for any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cli.commands import RUNS, run, run_json

from shardwise.cli.framework_options import NAMES


@pytest.fixture
def bad_files(tmp_path: Path) -> dict[str, str]:
    contents: dict[str, bytes] = {
        "truncated.json": b'{"model_type": "llama", "hidden_size": ',
        "unknown.json": b'{"model_type": "martian", "hidden_size": 5}',
        "list.json": b"[1, 2]",
        "wrong.json": b'{"model_type": "llama", "hidden_size": "big", "num_hidden_layers": -3}',
        "binary.log": bytes(range(256)) * 8,
        "prose.log": b"all went well\n",
        "cut.csv": RUNS.encode()[:-80],
        "empty.csv": b"",
        "other.csv": b"a,b\n1,2\n",
        "broken.yaml": b"tp: 4\npp: [\n",
        "empty.yaml": b"",
        "words.yaml": b"tp: four\npp: 0\n",
        "scalar.yaml": b"4\n",
        "nested.yaml": b"tp: {a: 1}\n",
        "section.yaml": b"model: {tp: 2}\ngpus: 8\n",
        "settings.yaml": b"gpus: eight\nseq_len: 1e99\ngpu: [1]\nframework: 7\ntp: 2\n",
        "option.yaml": b"nccl_ub: maybe\ntp: 2\n",
        "latin.yaml": b"tp: 4 # \xe9\n",
        "bridge.txt": b"model.expert_model_parallel_size=x\nmodel.sequence_parallel=maybe\n",
        "short.txt": b"model.tp=2\n",
        "other.txt": b"train.train_iters=3\n",
        "titan.toml": b"[parallelism]\ntensor_parallel_degree = -2\nenable_sequence_parallel = 'x'\n"
        b"[activation_checkpoint]\nmode = 'some'\n",
        "twice.csv": b"id," + RUNS.encode(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    return {name: str(tmp_path / name) for name in (*contents, "folder", "folder/none/x")} | {"missing": str(tmp_path / "missing.json")}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("check --model @truncated.json --gpus 8 tp=2", "not JSON"),
        ("check --model @unknown.json --gpus 8 tp=2", "martian"),
        ("check --model @list.json --gpus 8 tp=2", "object"),
        ("check --model @wrong.json --gpus 8 tp=2", "num_hidden_layers"),
        ("check --model @missing --gpus 8 tp=2", "missing.json"),
        ("check --model lama-3.1-70b --gpus 8 tp=2", "llama-3.1-70b"),
        ("check --model llama-3.1-8b --gpu h1000 --gpus 8 tp=2", "h100"),
        ("check --model llama-3.1-8b --interconnect tincan --gpus 8 tp=2", "tincan"),
        ("check --model llama-3.1-8b --framework nemo --gpus 8 tp=2", "bridge"),
        ("check --model llama-3.1-8b --gpus 0 tp=2", "--gpus 0"),
        ("check --model llama-3.1-8b --gpus -8 tp=2", "--gpus -8"),
        ("check --model llama-3.1-8b --gpus 99999999999 tp=2", "1,048,576"),
        ("check --model llama-3.1-8b --gpus eight tp=2", "--gpus"),
        ("check --model llama-3.1-8b --gpus 8 tp=0 pp=-1 cp=x", "pp=-1"),
        ("check --model llama-3.1-8b --gpus 8 tensor=2", "tensor"),
        ("check --model llama-3.1-8b --gpus 8 @binary.log", "binary"),
        ("check --model llama-3.1-8b --gpus 8 @broken.yaml", "YAML"),
        ("check --model llama-3.1-8b --gpus 8 @empty.yaml", "no keys"),
        ("check --model llama-3.1-8b --gpus 8 @words.yaml", "four"),
        ("check --model llama-3.1-8b --gpus 8", "LAYOUT"),
        ("check --gpus 8 tp=2", "--model"),
        ("check --model llama-3.1-8b --gpus 8 --seq-length 4096 tp=2", "--seq-len"),
        ("check --model qwen3-30b-a3b --gpus 8 ep=8 moe_shared_expert_overlp=true", "moe_shared_expert_overlap=VALUE"),
        ("check --model llama-3.1-8b --gpus 8 --use-gloo-process-group true tp=2", "--use-gloo-process-groups"),
        ("export tp=2 nccl_ub=true --to slurm", "nccl_ub"),
        ("check --model llama-3.1-8b --gpus 8 tp=2 nccl_ub=maybe", "nccl_ub= true or false"),
        ("check --model llama-3.1-8b --gpus 8 tp=2 nccl_ub=true nccl_ub=false", "already given"),
        ("check --model llama-3.1-8b --gpus 8 tp=2 lr_warmup_fraction=nan", "from 0 to 1"),
        ("check --model llama-3.1-8b --gpus 8 tp=2 CUDA_DEVICE_MAX_CONNECTIONS=64", "from 1 to 32"),
        ("check --model llama-3.1-8b --gpus 8 tp=2 moe_router_dtype=fp46", "fp64"),
        ("check --model llama-3.1-8b --gpus 8 tp=2 order=tp-xp", "tp-cp-ep-dp-pp"),
        ("check --model llama-3.1-8b --gpus 8 @option.yaml", "nccl_ub= true or false"),
        ("check --model llama-3.1-8b --gpus 8 tp=1000000000 pp=1000000000 cp=1000000000", "1048576"),
        ("check --model llama-3.1-8b --gpus 8 capacity_factor=0", "above 0"),
        ("check --model llama-3.1-8b --gpus 8 offload=modules:mlpp", "moe_act"),
        ("check --model llama-3.1-8b --gpus 8 --top 3 tp=2", "no such option"),
        ("check --model llama-3.1-8b --gpus 8 --gpus 16 tp=2", "more than once"),
        ("check --model llama-3.1-8b --interconnect= --gpus 8 tp=2", "interconnect"),
        ("check --model llama-3.1-8b --gpus 8 --html @folder tp=2", "directory"),
        ("check --model llama-3.1-8b --gpus 8 --trace @folder/none/x tp=2", "no directory"),
        ("check --model @folder --gpus 8 tp=2", "config.json"),
        ("check --model llama-3.1-8b --gpus 8 @folder", "directory"),
        ("check --model llama-3.1-8b --gpus 8 @scalar.yaml", "YAML"),
        ("check --model llama-3.1-8b --gpus 8 @nested.yaml", "tp.a"),
        ("check --model llama-3.1-8b --gpus 8 @section.yaml", "tensor_model_parallel_size"),
        ("check --model llama-3.1-8b @settings.yaml", "seq_len: 1e+99"),
        ("check --model llama-3.1-8b --gpus 8 @latin.yaml", "binary"),
        ("check --model llama-3.1-8b --gpus 8 @bridge.txt", "sequence_parallel='maybe'"),
        ("check --model llama-3.1-8b --gpus 8 @short.txt", "tensor_model_parallel_size=2"),
        ("check --model llama-3.1-8b --gpus 8 @other.txt", "none of the names"),
        ("check --model llama-3.1-8b --gpus 8 @titan.toml", "mode = 'some'"),
        ("diff @settings.yaml tp=2", "gpus: 'eight'"),
        ("diff tp=2 tp=4 --gpu h1000", "h1000"),
        ("diff tp=2 tp=4 tp=8", "unexpected"),
        ("export tp=2 --gpus 3 --to slurm", "3 GPUs"),
        ("export tp=2 --to slurm --output @folder", "directory"),
        ("min-gpus tp=2 --gpu h1000", "h1000"),
        ("min-gpus --model llama-3.1-8b --precision mxfp8", "compute capability"),
        ("plan --model llama-3.1-8b --gpus 8 --global-batch 8 --why-not tp=x", "tp=x"),
        ("plan --model llama-3.1-8b --gpus 8 --global-batch 8 --flops 3", "exclude each other"),
        ("plan --parameters inf --activation-gib 1 --grid 2x2 --gpus 1 --global-batch 1", "--parameters inf"),
        ("plan --parameters 1e6 --activation-gib 1 --grid 2x2 --gpus 1 --global-batch 1 --flops nan", "--flops nan"),
        ("rehearse --recipe llama3_8b_tiny_pretrain_config model.tensor_model_parallel_size=0", "tp=0"),
        ("rehearse --recipe llama3_8b_tiny_pretrain_config model.seq_length=-5", "seq_len=-5"),
        ("rehearse --recipe llama3_8b_tiny_pretrain_config model.virtual_pipeline_model_parallel_size=0", "vpp=0"),
        ("rehearse --recipe llama3_8b_tiny_pretrain_config model.expert_tensor_parallel_size=0", "etp=0"),
        ("validate @twice.csv", "twice"),
        ("validate @folder", "directory"),
        ("models llama --gpu h100", "--gpu"),
        ("plan --model llama-3.1-8b", "--gpus"),
        ("plan --model llama-3.1-8b --gpus 8 --global-batch 64 dp=2", "dp=2"),
        ("plan --parameters 1e6 --gpus 8", "--activation-gib"),
        ("plan --parameters -1 --activation-gib 1 --grid 2x2 --gpus 1 --global-batch 1", "negative"),
        ("plan --parameters 1e6 --activation-gib 1 --grid 0x2 --gpus 1 --global-batch 1", "--grid"),
        ("min-gpus", "nothing to size"),
        ("export tp=2 --to deepspeed", "megatron-lm"),
        ("diff tp=2 tp=4 --log @binary.log", "binary"),
        ("diff tp=2 tp=4 --log @prose.log", "out-of-memory"),
        ("diff tp=2", "B"),
        ("validate @cut.csv", "cut off"),
        ("validate @empty.csv", "missing"),
        ("validate @other.csv", "columns"),
        ("validate @binary.log", "binary"),
        ("validate @missing", "No such file"),
        ("valdate x", "validate"),
    ],
)
def test_bad_input_gives_one_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], bad_files: dict[str, str], words: str, said: str
) -> None:
    code, out, err = run(capsys, *(bad_files[word[1:]] if word.startswith("@") else word for word in words.split()))
    assert code == 2 and not out and said in err and "Traceback" not in err


def test_all_problems_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "tp=2 tp=4 pp=2 pp=1 cp=3 cp=1 ep=1 ep=2 sp=maybe mbs=1 mbs=2 gbs=3 gbs=4 recompute=full recompute=none vpp=1 vpp=2 "
        "precision=fp7 sharding=zero9 x=1"
    )
    code, answer = run_json(capsys, "check", "--model", "lama", "--gpu", "h1000", "--gpus", "8", *words.split())
    assert code == 2 and len(answer["findings"]) >= 12
    assert "lama" in answer["error"] and "h1000" in answer["error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "check --model lama --gpu h1000 --gpus 0 --framework nemo tp=x nccl_ub=maybe",
            ("lama", "h1000", "--gpus 0", "nemo", "tp=x", "nccl_ub"),
        ),
        ("plan --model lama --gpu h1000 --gpus 0 --global-batch 8 pp=x --why-not tp=x", ("lama", "h1000", "--gpus 0", "pp=x", "tp=x")),
        ("min-gpus --model lama --gpu h1000 --framework nemo --precision fp7", ("lama", "h1000", "nemo", "fp7")),
        ("diff tp=x pp=x --model lama --gpu h1000 --log none.log", ("tp=x", "pp=x", "lama", "h1000", "none.log")),
        ("export tp=x --to nemo --framework nemo --gpus 0", ("tp=x", "--to nemo", "--framework nemo", "--gpus 0")),
        ("rehearse --recipe llama tp=0 --gpu h1000 --gpus 0", ("llama", "h1000", "--gpus 0")),
    ],
)
def test_options_and_words_are_refused_together(capsys: pytest.CaptureFixture[str], words: str, said: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *words.split())
    assert code == 2 and not out and all(each in err for each in said)


def test_what_the_parser_refuses_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "check", "--gpus", "eight", "tp=2")
    assert code == 2 and "--gpus" in answer["error"]


OPTION_VALUES = st.one_of(st.text(max_size=6), st.sampled_from(["true", "none", "[1,2,3]", "1e999", "-0", "nan", "fp32", "[", "hybrid"]))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.tuples(st.sampled_from(sorted(NAMES)), OPTION_VALUES).map("=".join), min_size=1, max_size=4))
def test_no_framework_option_crashes_check(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, _ = run(capsys, "check", "--model", "qwen3-30b-a3b", "--gpus", "8", "--json", "ep=8", *words)
    assert code in (0, 1, 2) and ("error" in json.loads(out)) == (code == 2)


VALUES = st.one_of(st.integers(-3, 70).map(str), st.sampled_from(["true", "none", "full", "a2a", "fsdp2", "1e9", "", "999999999", "x"]))
DEGREES = ["tp", "pp", "vpp", "cp", "ep", "etp", "sp", "dp", "mbs", "gbs"]
CHOICES = ["recompute", "sharding", "cp_comm", "precision", "first_stage_layers", "pipeline_layout", "shard_group", "schedule"]
KEYS = st.sampled_from(DEGREES + CHOICES)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.tuples(KEYS, VALUES).map("=".join), min_size=1, max_size=8),
    model=st.sampled_from(["llama-3.1-8b", "deepseek-v3", "qwen3-30b-a3b"]),
    gpus=st.integers(1, 4096),
    framework=st.sampled_from(["bridge", "megatron-core", "torchtitan", "shardwise"]),
)
def test_no_layout_crashes_check(capsys: pytest.CaptureFixture[str], words: list[str], model: str, gpus: int, framework: str) -> None:
    code, out, _ = run(capsys, "check", "--model", model, "--gpus", str(gpus), "--framework", framework, "--json", *words)
    answer = json.loads(out)
    assert code in (0, 1, 2)
    assert ("error" in answer) == (code == 2)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.tuples(KEYS, VALUES).map("=".join), min_size=1, max_size=5),
    command=st.sampled_from(["min-gpus", "export --to slurm", "export --to torchtitan", "export --to megatron-lm", "diff"]),
    gpus=st.sampled_from([[], ["--gpus", "8"], ["--gpus", "96"]]),
)
def test_no_layout_crashes_the_other_commands(capsys: pytest.CaptureFixture[str], words: list[str], command: str, gpus: list[str]) -> None:
    name, *options = command.split()
    given_words = [" ".join(words), "tp=2 pp=2"] if name == "diff" else words
    code, out, _ = run(capsys, name, *options, *gpus, "--json", *given_words)
    assert code in (0, 1, 2) and ("error" in json.loads(out)) == (code == 2)


CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(
        st.sampled_from([*CONFIG, "head_dim", "tie_word_embeddings", "num_local_experts"]),
        st.one_of(st.integers(-2, 40), st.none(), st.text(max_size=3), st.lists(st.integers(), max_size=2), st.booleans(), st.floats()),
        max_size=3,
    )
)
def test_no_config_crashes_check(capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    code, out, _ = run(capsys, "check", "--model", str(path), "--gpus", "8", "--json", "tp=2", "gbs=8")
    assert code in (0, 1, 2) and isinstance(json.loads(out), dict)


def test_a_misspelt_option_is_named_beside_what_is_missing_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "--modle", "llama-3.1-8b", "--gpus", "8", "--global-batch", "8")
    assert code == 2 and "given: --modle" in err and "try: --model" in err and "plan without --model" in err


def test_options_of_other_commands_are_not_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "min-gpus", "--top", "3", "tp=2")
    assert code == 2 and "given: --top" in err and "try: --help" in err

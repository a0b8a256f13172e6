"""Published training runs as (model, layout, cluster, software profile) with what was measured.

A table has the columns of `benchmarks/data/published_runs.csv`; rows that cannot be expressed say why. How each source counts FLOPs
and memory, and what its framework did where a row is silent, is data: ``data/sources.toml``.
"""

from __future__ import annotations

import csv
import io
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import gcd, inf
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, ShardwiseError
from shardwise.planner.flops import model_flops
from shardwise.planner.run_models import Inexpressible, Row, model_from_row, number, required
from shardwise.planner.space import FP8_PARAMS
from shardwise.spec import pipeline_layout
from shardwise.spec.catalog import cluster as catalog_cluster
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout, Offload, Recompute
from shardwise.spec.model import ModelSpec

COLUMNS = ("id", "source", "model_name", "num_layers", "hidden", "gpus", "gpu_type", "tp", "pp", "mbs", "gbs")
PRECISIONS = {
    "": "bf16",
    "bf16": "bf16",
    "bf16(amp)": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
    "fp8": "fp8-delayed",
    "fp8-cs": "fp8-current",
    "fp8-mx": "mxfp8",
    "fp8-block": "fp8-blockwise",
    "fp8-rowwise": "fp8-rowwise",
    "nvfp4": "nvfp4",
}
# Names in the table that the hardware catalog does not use: (pattern, catalog name).
GPUS = (
    (r"^H100-96GB", "h100-sxm-96gb"),
    (r"^H100", "h100-sxm"),
    (r"^H200", "h200"),
    (r"^H800", "h800"),
    (r"^A100-40", "a100-40gb"),
    (r"^A100", "a100-80gb"),
    (r"^A800", "a800-80gb"),
    (r"^GB300", "gb300"),
    (r"^GB200", "gb200"),
    (r"^B300", "b300"),
    (r"^B200", "b200"),
)
PEAKS = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "h800": 989e12, "b200": 2250e12, "gb200": 2450e12}
# What tests of Megatron-LM set that their rows do not say, by a word of the name.
TEST_CASES: dict[str, dict[str, Any]] = {
    "uneven_pipeline": {"first_stage_layers": 2, "last_stage_layers": 2},
    "tunable_overlap": {"vpp_group": 5},
    "fine_grained_offloading": {"offload": Offload(activation_modules=("core_attn", "expert_fc1"))},
    "etp1_fine_grained_offloading": {"overlap_moe": True},
    "ep_overlap": {"overlap_moe": True},
    "te_a2a_ovlp": {"overlap_moe": True},
}
# Tokens of a document of packed fine-tuning data; the sets that recipes pack (SQuAD, OpenMathInstruct-2) have a few hundred.
PACKED_DOCUMENT = 512
SCHEDULES = {"ZB-2p": "zb-h2", "ZB-1p": "zb-h1", "ZB-V": "zbv", "DualPipe": "dualpipe"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """How the rows of one source are read."""

    profile: str
    flops: str
    memory: str
    comparable: bool
    fp8_params: bool
    defaults: Mapping[str, str]
    layout: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run, expressed."""

    id: str
    source: str
    arch: str
    gpu_type: str
    model: ModelSpec
    layout: Layout
    cluster: Cluster
    seq_len: int
    document: int | None
    profile: str
    balanced: bool
    seconds: float | None
    memory_gib: float | None
    memory_meaning: str
    comparable: bool


@cache
def _table() -> dict[str, list[dict[str, Any]]]:
    text = resources.files("shardwise.planner").joinpath("data", "sources.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _recipe(row: Row) -> dict[str, Any]:
    """What the recipes of a framework set for a model family (with `cp`: for that context parallel size only)."""
    changes: dict[str, Any] = {}
    for entry in _table()["recipe"]:
        named = re.search(entry["source"], row.get("source", "")) and re.search(entry["model"], row.get("model_name", ""), re.I)
        if named and entry.get("cp") in (None, number(row, "cp") or 1):
            changes.update(entry["layout"])
    return changes


def source_of(row: Row) -> Source:
    """The entry of ``data/sources.toml`` that describes a row."""
    source, notes = row.get("source", ""), row.get("notes", "")
    for entry in _table()["source"]:
        found = re.search(entry["match"], source)
        noted = re.search(entry["notes"], notes) if "notes" in entry else None
        if not found or ("notes" in entry and not noted):
            continue
        groups = {**found.groupdict(), **(noted.groupdict() if noted else {})}
        release = entry.get("release") or groups.get("release")
        return Source(
            profile=f"{entry['framework']}/{release}" if release else entry["framework"],
            flops=entry["flops"],
            memory=entry["memory"],
            comparable=entry.get("comparable", True),
            fp8_params=entry.get("fp8_params", False),
            defaults=entry.get("defaults", {}),
            layout={**entry["layout"], **_recipe(row)},
        )
    raise Inexpressible("no source entry matches")


def read_table(path: str | Path) -> list[dict[str, str]]:
    """Rows of a CSV table of runs. Raises `InputError` when the file is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(given=str(path), why=error.strerror or "cannot be read", try_="the path of a CSV table of runs") from None
    except UnicodeDecodeError:
        raise InputError(given=str(path), why="it is not UTF-8 text", try_="a CSV table of runs") from None
    if "\0" in text:
        raise InputError(given=str(path), why="it is a binary file", try_="a CSV table of runs")
    try:
        reader = csv.DictReader(io.StringIO(text))
        header = reader.fieldnames or []
        rows = [{key: (value or "") for key, value in row.items() if isinstance(key, str)} for row in reader]
    except csv.Error as error:
        raise InputError(given=str(path), why=f"it is not CSV: {error}", try_="a CSV table of runs") from None
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        raise InputError(
            given=str(path), why=f"columns are missing: {', '.join(missing)}", try_="a header with the columns of published runs"
        )
    return rows


def parse_recompute(text: str) -> Recompute:
    """`none`, `full`, `full:uniform:1`, `selective:a+b`, `selective:[a b]`, and the words sources use for modules."""
    text = text.strip()
    if text in ("", "none", "selective:none", "selective:"):
        return Recompute()
    if text.startswith("full"):
        _, method, layers = (*text.split(":"), "", "")[:3]
        return Recompute(
            granularity="full", method="block" if method == "block" else "uniform", num_layers=int(layers) if layers.isdigit() else 1
        )
    words = re.split(r"[+,\s\[\]]+", text.partition(":")[2].lower().replace("moe activation", "moe_act").replace("gdn output-norm", ""))
    names = {"moe-activation": "moe_act", "core-attention": "core_attn"}
    modules = tuple(dict.fromkeys(names.get(word, word) for word in words if word))
    return Recompute(granularity="selective", modules=modules) if modules else Recompute()


def parse_offload(text: str) -> Offload:
    layers = re.search(r"layers=(\d+)", text)
    fine = re.search(r"fine_grained:\s*(.*)", text)
    return Offload(
        activation_layers=int(layers.group(1)) if layers else 0,
        activation_modules=tuple(re.split(r"[+,\s]+", fine.group(1).strip())) if fine else (),
    )


def _sharding(text: str, source: Source, framework: str) -> dict[str, Any]:
    word = text.lower()
    if "shard_grad_op" in word:
        return {"sharding": "fsdp2", "reshard_after_forward": False}
    if "fsdp" in word:
        return {"sharding": "megatron_fsdp" if framework.startswith("megatron") else "fsdp2"}
    if "zero3" in word:
        return {"sharding": "fsdp2"}
    if "dist-opt" in word or "zero1" in word:
        return {"sharding": "distributed_optimizer"}
    if word in ("ddp", "none (dp=1)", "none"):
        return {"sharding": "none"}
    return {}


def _from_notes(row: Row, framework: str) -> dict[str, Any]:
    """What a row's notes say about kernels, dispatch and overlap."""
    notes = row.get("notes", "")
    fields: dict[str, Any] = {}
    if re.search(r"attention-backend=unfused|transformer-impl=local", notes):
        fields["attention"] = "unfused"
    if re.search(r"cross-entropy-loss-fusion=True|cross-entropy fusion", notes):
        fields["cross_entropy"] = "fused"
    if re.search(r"grad-reduce-in-bf16=True", notes):
        fields["grad_dtype"] = "bf16"
    if re.search(r"dispatcher-type=alltoall", notes):
        fields["dispatcher"] = "alltoall"
    if re.search(r"deepep|_flex_|type=flex", notes, re.I) or "flex" in row.get("model_name", ""):
        fields["dispatcher"] = "deepep"
    if "HybridEP" in notes or (framework.startswith("megatron-bridge") and re.match(r"GB", row.get("gpu_type", ""))):
        fields["dispatcher"] = "hybridep"
    if re.search(r"tokendrop|token drop|capacity factor 1", notes) and "natural" not in notes:
        fields["capacity_factor"] = 1.0
    if "cuda_graph" in notes:
        fields["cuda_graphs"] = True
    if re.search(r"1f1b overlap|EP overlap", notes):
        fields["overlap_moe"] = True
    if re.search(r"\bpeft item|LoRA|LORA", notes):
        fields["peft"] = "lora"
    return fields


def _pipeline_words(model: ModelSpec, notes: str, pp: int, vpp: int) -> tuple[str, ...] | None:
    """An explicit pipeline layout: as noted, or what MTP models use."""
    noted = re.search(r"pipeline-model-parallel-layout=(\S+)", notes)
    if noted:
        words = pipeline_layout.parse(noted.group(1))
        if len(words) % pp == 0 and sum(word.count("t") for word in words) == model.num_layers:
            return words
    return _layout_with_mtp(model, pp * vpp) if model.mtp and pp * vpp > 1 else None


def layout_from_row(row: Row, model: ModelSpec, source: Source) -> Layout:
    """The layout of a run. Raises `Inexpressible` when a degree or batch size is missing or they do not fit together."""
    notes = row.get("notes", "")
    stated = re.search(r"heading says GBS=(\d+)", notes)
    if stated:
        row = {**row, "gbs": stated.group(1)}
    tp, pp = required(row, "tp"), required(row, "pp")
    cp = number(row, "cp") or 1
    vpp = number(row, "vpp") or 1
    gpus, mbs, gbs = required(row, "gpus"), required(row, "mbs"), required(row, "gbs")
    if gpus % (tp * pp * cp):
        raise Inexpressible(f"{gpus} GPUs are not a multiple of tp*pp*cp = {tp * pp * cp}")
    dp = gpus // (tp * pp * cp)
    fields: dict[str, Any] = dict(source.layout)
    framework = source.profile.split("/")[0]
    etp_default = fields.pop("etp", 1)
    fields.update(_sharding(row.get("dp_kind", ""), source, framework))
    if fields.get("master_dtype") == "none":
        fields["master_dtype"] = None
    ep = _expert_ranks(row, model, gpus // pp)
    etp = number(row, "etp") or (tp if etp_default == "tp" else 1)
    precision = PRECISIONS.get(row.get("precision", ""), "bf16")
    if source.fp8_params and precision in FP8_PARAMS:
        fields["param_dtype"] = "fp8"
    if not model.moe or gpus % (pp * ep * etp):
        etp = 1
    if row.get("sp"):
        fields["sp"] = row["sp"] == "True"
    fields["sp"] = bool(fields.get("sp")) and tp > 1
    schedule = next((name for word, name in SCHEDULES.items() if f"schedule {word}" in notes), "1f1b")
    if pp == 1:
        vpp, schedule = 1, "1f1b"
    fields.update(_from_notes(row, framework))
    spans = ep * etp > 8 and not re.match(r"GB", row.get("gpu_type", ""))
    if framework == "megatron-bridge" and fields.get("dispatcher") == "deepep" and spans and (pp == 1 or vpp > 1):
        fields["overlap_moe"] = True  # what its performance recipes switch on where experts span nodes
    words = _pipeline_words(model, notes, pp, vpp)
    if words:
        fields["pipeline_layout"], vpp = words, len(words) // pp
    elif model.num_layers % (pp * vpp) and (model.num_layers + 2) % (pp * vpp) == 0:
        fields["account_for_embedding"] = fields["account_for_loss"] = True
    fields["offload"] = parse_offload(row.get("offload", ""))
    for word, changes in TEST_CASES.items():
        if word in model.name:
            fields.update(changes)
    recompute = parse_recompute(row.get("recompute") or fields.pop("recompute", ""))
    fields.pop("recompute", None)
    layout = Layout(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        ep=ep,
        etp=etp,
        vpp=vpp,
        mbs=mbs,
        gbs=gbs,
        schedule=schedule,  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
        recompute=recompute,
        **fields,
    )
    if layout.microbatches < 1:
        raise Inexpressible(f"global batch {gbs} is less than mbs*dp = {mbs * dp}")
    return layout


def _layout_with_mtp(model: ModelSpec, stages: int) -> tuple[str, ...] | None:
    """Stages of equal size but the last, which also has MTP and loss and counts them as three layers (Bridge's DeepSeek layouts)."""
    each, over = divmod(model.num_layers + 3, stages)
    if each < 3:
        return None
    counts = [each + (stage < over) for stage in range(stages)]
    counts[-1] -= 3
    words = ["t" * count for count in counts]
    words[0] = "E" + words[0]
    words[-1] += "m" * len(model.mtp) + "L"
    return tuple(words)


def _expert_ranks(row: Row, model: ModelSpec, stage_ranks: int) -> int:
    """Expert parallel size; where a MoE row has none, as many ranks as a node of 8 allows."""
    if model.moe is None:
        return 1
    return number(row, "ep") or gcd(gcd(model.moe.experts, 8), stage_ranks)


def cluster_from_row(row: Row) -> Cluster:
    kind = (row.get("gpu_type") or "").strip()
    name = next((target for pattern, target in GPUS if re.search(pattern, kind)), kind)
    if not name:
        raise Inexpressible("gpu_type not given")
    source = row.get("source", "")
    try:
        if "bigscience" in source:
            return catalog_cluster(name, required(row, "gpus"), interconnect="omnipath-100", nics_per_gpu=0.5)
        return catalog_cluster(name, required(row, "gpus"))
    except ShardwiseError:
        raise Inexpressible(f"GPU type {kind!r} is not in the hardware catalog") from None


def _float(row: Row, column: str) -> float | None:
    try:
        value = float(row.get(column) or "")
    except ValueError:
        return None
    return value if 0 < value < inf else None


def measured_seconds(row: Row, model: ModelSpec, source: Source, seq_len: int, gbs: int, gpus: int) -> float | None:
    """Step time: as printed, else from tokens/s, else from TFLOP/s or MFU in the source's own FLOP convention."""
    printed = _float(row, "step_time_s")
    if printed:
        return printed
    tokens = gbs * seq_len / gpus
    rate = _float(row, "tokens_per_s_per_gpu")
    if rate:
        return tokens / rate
    achieved = (_float(row, "tflops_per_gpu") or 0.0) * 1e12
    if not achieved:
        peak = next((value for name, value in PEAKS.items() if row.get("gpu_type", "").lower().startswith(name)), None)
        achieved = (_float(row, "mfu") or 0.0) * (peak or 0.0) * (2 if row.get("precision", "").startswith("fp8") else 1)
    if not achieved:
        return None
    if source.flops == "hardware":
        h, layers = model.hidden, model.num_layers
        per_token = 96.0 * layers * h * h * (1 + seq_len / (6 * h) + model.vocab / (16 * layers * h))
    else:
        per_token = model_flops(model, seq_len, attention=2.0 if source.flops == "full" else 1.0)
    return tokens * per_token / achieved


def run_from_row(row: Row) -> Run:
    """A row as a `Run`. Raises `Inexpressible` with the reason when it cannot be."""
    source = source_of(row)
    row = {**row, **{column: value for column, value in source.defaults.items() if not row.get(column)}}
    model = model_from_row(row)
    seq_len = required(row, "seq_len")
    layout = layout_from_row(row, model, source)
    cluster = cluster_from_row(row)
    notes = row.get("notes", "")
    return Run(
        id=row.get("id", ""),
        source=row.get("id", "").split("-")[0],
        arch=row.get("arch", ""),
        gpu_type=cluster.gpu.name,
        model=model,
        layout=layout,
        cluster=cluster,
        seq_len=seq_len,
        document=PACKED_DOCUMENT if "packed data" in notes else None,
        profile=source.profile,
        balanced="natural routing" not in notes,
        seconds=measured_seconds(row, model, source, seq_len, layout.gbs, layout.world),
        memory_gib=_float(row, "peak_mem_gib"),
        memory_meaning=_memory_meaning(row, source),
        comparable=source.comparable,
    )


def _memory_meaning(row: Row, source: Source) -> str:
    notes = row.get("notes", "")
    if "nvidia-smi" in notes:
        return "device"
    return source.memory


def read_runs(rows: Iterable[Row]) -> tuple[list[Run], dict[str, str]]:
    """Runs that can be expressed, and for every other row (by id) the reason."""
    runs: list[Run] = []
    reasons: dict[str, str] = {}
    for index, row in enumerate(rows):
        try:
            runs.append(run_from_row(row))
        except Inexpressible as error:
            reasons[row.get("id") or f"row {index + 1}"] = str(error)
        except ShardwiseError as error:
            reasons[row.get("id") or f"row {index + 1}"] = str(error).replace("\n", "; ")
    return runs, reasons

"""torchtitan job configuration (TOML), written and read. Tables and keys as in torchtitan's `job_config`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from shardwise.errors import Finding, InputError, LayoutError
from shardwise.planner.exporters.megatron import unsupported
from shardwise.planner.exporters.megatron_lm import describe
from shardwise.spec.layout import Layout, Recompute

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "zb-h1": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV"}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ROTATE = {"all_gather": "allgather", "p2p": "alltoall"}
_FP8 = {"fp8-current": "tensorwise", "fp8-rowwise": "rowwise"}
_BACKENDS = {"alltoall": "standard", "deepep": "deepep", "hybridep": "hybridep"}
_ELSEWHERE = re.compile(r"\b(cross_entropy|vpp)=(fused|unfused|te|chunked|[1-9]\d*)\b")
Table = dict[str, Any]
_MOST_RANKS, _MOST_SAMPLES = 1 << 20, 10**9


def write(layout: Layout) -> str:
    """The TOML tables that describe the layout. Raises `LayoutError` with every field torchtitan cannot express."""
    problems = _problems(layout)
    if problems:
        raise unsupported("torchtitan", layout, problems)
    lines = [f"# {describe(layout)}"]
    lines.append(f"# set elsewhere: cross_entropy={layout.cross_entropy} (compile the loss), vpp={layout.vpp} (layers per stage)")
    for name, table in _tables(layout).items():
        lines += ["", f"[{name}]", *(f"{key} = {_text(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _problems(layout: Layout) -> dict[str, str]:
    problems = {}
    if layout.etp != 1:
        problems["etp"] = "etp=1 (torchtitan has no expert tensor parallelism any more)"
    if layout.sharding not in ("fsdp2", "none"):
        problems["sharding"] = "sharding=fsdp2"
    if layout.sharding == "fsdp2" and layout.shard_size % layout.cp:
        problems["shard_group"] = f"a multiple of cp={layout.cp}"
    if layout.sharding == "none" and layout.cp > 1:
        problems["sharding"] = "sharding=fsdp2: context parallel ranks join the FSDP mesh"
    if layout.sp != (layout.tp > 1):
        problems["sp"] = f"sp={str(layout.tp > 1).lower()}"
    if layout.schedule not in _SCHEDULES or (layout.vpp > 1 and layout.schedule not in ("1f1b", "zb-h1")):
        problems["schedule"] = "one of " + ", ".join(_SCHEDULES)
    if layout.cp_comm not in _ROTATE:
        problems["cp_comm"] = "cp_comm=all_gather or p2p"
    if layout.precision not in ("fp32", "bf16", "fp16", "mxfp8", *_FP8):
        problems["precision"] = "bf16, fp16, fp32, fp8-current, fp8-rowwise or mxfp8"
    if layout.master_dtype is not None:
        problems["master_dtype"] = "master_dtype=none: the sharded weights themselves are trained (param_dtype=fp32)"
    if layout.param_dtype not in _DTYPES:
        problems["param_dtype"] = "param_dtype=fp32 or bf16"
    if layout.moment_dtype != layout.param_dtype:
        problems["moment_dtype"] = f"moment_dtype={layout.param_dtype}: moments have the type of the weights"
    if layout.grad_dtype not in _DTYPES:
        problems["grad_dtype"] = "grad_dtype=fp32 or bf16"
    if layout.recompute.granularity == "selective" and layout.recompute.modules not in ((), ("core_attn",)):
        problems["recompute"] = "recompute=selective, full or none"
    if layout.recompute.granularity == "full" and (layout.recompute.method, layout.recompute.num_layers) != ("uniform", 1):
        problems["recompute"] = "recompute=full:uniform:1"
    for name in ("account_for_embedding", "account_for_loss", "cuda_graphs", "overlap_moe", "pad_to_capacity"):
        if getattr(layout, name):
            problems[name] = f"{name}=false"
    for name in ("vpp_group", "first_stage_layers", "last_stage_layers", "pipeline_layout", "capacity_factor", "peft"):
        if getattr(layout, name) is not None:
            problems[name] = f"no {name}"
    if str(layout.offload) != "none":
        problems["offload"] = "offload=none"
    if layout.dispatcher not in _BACKENDS:
        problems["dispatcher"] = "dispatcher=alltoall, deepep or hybridep"
    if layout.optimizer != "adam":
        problems["optimizer"] = "optimizer=adam"
    if layout.attention != "flash":
        problems["attention"] = "attention=flash"
    return problems


def _tables(layout: Layout) -> dict[str, Table]:
    shard = layout.shard_size // layout.cp if layout.sharding == "fsdp2" else 1
    parallelism: Table = {
        "data_parallel_replicate_degree": layout.dp // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "default" if layout.reshard_after_forward else "never",
        "tensor_parallel_degree": layout.tp,
        "enable_async_tensor_parallel": layout.overlap_tp,
        "context_parallel_degree": layout.cp,
        "context_parallel_rotate_method": _ROTATE[layout.cp_comm],
        "pipeline_parallel_degree": layout.pp,
        "expert_parallel_degree": layout.ep,
        "expert_parallel_comm_backend": _BACKENDS[layout.dispatcher],
    }
    batch = layout.mbs
    if layout.pp > 1:
        batch = layout.mbs * layout.microbatches
        name = "Interleaved1F1B" if layout.vpp > 1 and layout.schedule == "1f1b" else _SCHEDULES[layout.schedule]
        parallelism |= {"pipeline_parallel_schedule": name, "pipeline_parallel_microbatch_size": layout.mbs}
    training: Table = {
        "local_batch_size": batch,
        "global_batch_size": layout.gbs,
        "dtype": _DTYPES[layout.param_dtype],
        "mixed_precision_param": _DTYPES.get(layout.precision, "bfloat16"),
        "mixed_precision_reduce": _DTYPES[layout.grad_dtype],
    }
    checkpoint: Table = {"mode": layout.recompute.granularity}
    if layout.recompute.granularity == "selective":
        checkpoint["selective_ac_option"] = "op"
    tables = {"parallelism": parallelism, "training": training, "activation_checkpoint": checkpoint}
    if layout.precision in _FP8:
        tables["quantize.linear.float8"] = {"recipe_name": _FP8[layout.precision]}
    elif layout.precision == "mxfp8":
        tables["quantize.linear.mx"] = {"recipe_name": "mxfp8_cublas"}
    return tables


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def read(text: str, world: int | None = None) -> Layout:
    """Read the tables back; ``world`` fills a shard degree of -1 (the rest). Raises `LayoutError` with every value that is wrong."""
    try:
        config = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(given="torchtitan config", why=f"it is not TOML: {error}", try_="the file torchtitan reads") from None
    reader = _Reader()
    parallelism, training = reader.table(config, "parallelism"), reader.table(config, "training")
    tp, pp, cp = (reader.count(parallelism, f"{axis}_parallel_degree", 1) for axis in ("tensor", "pipeline", "context"))
    replicate = reader.count(parallelism, "data_parallel_replicate_degree", 1)
    shard = reader.count(parallelism, "data_parallel_shard_degree", -1)
    if shard < 1:
        if world is None:
            reader.refuse("data_parallel_shard_degree = -1", "the number of GPUs is not known", "--gpus N beside the file")
        shard = max(1, (world or 1) // (tp * pp * cp * replicate))
    dp = replicate * shard
    sp = reader.flag(parallelism, "enable_sequence_parallel", True)
    values: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "sp": tp > 1 and sp}
    values["ep"] = reader.count(parallelism, "expert_parallel_degree", 1)
    values |= {"sharding": "fsdp2" if shard * cp > 1 or replicate == 1 else "none"}
    if values["sharding"] == "fsdp2":
        values["shard_group"] = shard * cp if replicate > 1 else None
        values["reshard_after_forward"] = parallelism.get("fsdp_reshard_after_forward", "default") != "never"
    values["overlap_tp"] = reader.flag(parallelism, "enable_async_tensor_parallel", False)
    values["cp_comm"] = reader.word(parallelism, "context_parallel_rotate_method", "allgather", _ROTATE)
    values["dispatcher"] = reader.word(parallelism, "expert_parallel_comm_backend", "standard", _BACKENDS)
    interleaved = parallelism.get("pipeline_parallel_schedule") == "Interleaved1F1B"
    values["schedule"] = "1f1b" if interleaved else reader.word(parallelism, "pipeline_parallel_schedule", "1F1B", _SCHEDULES)
    stated = dict(_ELSEWHERE.findall(text))
    values["vpp"] = int(stated.get("vpp", 2 if interleaved else 1))
    values["cross_entropy"] = stated.get("cross_entropy", "unfused")
    local = reader.count(training, "local_batch_size", 1, _MOST_SAMPLES)
    values["mbs"] = reader.count(parallelism, "pipeline_parallel_microbatch_size", 1, _MOST_SAMPLES) if pp > 1 else local
    gbs = reader.count(training, "global_batch_size", -1, _MOST_SAMPLES)
    values["gbs"] = gbs if gbs > 0 else local * dp
    values |= _read_numbers(reader, config, training)
    if reader.problems:
        raise LayoutError(reader.problems)
    return Layout(**values)


def _read_numbers(reader: _Reader, config: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any]:
    precision = reader.word(training, "mixed_precision_param", "bfloat16", _DTYPES)
    linear = reader.table(reader.table(config, "quantize"), "linear")
    if "float8" in linear:
        precision = reader.word(reader.table(linear, "float8"), "recipe_name", "tensorwise", _FP8)
    elif "mx" in linear:
        precision = "mxfp8"
    dtype = reader.word(training, "dtype", "float32", _DTYPES)
    modes = {"none": "none", "selective": "selective", "full": "full"}
    mode = reader.word(reader.table(config, "activation_checkpoint"), "mode", "selective", modes)
    full = mode == "full"
    modules = ("core_attn",) if mode == "selective" else ()
    return {
        "precision": precision,
        "param_dtype": dtype,
        "moment_dtype": dtype,
        "master_dtype": None,
        "grad_dtype": reader.word(training, "mixed_precision_reduce", "float32", _DTYPES),
        "recompute": Recompute(granularity=mode, modules=modules, method="uniform" if full else None, num_layers=1 if full else None),
    }


class _Reader:
    """Reads values of tables; a wrong one is noted in `problems` and its default returned."""

    def __init__(self) -> None:
        self.problems: list[Finding] = []

    def refuse(self, given: str, why: str, instead: str) -> None:
        finding = Finding(rule="X2", severity="error", given=given, why=why, try_=instead, source="torchtitan job configuration")
        self.problems.append(finding)

    def table(self, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        table = config.get(name, {})
        if isinstance(table, Mapping):
            return table
        self.refuse(f"{name} = {table!r}", "it must be a TOML table", f"[{name}]")
        return {}

    def count(self, table: Mapping[str, Any], name: str, default: int, most: int = _MOST_RANKS) -> int:
        value = table.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and (1 <= value <= most or value == default):
            return value
        self.refuse(f"{name} = {value!r}", f"it must be a whole number from 1 to {most}", f"{name} = {default if default > 0 else 1}")
        return default

    def flag(self, table: Mapping[str, Any], name: str, default: bool) -> bool:
        value = table.get(name, default)
        if isinstance(value, bool):
            return value
        self.refuse(f"{name} = {value!r}", "it is a switch", f"{name} = {str(default).lower()}")
        return default

    def word(self, table: Mapping[str, Any], name: str, default: str, words: Mapping[str, str]) -> Any:
        """What we call the word of the table."""
        value = table.get(name, default)
        ours = {theirs: our for our, theirs in words.items()}
        if not isinstance(value, str) or value not in ours:
            self.refuse(f"{name} = {value!r}", "the word is not known", " | ".join(ours))
            value = default
        return ours[value]

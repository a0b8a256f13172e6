"""Judging a table of published layouts, one row per recipe, all rows at once.

Columns: recipe, model, hf_id, gpus, gpu_type, precision, tp, pp, vpp, cp, ep, etp, sp, mbs, gbs, seq, recompute, use_megatron_fsdp,
pp_layout. What such tables leave out is filled in: an expert tensor size that is not given follows TP (Megatron Core's default), the
communication of context parallelism follows the model's attention.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import Finding, InputError, ShardwiseError
from shardwise.planner.rules import check_layout, is_legal
from shardwise.planner.rules.alternatives import natural_cp_comm
from shardwise.spec import catalog, grammar
from shardwise.spec.layout import Layout
from shardwise.spec.model import ModelSpec

COLUMNS = ("recipe", "model", "gpus", "gpu_type", "tp", "pp", "cp", "ep", "etp", "mbs", "gbs")


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A row with its findings. `model` is None when the catalog does not know it: rules about the model kept silent."""

    recipe: str
    model: ModelSpec | None
    layout: Layout | None
    findings: tuple[Finding, ...]

    @property
    def legal(self) -> bool:
        return is_legal(self.findings)


def _model(row: Mapping[str, str]) -> ModelSpec | None:
    for name in (row.get("model"), row.get("hf_id")):
        key = catalog.find_model(name) if name else None
        if key in catalog.model_names():
            return catalog.model(str(key))
    return None


def _words(row: Mapping[str, str], model: ModelSpec | None) -> list[str]:
    words = [f"{name}={row[name]}" for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "sp", "mbs", "gbs", "precision") if row.get(name)]
    if row.get("ep") not in ("", None, "1") and not row.get("etp"):
        words.append(f"etp={row['tp']}")
    if row.get("pp_layout"):
        words.append(f"pipeline_layout={row['pp_layout']}")
    if row.get("use_megatron_fsdp") == "True":
        words.append("sharding=megatron_fsdp")
    recompute = row.get("recompute", "").replace("?", "").replace("(default)", "")
    if recompute not in ("", "none", "selective:none"):
        words.append(f"recompute={recompute}")
    if model:
        words.append(f"cp_comm={natural_cp_comm(model)}")
    return words


def judge_row(row: Mapping[str, str], framework: str = "bridge") -> Judgement:
    """Findings of one row; what cannot be read is a finding too."""
    name, model = row.get("recipe", ""), _model(row)
    try:
        gpus = grammar.read_values([f"dp={row.get('gpus', '')}"])["dp"]  # a count, read and refused like one
        layout = grammar.parse(_words(row, model), world=gpus)
        cluster = catalog.cluster(row.get("gpu_type", ""), gpus)
        seq = row.get("seq", "")
        seq_len = int(seq) if seq.isascii() and seq.isdigit() and int(seq) else None
        findings = check_layout(model, layout, cluster, seq_len=seq_len, framework=framework)
    except ShardwiseError as error:
        found = getattr(error, "findings", None)
        unread = Finding(rule="G0", severity="error", given=name, why=str(error), try_="a row the catalog can read", source="recipe table")
        return Judgement(recipe=name, model=model, layout=None, findings=found or (unread,))
    return Judgement(recipe=name, model=model, layout=layout, findings=findings)


def judge_rows(rows: Iterable[Mapping[str, str]], framework: str = "bridge") -> tuple[Judgement, ...]:
    return tuple(judge_row(row, framework) for row in rows)


def judge_table(path: Path, framework: str = "bridge") -> tuple[Judgement, ...]:
    """Judge every row of a CSV file. Raises `InputError` when it cannot be read or lacks columns."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [{key: value or "" for key, value in row.items() if key} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(given=str(path), why=f"cannot be read: {error}", try_="a CSV file with a header") from None
    missing = [column for column in COLUMNS if rows and column not in rows[0]]
    if missing or not rows:
        why = f"columns missing: {', '.join(missing)}" if missing else "no rows"
        raise InputError(given=str(path), why=why, try_="a header with " + ",".join(COLUMNS))
    return judge_rows(rows, framework)

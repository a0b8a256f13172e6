"""`shardwise validate` of a table of recipes: is each layout legal, does it fit its hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.cli import FINDING, OK
from shardwise.cli.render import print_json, print_table
from shardwise.planner.recipe_table import judge_rows

if TYPE_CHECKING:
    from shardwise.planner.recipe_table import Judgement

SHOWN = 10  # rows of each table without --rows


def validate_recipes(table: Sequence[Mapping[str, str]], *, rows: bool, as_json: bool) -> int:
    """Exit code 1 when a row is refused or does not fit."""
    judged = judge_rows(table)
    refused = [each for each in judged if not each.legal]
    too_big = [each for each in judged if each.fits is False]
    counts = {
        "rows": len(judged),
        "legal": len(judged) - len(refused),
        "fits": sum(each.fits is True for each in judged),
        "does_not_fit": len(too_big),
        "memory_not_predicted": sum(each.legal and each.fits is None for each in judged),
    }
    if as_json:
        print_json({"rows": [_json(each) for each in judged], "summary": counts})
    else:
        print_table("Recipes", tuple(name.replace("_", " ") for name in counts), [tuple(counts.values())])
        _print(f"{len(refused)} refused", [(each.recipe, _reasons(each)) for each in refused], rows)
        _print(f"{len(too_big)} do not fit", [(each.recipe, _memory(each)) for each in too_big], rows)
    return FINDING if refused or too_big else OK


def _print(title: str, lines: Sequence[tuple[str, str]], everything: bool) -> None:
    shown = lines if everything else lines[:SHOWN]
    more = f" (first {len(shown)}; --rows shows all)" if len(shown) < len(lines) else ""
    if lines:
        print_table(title + more, ("recipe", "why"), shown, text=(0, 1), wrap=(1,))


def _reasons(judged: Judgement) -> str:
    return "; ".join(f"{finding.rule} {finding.given}: {finding.why}" for finding in judged.findings if finding.severity == "error")


def _memory(judged: Judgement) -> str:
    memory = judged.memory
    if memory is None:
        return ""
    largest = sorted(memory.terms.items(), key=lambda term: -term[1])[:3]
    terms = ", ".join(f"{name.replace('_', ' ')} {size / 2**30:.1f}" for name, size in largest)
    return f"{memory.needed_gib:.1f} GiB needed of {memory.capacity_gib:.1f} (pipeline rank {memory.stage}: {terms})"


def _json(judged: Judgement) -> dict[str, Any]:
    memory = judged.memory
    return {
        "recipe": judged.recipe,
        "model": judged.model.name if judged.model else None,
        "legal": judged.legal,
        "fits": judged.fits,
        "needed_gib": memory.needed_gib if memory else None,
        "capacity_gib": memory.capacity_gib if memory else None,
        "findings": [finding.to_dict() for finding in judged.findings],
    }

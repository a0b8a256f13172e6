"""`shardwise validate` of a table of recipes: is each layout legal, does it fit its hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.cli import FINDING, OK
from shardwise.cli.render import print_json, print_table
from shardwise.planner.recipe_table import judge_rows

if TYPE_CHECKING:
    from shardwise.planner.memory import MemoryEstimate
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
        "of_these_on_whole_nodes_only": sum(each.fits is True and each.fits_named is False for each in judged),
        "does_not_fit": len(too_big),
        "of_these_fits_more_gpus": sum(each.fits_from is not None for each in too_big),
        "memory_not_predicted": sum(each.legal and each.fits is None for each in judged),
    }
    if as_json:
        print_json({"rows": [_json(each) for each in judged], "summary": counts})
    else:
        print_table("Recipes", ("", "recipes"), [(name.replace("_", " "), count) for name, count in counts.items()], text=(0,))
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
    if judged.memory is None:
        return ""
    text = f"{_gpus(judged.gpus)}: {_needed(judged.memory)}"
    if judged.fits_from:
        text += f"; fits from {_gpus(judged.fits_from)}"
    elif judged.most and judged.most[0] > judged.gpus:
        text += f"; nor do {_gpus(judged.most[0])}, the most its batch allows: {_needed(judged.most[1])}"
    else:
        text += "; its batch allows no more"
    return text + (f"; fits with samples of up to {judged.longest:,} tokens" if judged.longest else "")


def _gpus(count: int) -> str:
    return f"{count:,} GPU" + "s" * (count > 1)


def _needed(memory: MemoryEstimate) -> str:
    largest = sorted(memory.terms.items(), key=lambda term: -term[1])[:3]
    terms = ", ".join(f"{name.replace('_', ' ')} {size / 2**30:.1f}" for name, size in largest)
    return f"{memory.needed_gib:.1f} GiB needed of {memory.capacity_gib:.1f} (pipeline rank {memory.stage}: {terms})"


def _json(judged: Judgement) -> dict[str, Any]:
    memory = judged.memory
    return {
        "recipe": judged.recipe,
        "model": judged.model.name if judged.model else None,
        "legal": judged.legal,
        "gpus": judged.gpus,
        "fits": judged.fits,
        "fits_named_gpus": judged.fits if judged.fits_named is None else judged.fits_named,
        "fits_from_gpus": judged.fits_from,
        "fits_up_to_tokens": judged.longest,
        "needed_gib": memory.needed_gib if memory else None,
        "capacity_gib": memory.capacity_gib if memory else None,
        "findings": [finding.to_dict() for finding in judged.findings],
    }

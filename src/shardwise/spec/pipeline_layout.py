"""Explicit pipeline layouts in Megatron's notation, as text and as one word per stage.

`E` embedding, `t` decoder layer, `m` MTP layer, `L` loss, `|` stage break, `x*n` repeat, `(...)*n` repeat group, commas ignored.
Stage s sits on pipeline rank s % pp. Example: `Et*3|(tt|)*2t*3L` is the four words `Ettt`, `tt`, `tt`, `tttL`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shardwise.errors import Finding, LayoutError

_SOURCE = "Megatron Core PipelineParallelLayerLayout.parse_str_to_list"
_LIMIT = 100_000  # characters after expansion


def _refuse(text: str, why: str) -> LayoutError:
    try_ = "letters E t m L, stage breaks |, repeats like t*3 or (tt|)*2, for example Et*3|(tt|)*2t*3L"
    return LayoutError([Finding(rule="P14", severity="error", given=f"pipeline layout {text!r}", why=why, try_=try_, source=_SOURCE)])


def parse(text: str) -> tuple[str, ...]:
    """Words of the stages, for example `("Ett", "ttL")`. Raises `LayoutError` on text outside the grammar."""
    position = 0

    def group(depth: int) -> str:
        nonlocal position
        out = ""
        while position < len(text):
            char = text[position]
            position += 1
            if char in ", \t\n":
                continue
            if char in "EtmL|":
                piece = char
            elif char == "(":
                piece = group(depth + 1)
                if position >= len(text):
                    raise _refuse(text, "a ( is never closed")
                position += 1
            elif char == ")":
                if depth == 0:
                    raise _refuse(text, "a ) closes nothing")
                position -= 1
                return out
            else:
                raise _refuse(text, f"unexpected character {char!r}")
            if position < len(text) and text[position] == "*":
                start = position = position + 1
                while position < len(text) and text[position] in "0123456789":
                    position += 1
                count = int(text[start:position] or 0) if position - start <= 6 else _LIMIT + 1
                if count < 1:
                    raise _refuse(text, "* needs a number of at least 1")
                if count * len(piece) > _LIMIT:
                    raise _refuse(text, f"expands to more than {_LIMIT} characters")
                piece *= count
            out += piece
            if len(out) > _LIMIT:
                raise _refuse(text, f"expands to more than {_LIMIT} characters")
        return out

    if text.count("(") > 50:
        raise _refuse(text, "more than 50 groups")
    return tuple(group(0).split("|"))


def unparse(words: Sequence[str]) -> str:
    """Text that `parse` reads back to the same words, repeats written as `t*n` and `(tt|)*n`."""

    def word(letters: str) -> str:
        runs = ((letter, len(list(run))) for letter, run in groupby(letters))
        return "".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs)

    *first, last = words
    stages = ((stage, len(list(run))) for stage, run in groupby(first))
    return "".join(f"{word(stage)}|" if count == 1 else f"({word(stage)}|)*{count}" for stage, count in stages) + word(last)


def from_counts(counts: Sequence[int], mtp: int = 0) -> tuple[str, ...]:
    """Words for `counts[s]` decoder layers on stage s: embedding first, MTP layers and loss last."""
    words = ["t" * count for count in counts]
    words[0] = "E" + words[0]
    words[-1] += "m" * mtp + "L"
    return tuple(words)

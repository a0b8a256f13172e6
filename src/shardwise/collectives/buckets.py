"""Runs of things that travel together as one message."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")


def buckets(items: Iterable[T], *, key: Callable[[T], Hashable], size: Callable[[T], int], limit: int) -> list[list[T]]:
    """Items of one key, in order, of at most `limit` together; a larger one is alone. Buckets come by the first of their key."""
    of_key: dict[Hashable, list[tuple[list[T], int]]] = {}
    for item in items:
        runs = of_key.setdefault(key(item), [])
        own = size(item)
        if runs and runs[-1][1] + own <= limit:
            run, before = runs.pop()
            runs.append(([*run, item], before + own))
        else:
            runs.append(([item], own))
    return [run for runs in of_key.values() for run, _ in runs]

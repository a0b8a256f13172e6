"""Public helpers for tests of sharded code: run a function on several ranks, compare it with one process, count what it sends and keeps.

Names are imported on first use, so that the pytest plugin of this package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.testing.failures import RankFailure, RankHang
    from shardwise.testing.rank_tests import ranks
    from shardwise.testing.world import World

_HOMES = {
    "RankFailure": "failures",
    "RankHang": "failures",
    "World": "world",
    "ranks": "rank_tests",
}
__all__ = ["RankFailure", "RankHang", "World", "ranks"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"shardwise.testing.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

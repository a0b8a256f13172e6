"""Public helpers for tests of sharded code: run a function on several ranks, compare it with one process, count what it sends and keeps.

Names are imported on first use, so that the pytest plugin of this package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.collectives.counter import count_communication
    from shardwise.testing.failures import RankFailure, RankHang
    from shardwise.testing.memory import measure_saved_bytes
    from shardwise.testing.oracle import assert_same_as_unsharded, numerical_shard_tensor_check, shard
    from shardwise.testing.rank_tests import ranks
    from shardwise.testing.world import World

_HOMES = {
    "RankFailure": "shardwise.testing.failures",
    "RankHang": "shardwise.testing.failures",
    "World": "shardwise.testing.world",
    "assert_same_as_unsharded": "shardwise.testing.oracle",
    "count_communication": "shardwise.collectives.counter",
    "measure_saved_bytes": "shardwise.testing.memory",
    "numerical_shard_tensor_check": "shardwise.testing.oracle",
    "ranks": "shardwise.testing.rank_tests",
    "shard": "shardwise.testing.oracle",
}
__all__ = [
    "RankFailure",
    "RankHang",
    "World",
    "assert_same_as_unsharded",
    "count_communication",
    "measure_saved_bytes",
    "numerical_shard_tensor_check",
    "ranks",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Finding out what a split model does: what it sends and where, where it first goes wrong, where it hangs."""

from shardwise.debug.explain import Event, Explanation, count_by_module, explain
from shardwise.debug.hangs import stacks_on_hang, wait_all
from shardwise.debug.ops import SupportedOp, supported_ops
from shardwise.debug.placements import Difference, check_step

__all__ = [
    "Difference",
    "Event",
    "Explanation",
    "SupportedOp",
    "check_step",
    "count_by_module",
    "explain",
    "stacks_on_hang",
    "supported_ops",
    "wait_all",
]

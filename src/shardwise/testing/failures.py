"""How a distributed test fails: one message that names the ranks. Standard library only."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping


class RankFailure(AssertionError):
    """One or more ranks raised or died; the message holds the traceback of each, the first cause first."""

    def __init__(self, *, size: int, reports: Mapping[int, str]) -> None:
        first = next(iter(reports))
        cause = reports[first].rstrip().splitlines()[-1].strip()
        texts = (f"--- rank {rank} of {size} ---\n{text.rstrip()}" for rank, text in reports.items())
        super().__init__("\n".join([f"rank {first} of {size} failed: {cause}", *texts]))


class RankHang(AssertionError):
    """Some ranks were not done in time; the message holds the stack of each and names those that are not waiting for others."""

    def __init__(self, *, size: int, timeout: float, stacks: Mapping[int, str]) -> None:
        ranks = sorted(stacks)
        done = sorted(set(range(size)) - set(ranks))
        lines = [f"rank {', '.join(map(str, ranks))} of {size} not done after {timeout:g} s"]
        lines += [
            f"rank {rank} is not waiting for another rank: {where}" for rank in ranks if not waits(where := innermost_frame(stacks[rank]))
        ]
        if done:
            lines.append(f"rank {', '.join(map(str, done))} finished without the others")
        lines += [f"--- rank {rank} of {size} ---\n{_test_frames(stacks[rank])}" for rank in ranks]
        super().__init__("\n".join(lines))


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)')
_WAITING = re.compile(r"torch/distributed/|torch/testing/_internal/distributed/|/threading\.py|\bwait\w*\(")


_RUNNER = re.compile(r'File "[^"]*shardwise/testing/rank_tests\.py", line \d+,? in __call__')


def _test_frames(stack: str) -> str:
    """The part of a stack text that lies inside the rank function."""
    lines = stack.rstrip().splitlines()
    edges = [number for number, line in enumerate(lines) if _RUNNER.search(line)]
    if not edges:
        return "\n".join(lines)
    if any("most recent call first" in line for line in lines):
        return "\n".join(lines[: edges[0]])
    return "\n".join(lines[edges[-1] + 2 :])  # a frame and its source line


def innermost_frame(stack: str) -> str:
    """`FILE:LINE in FUNCTION: SOURCE` of where a thread stands, from a stack text of `traceback` or `faulthandler`."""
    blocks = stack.split("\n\n")
    block = next((block for block in blocks if block.startswith("Current thread")), blocks[0])
    frames = list(_FRAME.finditer(block))
    if not frames:
        return stack.strip() or "no Python frame"
    frame = frames[0] if "most recent call first" in block else frames[-1]
    source = linecache.getline(frame["file"], int(frame["line"])).strip()
    return f"{frame['file']}:{frame['line']} in {frame['function']}: {source}"


def waits(where: str) -> bool:
    """Whether a frame, as `innermost_frame` writes it, is one that waits for another rank."""
    return bool(_WAITING.search(where))

"""Leaving a process without aborting it.

A thread of gloo lets go of the tensors of a collective some time after those who wait for it have gone on, and needs the interpreter
for that. If the process ends in between, Python up to 3.13 ends the thread inside a C++ destructor, which aborts the process after
all its work is done ("terminate called without an active exception"; torch's issue 190489). `destroy_process_group` joins the threads
only when nothing holds the group any more, and a device mesh holds its groups.
"""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"
_LONGEST = 5.0  # seconds; a thread that computes longer than this works on something nobody waits for


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """From now on the interpreter ends only once gloo's threads are at rest: seen so on Linux, after 0.1 s elsewhere."""
    atexit.register(wait_for_gloo)


def wait_for_gloo() -> None:
    """Return once gloo's threads hold nothing that has arrived, after at most five seconds."""
    if not _TASKS.is_dir():
        time.sleep(0.1)
        return
    calm, end = 0, time.monotonic() + _LONGEST
    while calm < 3 and time.monotonic() < end:
        time.sleep(0.002)  # the interpreter is theirs meanwhile
        calm = calm + 1 if all(map(_at_rest, _TASKS.iterdir())) else 0


def _at_rest(task: Path) -> bool:
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # it ended
        return True
    return name != _NAME or rest.split()[0] == "S"

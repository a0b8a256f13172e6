"""Processes that a command starts end when the command is asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """The started process, one thread per rank unless the environment says otherwise. It gets the SIGTERM that this process gets;
    when it has ended then, this process exits with 143."""
    asked = False
    process: subprocess.Popen[str] | None = None

    def stop(*_: object) -> None:
        nonlocal asked
        asked = True
        if process is not None:
            process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        process = subprocess.Popen(command, text=True, env={"OMP_NUM_THREADS": "1", **os.environ}, **options)
        if asked:
            process.terminate()
        yield process
        process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    if asked:
        sys.exit(128 + signal.SIGTERM)


def call(command: Sequence[str]) -> int:
    """Start the command, wait for it, and return its exit code."""
    with started(command) as process:
        pass
    return process.returncode

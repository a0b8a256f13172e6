"""Where every rank stands when a run hangs, and results that were never waited for."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map_only


@contextmanager
def stacks_on_hang(seconds: float, folder: str | os.PathLike[str], *, stop: bool = False) -> Iterator[Path]:
    """If the block takes longer than `seconds`, write the stack of all threads of this rank to `folder/rank_00000.txt`.

    Enter it on every rank: the files side by side show which rank waits for which. A rank whose file is empty was not in the block.
    stop: end the process after that, so that a launcher ends the run; else it goes on waiting.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = Path(folder) / f"rank_{rank:05d}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        faulthandler.dump_traceback_later(seconds, file=file, exit=stop)
        try:
            yield path
        finally:
            faulthandler.cancel_dump_traceback_later()


def wait_all(values: Any) -> Any:
    """`values`, any nesting, with every tensor that still waits for its collective completed.

    For results that are measured and thrown away: collectives that nobody waits for are reported when the process ends.
    """
    return tree_map_only(Tensor, _wait, values)


def _wait(tensor: Tensor) -> Tensor:
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, AsyncCollectiveTensor):
        tensor._local_tensor = local.wait()
    return tensor

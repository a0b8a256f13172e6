"""A script that ends right after its last collective ends with exit code 0."""

import subprocess
import sys

import pytest

# gloo's thread has tens of thousands of tensors to let go, and the main thread keeps the interpreter to itself for ten seconds.
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from shardwise import DistributedManager
DistributedManager.initialize()
group = DistributedManager().initialize_mesh((1, 2), ["ddp", "domain"]).get_group("domain")
sys.setswitchinterval(10)
many = [torch.ones(1) for _ in range(50000)]
dist.all_reduce_coalesced(many, group=group, async_op=True).wait()
"""


@pytest.mark.parametrize("end", ["DistributedManager.cleanup()", "", "sys.exit(0)"])
def test_leaving_while_gloo_still_holds_tensors(tmp_path, end):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + end)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr

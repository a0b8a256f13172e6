"""The page of ops is in step with the registry, and what it says each op does is what its samples do."""

import subprocess
import sys
from pathlib import Path

from tests.ops_seen import see
from tests.samples import all_samples

from shardwise.debug import supported_ops
from shardwise.debug.ops import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "supported_ops.md"
SAMPLES = all_samples()[::40]


def test_page_is_the_registry():
    written = PAGE.read_text().splitlines()
    command = [sys.executable, "-m", "shardwise.debug.ops"]  # in a process of its own: other tests register handlers
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    differ = sorted(set(written) ^ set(made))
    assert written == made, "run python -m shardwise.debug.ops > docs/supported_ops.md; rows that differ:\n" + "\n".join(differ[:20])


def test_ops_do_what_the_page_says():
    ops = {op.name: op for op in supported_ops()}
    wrong = []
    for name, table in see(SAMPLES).items():
        for where, what in table.items():
            unsaid = set(what) - set(ops[name].placements.get(where, ()))
            wrong += [f"{name} with {where}: {', '.join(sorted(unsaid))}"] if unsaid else []
    assert not wrong, "run python -m tests.ops_seen, then write the page again; not on it:\n" + "\n".join(wrong)


def test_known_rows():
    ops = {op.name: op.placements for op in supported_ops()}
    assert ops["torch.conv2d"]["Shard(2), plain, plain"] == ("exchange",)
    assert ops["torch.conv2d"]["Shard(0), plain, plain"] == ("local",)
    assert ops["aten._softmax.default"]["Shard(2)"] == ("local",)
    assert set(ops["aten._softmax.default"]["Shard(1)"]) == {"local", "reduce"}  # local along another dim
    assert ops["shardwise.functional.points.knn"]["Shard(0), plain"] == ("exchange",)
    assert {what for table in ops.values() for kinds in table.values() for what in kinds} == set(KINDS)

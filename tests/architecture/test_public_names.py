"""Public names exist where users look for them, and asking for a description of the package loads no torch."""

import importlib
import json
import subprocess
import sys

import pytest

import shardwise

TOP_LEVEL = {
    "DistributedManager",
    "ShardTensor",
    "ShardTensorSpec",
    "TensorPromotionMode",
    "scatter_tensor",
    "sync_module_over_mesh",
    "MissingShardPatch",
    "UndeterminedShardingError",
}
TESTING = {
    "RankFailure",
    "RankHang",
    "World",
    "assert_same_as_unsharded",
    "count_communication",
    "measure_saved_bytes",
    "numerical_shard_tensor_check",
    "ranks",
    "shard",
}
WITHOUT_TORCH = ["shardwise", "shardwise.errors", "shardwise.spec", "shardwise.planner", "shardwise.testing.plugin", "shardwise.cli"]


def test_top_level_names_are_those_of_the_contract():
    assert set(shardwise.__all__) >= TOP_LEVEL
    assert [name for name in shardwise.__all__ if not hasattr(shardwise, name)] == []


def test_testing_names():
    testing = importlib.import_module("shardwise.testing")
    assert set(testing.__all__) == TESTING
    assert all(callable(getattr(testing, name)) for name in TESTING)


@pytest.mark.parametrize("module", ["shardwise", "shardwise.testing"])
def test_unknown_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="no_such_name"):
        importlib.import_module(module).no_such_name  # noqa: B018


def test_no_torch_is_loaded_by_descriptions_plans_and_the_command_line():
    code = (
        "import importlib, json, sys\n"
        f"loaded = [name for name in {WITHOUT_TORCH!r} if importlib.import_module(name) and 'torch' in sys.modules]\n"
        "print(json.dumps(loaded))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == []

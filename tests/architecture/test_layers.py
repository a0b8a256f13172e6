"""A package imports only from lower layers, and torch stays above the line."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "shardwise"

LAYERS = [
    ["spec"],
    ["planner"],
    ["collectives", "mesh", "random", "functional"],
    ["shard_tensor", "attention"],
    ["parallel", "testing", "data", "debug"],
    ["train", "rehearse"],
    ["recipes"],
    ["cli"],
]
WITHIN_LAYER = {("collectives", "mesh"), ("random", "mesh"), ("shard_tensor", "attention"), ("rehearse", "train")}  # (importer, imported)
WITHOUT_TORCH = ["spec", "planner"]
STANDARD_LIBRARY_ONLY = ["errors", "spec", "planner"]
FITTING = "planner/fit.py"  # refits the planner's constants with SciPy; no part of planning

PACKAGES = [package for layer in LAYERS for package in layer]
LEVEL = {package: level for level, layer in enumerate(LAYERS) for package in layer}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything a file imports, at module level and inside functions."""
    package = ("shardwise", *path.relative_to(SRC).with_suffix("").parts)[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [parent, node.module]))
            if module == "shardwise":
                for alias in node.names:
                    yield node.lineno, f"shardwise.{alias.name}"
            else:
                yield node.lineno, module


def files(package: str) -> list[Path]:
    module = SRC / f"{package}.py"
    return [module] if module.exists() else sorted((SRC / package).rglob("*.py"))


def violations(package: str, allowed) -> list[str]:
    return [
        f"{path.relative_to(SRC)}:{line} imports {name}" for path in files(package) for line, name in imports(path) if not allowed(name)
    ]


def test_every_package_has_a_layer():
    found = {path.name for path in SRC.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert found <= set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_only_from_lower_layers(package):
    def allowed(name: str) -> bool:
        root, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if root != "shardwise" or other in ("errors", package):
            return True
        return other in LEVEL and (LEVEL[other] < LEVEL[package] or (package, other) in WITHIN_LAYER)

    assert violations(package, allowed) == []


@pytest.mark.parametrize("package", STANDARD_LIBRARY_ONLY)
def test_package_needs_only_the_standard_library(package):
    def allowed(name: str) -> bool:
        return name.partition(".")[0] in {*sys.stdlib_module_names, "shardwise"}

    found = [violation for violation in violations(package, allowed) if not violation.startswith(f"{FITTING}:")]
    assert found == []


def test_torch_internals_of_the_threaded_group_are_imported_in_one_file():
    users = {path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py") for _, name in imports(path) if "testing._internal" in name}
    assert users == {"testing/threads.py"}

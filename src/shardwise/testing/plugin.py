"""The pytest plugin, installed with the package: `--multigpu-static`, its marker, and the life of the process pool."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from shardwise.testing import launched

if TYPE_CHECKING:
    from shardwise.testing.rank_tests import RankTest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("shardwise").addoption(
        "--multigpu-static",
        action="store_true",
        help="run rank tests marked multigpu_static on the world that torchrun started (NCCL on GPUs, else gloo)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "multigpu_static: also runs on the world of a launcher, under torchrun with --multigpu-static")
    if config.getoption("--multigpu-static"):
        try:
            launched.start(timeout=600.0)
        except launched.LauncherError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--multigpu-static"):
        _skip_other_sizes(items)
    else:
        for item in items:
            if item.get_closest_marker("multigpu_static") and _rank_test(item) is None:
                item.add_marker(pytest.mark.skip(reason="written for a launched world: torchrun ... -m pytest --multigpu-static"))


def _skip_other_sizes(items: list[pytest.Item]) -> None:
    import torch.distributed as dist

    size = dist.get_world_size()
    for item in items:
        test = _rank_test(item)
        if item.get_closest_marker("multigpu_static") is None:
            item.add_marker(pytest.mark.skip(reason="not marked multigpu_static"))
        elif test is not None and test.size != size:
            item.add_marker(pytest.mark.skip(reason=f"needs {test.size} ranks, launched with {size}"))


def _rank_test(item: pytest.Item) -> RankTest | None:
    function = getattr(item, "function", None)
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    return getattr(inner, "rank_test", None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the pool's parent while this process is clean: the test modules are imported, nothing has run."""
    tests = [test for test in map(_rank_test, session.items) if test is not None]
    if tests:
        logging.getLogger("c10d-NullHandler-default").propagate = False  # one record per failed collective and thread
    if not launched.active() and not session.config.option.collectonly and any(test.processes for test in tests):
        from shardwise.testing import pool

        pool.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, launched.LauncherError):
        item.session.shouldstop = str(call.excinfo.value).partition("\n")[0]
    return report


def pytest_unconfigure() -> None:
    launched.stop()
    if "shardwise.testing.pool" in sys.modules:
        from shardwise.testing import pool

        pool.stop()

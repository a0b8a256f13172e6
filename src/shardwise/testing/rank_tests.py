"""`@ranks(n)`: a test written once, as what each rank does, and run by plain pytest.

    @ranks(3)
    def test_sum(world):
        x = torch.full((2,), float(world.rank), device=world.device)
        dist.all_reduce(x)
        assert x.tolist() == [3.0, 3.0]

Ranks are threads of one process, or real gloo processes with `processes=True` (deadlocks, autograd threads, pipelines, FSDP2), or, under
torchrun with `--multigpu-static`, the launched world. Parametrization, fixtures and hypothesis combine with it as with any test.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.testing.world import World

TIMEOUT_S = 50.0


@dataclass(frozen=True, kw_only=True)
class RankTest:
    """A rank function and how it is run. Shared with the process pool by its `key`."""

    function: Callable[..., None]
    size: int
    processes: bool
    axes: Mapping[str, int] | None
    timeout: float

    @property
    def key(self) -> tuple[str, str]:
        return (self.function.__module__, self.function.__qualname__)

    def __call__(self, world: World, arguments: Mapping[str, Any]) -> None:
        self.function(world, **arguments)


REGISTRY: dict[tuple[str, str], RankTest] = {}


def ranks(
    n: int, *, processes: bool = False, mesh: Mapping[str, int] | None = None, timeout: float = TIMEOUT_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated function on `n` ranks, with a `World` as its first argument.

    processes: real processes with gloo instead of threads. The function stands at module level, and its arguments are pickled.
    mesh: axis names and sizes of `world.mesh`, for example `{"ddp": 2, "domain": 2}`.
    timeout: seconds after which unfinished ranks are a failure that shows each rank's stack.

    A rank that raises ends the test on all ranks and is named in the failure; so is one that dies or hangs.
    Threads share what a process has once: the random number generators (use `world.randn` and `world.same`), warning filters, registries.
    """
    sizes = tuple(mesh.values()) if mesh else (n,)
    if math.prod(sizes) != n:
        raise ValueError(f"mesh {dict(mesh or {})} has {math.prod(sizes)} ranks, not {n}")

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or parameters[0].name == "self":
            raise TypeError(f"{function.__qualname__}: a rank test is a function whose first parameter is the world")
        signature = inspect.Signature(parameters[1:])
        test = RankTest(function=function, size=n, processes=processes, axes=mesh, timeout=timeout)
        REGISTRY[test.key] = test

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            _run(test, signature.bind(*args, **kwargs).arguments)

        run.__signature__ = signature  # type: ignore[attr-defined]
        run.rank_test = test  # type: ignore[attr-defined]
        return run

    return decorate


def _run(test: RankTest, arguments: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    from shardwise.testing import launched

    if launched.active():
        launched.run(test, arguments)
    elif test.processes:
        from shardwise.testing import pool

        pool.run(test, arguments)
    else:
        _run_threads(test, arguments)


def _run_threads(test: RankTest, arguments: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    import torch

    from shardwise.testing.threads import run_in_threads
    from shardwise.testing.world import World

    run_in_threads(test.size, lambda rank: test(World(device=torch.device("cpu"), axes=test.axes), arguments), test.timeout)

"""Runs one command function: parses its options, prints errors as given / why / try, sets the exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import typer

from shardwise.cli import BAD_USAGE
from shardwise.errors import ShardwiseError


def run(name: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Parse ``arguments`` for ``function`` (a Typer-style signature), call it, exit with the code it returns."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    context: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
    if "layout" in signature(function).parameters:  # --tensor-model-parallel-size 4 is a layout word
        context["ignore_unknown_options"] = True
    app.command(name, context_settings=context)(_guarded(function, "--json" in arguments))
    typer.main.get_command(app).main(list(arguments), prog_name=f"shardwise {name}")


def _guarded(function: Callable[..., Any], as_json: bool) -> Callable[..., Any]:
    from functools import wraps

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            code = function(*args, **kwargs)
            sys.stdout.flush()
        except ShardwiseError as error:
            print_error(error, as_json=as_json)
            code = BAD_USAGE
        except BrokenPipeError:  # the reader of the pipe went away
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        raise typer.Exit(code or 0)

    return call


def print_error(error: ShardwiseError, *, as_json: bool) -> None:
    """The message on stderr; with ``--json`` the same as one JSON object on stdout."""
    if as_json:
        findings = [finding.to_dict() for finding in getattr(error, "findings", ())]
        print(json.dumps({"error": str(error), "findings": findings}, indent=2))
        return
    print(str(error), file=sys.stderr)

"""Runs one command function: parses its options, prints errors as given / why / try, sets the exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import typer

from shardwise.cli import BAD_USAGE, FINDING
from shardwise.cli import options as opt
from shardwise.errors import InputError, LayoutError, ShardwiseError

_USAGE_ERROR: Any = typer.BadParameter.__base__  # what the parser refuses: options without values, missing arguments


def run(name: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Parse ``arguments`` for ``function`` (a Typer-style signature), call it, exit with the code it returns."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    context: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
    if "layout" in signature(function).parameters:  # --tensor-model-parallel-size 4 is a layout word
        context["ignore_unknown_options"] = True
    app.command(name, context_settings=context)(_guarded(function, "--json" in arguments))
    command = typer.main.get_command(app)
    as_json = "--json" in arguments
    opt.names.set(tuple(word for each in command.params for word in each.opts if word.startswith("--")))
    try:
        _given_once(command, arguments)
        code = command.main(list(arguments), prog_name=f"shardwise {name}", standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except ShardwiseError as error:
        print_error(error, as_json=as_json)
        code = BAD_USAGE
    except _USAGE_ERROR as error:
        why = error.format_message().rstrip(".")
        print_error(InputError(given=" ".join((name, *arguments)), why=why, try_=f"shardwise {name} --help"), as_json=as_json)
        code = BAD_USAGE
    sys.exit(code)


def _given_once(command: Any, arguments: Sequence[str]) -> None:
    """Refuse options that are given several times: one of the values would be dropped."""
    own = {name: each for each in command.params if not getattr(each, "is_flag", False) for name in each.opts if name.startswith("-")}
    words = [word.partition("=")[0] for word in arguments]
    given = [own[word].opts[0] for word in words if word in own]
    twice = sorted({name for name in given if given.count(name) > 1})
    if twice:
        raise InputError(given=" ".join(f"{name} {name}" for name in twice), why="it is given more than once", try_="each option once")


def refused(error: LayoutError, *, as_json: bool) -> int:
    """Print why a layout was refused; the exit code. Degrees below 1 are no layout but bad usage."""
    print_error(error, as_json=as_json)
    return BAD_USAGE if any(finding.rule == "W4" for finding in error.findings) else FINDING


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

"""Errors and findings. Standard library only: every layer may import this module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]


class ShardwiseError(Exception):
    """Base of the errors a user can cause. The command line prints the message and exits with code 2."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One judgement about a layout.

    rule: short id of the rule (for example `"T1"`).
    severity: `"error"` (refused), `"warning"` (runs, but something is changed or lost) or `"info"` (advice).
    given: the values that were judged. why: the reason they fail. try_: what to write instead (JSON key `try`).
    source: where the rule comes from (framework and function, paper or manual).
    """

    rule: str
    severity: Severity
    given: str
    why: str
    try_: str
    source: str

    def to_dict(self) -> dict[str, str]:
        return {
            "rule": self.rule,
            "severity": self.severity,
            "given": self.given,
            "why": self.why,
            "try": self.try_,
            "source": self.source,
        }

    def __str__(self) -> str:
        text = f"{self.severity} {self.rule}: {self.given}: {self.why}"
        return f"{text}. Try: {self.try_}" if self.try_ else text


class LayoutError(ShardwiseError):
    """A layout, or the text of one, was refused; carries every finding, not only the first."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(str(finding) for finding in self.findings))


class ModelError(ShardwiseError):
    """A model description was refused; `problems` lists every reason."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class InputError(ShardwiseError):
    """An input other than a layout or a model (a file, a name, an option) was refused."""

    def __init__(self, *, given: str, why: str, try_: str = "") -> None:
        self.given, self.why, self.try_ = given, why, try_
        super().__init__(_message(given, why, try_))


def _message(given: str, why: str, try_: str) -> str:
    parts = (("given", given), ("why", why), ("try", try_))
    return "\n".join(f"{name}: {text}" for name, text in parts if text)


class MissingShardPatch(NotImplementedError):
    """An operation has no sharded form for what it was given."""

    def __init__(self, given: str, why: str = "", try_: str = "") -> None:
        self.given, self.why, self.try_ = given, why, try_
        super().__init__(_message(given, why, try_))


class UndeterminedShardingError(Exception):
    """The sharding of a tensor cannot be decided from what is known."""

    def __init__(self, given: str, why: str = "", try_: str = "") -> None:
        self.given, self.why, self.try_ = given, why, try_
        super().__init__(_message(given, why, try_))

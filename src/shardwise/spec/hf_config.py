"""Reading values from a Hugging Face `config.json` and remembering everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_LARGEST = 10**9
_MOST_LAYERS = 10_000


class Config:
    """A config dict. Reads return a stand-in for a missing or malformed value and note the problem in `problems`."""

    def __init__(self, values: Mapping[str, Any], problems: list[str] | None = None) -> None:
        self.values = values
        self.problems: list[str] = [] if problems is None else problems

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", ""))

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = _LARGEST) -> int:
        """The first of `names` that is present (spellings of one field), else `default`; without one the field is missing."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                self.problem(f"{name} must be a whole number from {least} to {most}, got {value!r}")
                return least
            return value
        if default is None:
            self.problem(f"{names[0]} is missing")
            return least
        return default

    def optional(self, *names: str, least: int = 1) -> int | None:
        return self.integer(*names, least=least) if any(self.has(name) for name in names) else None

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(f"{name} must be true or false, got {value!r}")
            return default
        return value

    def word(self, *names: str, default: str) -> str:
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if not isinstance(value, str):
                    self.problem(f"{name} must be a string, got {value!r}")
                    return default
                return value
        return default

    def sequence(self, name: str, of: type, length: int | None = None) -> Sequence[Any] | None:
        """A list whose items are of one type, and of at least `length` items; None if absent or malformed."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(not isinstance(item, of) or isinstance(item, bool) for item in value):
            self.problem(f"{name} must be a list of {of.__name__}")
            return None
        if length is not None and len(value) < length:
            self.problem(f"{name} has {len(value)} items for {length} layers")
            return None
        return value

    def section(self, name: str) -> Config:
        """A nested dict, its problems noted here."""
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            self.problem(f"{name} must be an object, got {value!r}")
            value = {}
        return Config(value, self.problems)

    @property
    def layers(self) -> int:
        return self.integer("num_hidden_layers", "n_layer", "n_layers", most=_MOST_LAYERS)

    def kinds(self, name: str, known: Mapping[str, str], otherwise: Callable[[int], str]) -> list[str]:
        """Per-layer words of the list `name`, translated by `known`; layers are given by `otherwise` when the list is absent."""
        words = self.sequence(name, str, self.layers)
        if words is None:
            return [otherwise(i) for i in range(self.layers)]
        unknown = sorted({word for word in words if word not in known})
        if unknown:
            self.problem(f"{name} has unknown layers {', '.join(unknown)}; known: {', '.join(known)}")
        return [known.get(word, next(iter(known.values()))) for word in words[: self.layers]]

"""A checkpoint's config.json, read key by key; a wrong value is one line that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import CheckpointError

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Config:
    """A JSON object of a checkpoint, and where it stands, for messages."""

    values: Mapping[str, object]
    place: str = "config.json"

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number; `default` where the key is missing or null."""
        value = self._value(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self.wrong(key, value, "a whole number")

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number; `default` where the key is missing or null."""
        value = self._value(key, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        raise self.wrong(key, value, "a number")

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return true or false; `default` where the key is missing or null."""
        value = self._value(key, default)
        if isinstance(value, bool):
            return value
        raise self.wrong(key, value, "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; `default` where the key is missing or null."""
        value = self._value(key, default)
        if isinstance(value, str):
            return value
        raise self.wrong(key, value, "a string")

    def numbers(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Return a list of numbers; `default` where the key is missing or null."""
        value = self._value(key, list(default))
        if isinstance(value, list) and all(isinstance(item, (int, float)) for item in value):
            return tuple(float(item) for item in value)
        raise self.wrong(key, value, "a list of numbers")

    def section(self, key: str) -> Config:
        """Return an inner object; an empty one where the key is missing or null."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if isinstance(value, dict):
            return Config(value, f"{self.place}: {key}")
        raise self.wrong(key, value, "an object")

    def wrong(self, key: str, value: object, wanted: str) -> CheckpointError:
        """Make the error for a value that cannot be used."""
        found = "missing" if value is _MISSING else repr(value)
        return CheckpointError(f"{self.place}: {key} is {found}; wanted {wanted}")

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        return _MISSING if default is None else default

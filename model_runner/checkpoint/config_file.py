"""A JSON file of a checkpoint, read field by field with types checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvrelay.model_runner.errors import CheckpointError, NotNativeError

Default = TypeVar("Default")


class ConfigFile:
    """A JSON object and the file that it came from.

    Every accessor raises `CheckpointError`, which names file and field, if the field has the wrong
    type. It also does if the field is absent (or null) and no default was given.
    """

    def __init__(self, path: Path, fields: Mapping[str, Any], section: str = "") -> None:
        self.path = path
        self._fields = fields
        self._section = section

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Parse `path`; missing, unreadable or non-object JSON is a `CheckpointError`."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: file not found") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not readable as JSON: {error}") from None
        if not isinstance(fields, dict):
            raise CheckpointError(f"{path}: must hold a JSON object")
        return cls(path, fields)

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigFile:
        """The same object; fields that it has not, not even as null, are those of `defaults`."""
        return ConfigFile(self.path, {**defaults, **self._fields}, self._section)

    def with_fields(self, fields: Mapping[str, Any]) -> ConfigFile:
        """The same object with `fields` in place of its own."""
        return ConfigFile(self.path, {**self._fields, **fields}, self._section)

    def error(self, field: str, problem: str) -> CheckpointError:
        """The one-line error about `field`, for the caller to raise."""
        return CheckpointError(f"{self.path}: {self._section}{field} {problem}")

    def not_native(self, field: str, problem: str) -> NotNativeError:
        """The same for a value that only transformers' code may compute."""
        return NotNativeError(str(self.error(field, problem)))

    def has(self, field: str) -> bool:
        """Whether `field` is present and not null."""
        return self._fields.get(field) is not None

    def get(self, field: str) -> Any:
        """The raw value, `None` if absent."""
        return self._fields.get(field)

    def section(self, field: str) -> ConfigFile:
        """The object under `field`, empty if absent."""
        value = self._fields.get(field)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(field, f"must be an object, got {value!r}")
        return ConfigFile(self.path, value, f"{self._section}{field}.")

    def text(self, field: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(field, default)
        if not isinstance(value, str):
            raise self.error(field, f"must be a string, got {value!r}")
        return value

    def flag(self, field: str, default: bool | None = None) -> bool:
        """A boolean."""
        value = self._value(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, got {value!r}")
        return value

    def size(self, field: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._value(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(field, f"must be a positive integer, got {value!r}")
        return value

    def count(self, field: str, default: int | None = None) -> int:
        """An integer that is not negative."""
        value = self._value(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(field, f"must be a non-negative integer, got {value!r}")
        return value

    def size_or_none(self, field: str, default: int | None) -> int | None:
        """A positive integer, `None` if it is null, `default` if it is absent."""
        return self.size(field) if self.has(field) else self._if_absent(field, default)

    def number_or_none(self, field: str, default: float | None) -> float | None:
        """A positive finite number, `None` if it is null, `default` if it is absent."""
        return self.number(field) if self.has(field) else self._if_absent(field, default)

    def number(self, field: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._value(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(field, f"must be a number, got {value!r}")
        if not math.isfinite(value) or value <= 0:
            raise self.error(field, f"must be positive and finite, got {value!r}")
        return float(value)

    def token_ids(self, field: str, vocab_size: int) -> tuple[int, ...]:
        """A token id below `vocab_size` or a list of them; empty if absent."""
        value = self._fields.get(field)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise self.error(field, f"must be token ids, got {value!r}")
            if token_id >= vocab_size:
                raise self.error(field, f"of {token_id} is outside the vocabulary of {vocab_size}")
        return tuple(ids)

    def _if_absent(self, field: str, default: Default) -> Default | None:
        return None if field in self._fields else default

    def _value(self, field: str, default: object) -> object:
        value = self._fields.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.error(field, "is missing")
        return value

"""The members of a JSON object from a client, each taken by its name and type."""

from __future__ import annotations

import contextlib
import json
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvrelay.router.doors.http.errors import HttpError
from kvrelay.router.errors import InvalidField

_MAX_ELEMENTS: Final = 1 << 20
"""The most elements of a body: commas and brackets, while a colon counts as eight.

To parse as many takes some 60 ms, during which the event loop stands still.
"""
_COLON_COUNTS: Final = 8
UINT32: Final = (1 << 32) - 1
INT32: Final = (1 << 31) - 1
Schema = Mapping[str, Any]
"""A JSON schema of a value."""
TOKEN_IDS: Final[Schema] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": UINT32},
}
_ANYTHING: Final[Schema] = {}
_ANY_OBJECT: Final[Schema] = {"type": "object"}


def parse_body(body: bytes) -> dict[str, Any]:
    """Parse a body's JSON object.

    Raises:
        HttpError: it is not a JSON object, or has so many elements that parsing it would hold up
            the router.
    """
    elements = sum(map(body.count, (b",", b"[", b"{"))) + _COLON_COUNTS * body.count(b":")
    if elements > _MAX_ELEMENTS:
        raise HttpError(
            413, "invalid_request_error", f"the body has more than {_MAX_ELEMENTS} elements"
        )
    try:
        with _short_integers():
            parsed = json.loads(body.decode())
        if b"\\u" in body:  # half a surrogate pair is no text, and cannot be encoded again
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise HttpError(400, "invalid_request_error", f"the body is not JSON: {why}") from None
    if not isinstance(parsed, dict):
        raise HttpError(400, "invalid_request_error", "the body must be a JSON object")
    return parsed


@contextlib.contextmanager
def _short_integers() -> Iterator[None]:
    """Refuse numbers of many digits meanwhile, since parsing takes the square of their length."""
    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(sys.int_info.str_digits_check_threshold)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(most)


class Fields:
    """The members of an object, to be taken one by one; null counts as absent.

    Each method returns None for an absent member, and raises `InvalidField` for one of another
    type. `finish` refuses the members that are left.

    Args:
        members: the object's members.
        inside: the object's own name, if it is a member of another object.
    """

    def __init__(self, members: dict[str, Any], inside: str = "") -> None:
        self._members = {name: value for name, value in members.items() if value is not None}
        self._inside = f"{inside}." if inside else ""

    def has(self, name: str) -> bool:
        """Return whether the member is there and has not been taken."""
        return name in self._members

    def take(self, name: str, shape: Schema = _ANYTHING) -> Any:
        """Take a member of any type.

        Args:
            name: the member's name.
            shape: the schema that the caller requires; `openapi` shows it to clients.
        """
        return self._members.pop(name, None)

    def text(self, name: str) -> str | None:
        """Take a string."""
        value: str | None = self._typed(name, str, "a string")
        return value

    def flag(self, name: str) -> bool:
        """Take true or false; absent is false."""
        return bool(self._typed(name, bool, "true or false"))

    def optional_flag(self, name: str) -> bool | None:
        """Take true or false."""
        value: bool | None = self._typed(name, bool, "true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Take a whole number in `[low, high]`."""
        value = _whole(self.take(name))
        if value is None:
            return None
        if not _is_int(value):
            raise self.error(name, f"must be a whole number, got {_shown(value)}")
        if not low <= value <= high:
            raise self.error(name, f"must be in [{low}, {high}], got {_shown(value)}")
        return int(value)

    def number(self, name: str) -> float | None:
        """Take a number."""
        value = self.take(name)
        if value is None:
            return None
        if not _is_int(value) and not isinstance(value, float):
            raise self.error(name, f"must be a number, got {_shown(value)}")
        try:
            return float(value)
        except OverflowError:
            raise self.error(name, "is too large") from None

    def strings(self, name: str) -> Sequence[str]:
        """Take one string, or a list of them; absent is an empty list."""
        value = self.take(name)
        if isinstance(value, str):
            return [value]
        if value is not None and not _all(value, str):
            raise self.error(name, "must be a string, or a list of strings")
        return value or []

    def token_ids(self, name: str) -> Sequence[int]:
        """Take a list of token ids; absent is an empty list."""
        value = self.take(name)
        return [] if value is None else token_ids(self._inside + name, value)

    def object(self, name: str) -> Fields | None:
        """Take an object, as `Fields` of its members."""
        value = self.members(name)
        return None if value is None else Fields(value, self._inside + name)

    def members(self, name: str, shape: Schema = _ANY_OBJECT) -> dict[str, Any] | None:
        """Take an object as a dict; for `shape` see `take`."""
        value: dict[str, Any] | None = self._typed(name, dict, "an object")
        return value

    def ignore(self, *names: str) -> None:
        """Drop members of any type that have no meaning for this server."""
        for name in names:
            self.take(name)

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse a member unless it has one of these values, which are all that is served."""
        value = self.take(name)
        if value is not None and not any(_same(value, one) for one in allowed):
            served = " or ".join(json.dumps(one) for one in allowed)
            raise self.error(name, f"is not served{f', but for {served}' if served else ''}")

    def finish(self) -> None:
        """Refuse the members that were not taken."""
        for name in self._members:
            raise self.error(name[:64], "is no field that this server knows")

    def error(self, name: str, problem: str) -> InvalidField:
        """Return the refusal of one member."""
        return InvalidField(self._inside + name, problem)

    def _typed(self, name: str, kind: type, called: str) -> Any:
        value = self.take(name)
        if value is not None and not isinstance(value, kind):
            raise self.error(name, f"must be {called}, got {_shown(value)}")
        return value


def token_ids(field: str, value: Any) -> Sequence[int]:
    """Convert a JSON list to token ids of 4 bytes; raise `InvalidField` if it is no such list."""
    if isinstance(value, list) and not _all(value, int):
        value = [_whole(one) for one in value]
    if not _all(value, int):
        raise InvalidField(field, "must be a list of token ids")
    try:
        return array("I", value)
    except OverflowError:
        raise InvalidField(field, f"token ids must be in [0, {UINT32}]") from None


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are the same in JSON: true and 1 are equal only in Python."""
    return value == other and isinstance(value, bool) is isinstance(other, bool)


def _whole(value: Any) -> Any:
    """Return a number as JSON means it: 5.0 is the integer 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_int(value: Any) -> bool:
    return type(value) is int  # a boolean is an int to Python


def _shown(value: Any) -> str:
    """Return a value as messages show it: itself if it is short, else its type."""
    text = json.dumps(value) if isinstance(value, str | int | float | bool) else ""
    return text if 0 < len(text) <= 64 else _JSON_TYPES[type(value)]


_JSON_TYPES: Final = {
    str: "a long string",
    int: "a long number",
    float: "a number",
    bool: "a boolean",
    list: "a list",
    dict: "an object",
}

"""The reading of JSON bodies by pydantic, and the wording of refusals."""

from __future__ import annotations

import codecs
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvrelay.router.doors.http.errors import HttpError
from kvrelay.router.errors import InvalidField

_MAX_ELEMENTS: Final = 1 << 20
"""The most elements of a body: commas and brackets, while a colon counts as eight.

To parse as many takes some 60 ms, during which the event loop stands still.
"""
_COLON_COUNTS: Final = 8
_TOO_DEEP: Final = "the body is nested too deeply"
_MAX_FAULTS: Final = 1 << 10
"""The most faults of a body whose first one is told; to list many holds up the router."""


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
            parsed = json.loads(body.removeprefix(codecs.BOM_UTF8).decode())
        if b"\\u" in body:  # half a surrogate pair is no text, and cannot be encoded again
            json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise HttpError(
            400,
            "invalid_request_error",
            f"the body has the escape {half}, half of a surrogate pair, which is no text: "
            "send both halves, or the character itself",
        ) from None
    except RecursionError:
        raise HttpError(400, "invalid_request_error", _TOO_DEEP) from None
    except ValueError as error:
        why = " ".join(str(error).split())
        raise HttpError(400, "invalid_request_error", f"the body is not JSON: {why}") from None
    if not isinstance(parsed, dict):
        raise HttpError(400, "invalid_request_error", "the body must be a JSON object")
    return parsed


@contextlib.contextmanager
def refusing_depth() -> Iterator[None]:
    """Refuse a body, while it is read, that could be parsed and is too deep for what follows."""
    try:
        yield
    except RecursionError:
        raise HttpError(400, "invalid_request_error", _TOO_DEEP) from None


@contextlib.contextmanager
def _short_integers() -> Iterator[None]:
    """Refuse numbers of many digits meanwhile, since parsing takes the square of their length."""
    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(sys.int_info.str_digits_check_threshold)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(most)


class RequestBody(BaseModel):
    """A JSON object from a client; null stands for an absent, optional member.

    A member that the model does not name is refused, unless it is null.
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    __pydantic_extra__: dict[str, None]


class OpenObject(BaseModel):
    """A JSON object from a client that may have other members as well."""

    model_config = ConfigDict(strict=True)


_Body = TypeVar("_Body", bound=BaseModel)


def read_body(model: type[_Body], members: dict[str, Any]) -> _Body:
    """Read a body by its model.

    Raises:
        InvalidField: a member is missing, unknown or of another type. The first of them is named,
            or the body itself where they are too many to look for it.
    """
    try:
        return model.model_validate(members)
    except ValidationError as error:
        if error.error_count() > _MAX_FAULTS:
            raise InvalidField("body", f"has more than {_MAX_FAULTS} faults") from None
        first = error.errors(include_url=False)[0]
    place = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step[:64]}" for step in first["loc"]
    )
    problem = _problem(first["type"], first["input"], first["msg"], first.get("ctx", {}))
    raise InvalidField(place[1:], problem)


_PROBLEMS: Final = {
    "missing": "is missing",
    "none_required": "is no field that this server knows",
    "string_type": "must be a string, got {got}",
    "bool_type": "must be true or false, got {got}",
    "int_type": "must be a whole number, got {got}",
    "float_type": "must be a number, got {got}",
    "list_type": "must be a list, got {got}",
    "dict_type": "must be an object, got {got}",
    "model_type": "must be an object, got {got}",
    "literal_error": "must be {expected}, got {got}",
    "greater_than_equal": "must be at least {ge}, got {got}",
    "less_than_equal": "must be at most {le}, got {got}",
    "too_short": "must have at least {min_length}, got {actual_length}",
    "too_long": "must have at most {max_length}, got {actual_length}",
    "string_too_short": "must have at least {min_length} character",
    "string_pattern_mismatch": "must match {pattern}",
}
"""The wording of pydantic's kinds of errors; others bring their own."""


def _problem(kind: str, given: Any, message: str, context: Mapping[str, Any]) -> str:
    if kind == "float_type" and type(given) is int:  # a boolean is an int to Python
        return "is too large"
    wording = _PROBLEMS.get(kind)
    if wording is None:
        return message.removeprefix("Value error, ")
    return wording.format(got=_shown(given), **context)


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
    type(None): "null",
}

"""A search for the place of an error in a JSON schema; compilers report it without the place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

_MOST_TRIALS: Final = 200
_OF_NAMES: Final = ("$defs", "definitions", "properties", "patternProperties")
"""The keywords whose values map names to schemas.

Definitions come first: an error in one is found there, and not where they are referred to.
"""
_OF_LISTS: Final = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE: Final = ("items", "additionalProperties", "not", "if", "then", "else")
_DEFINITIONS: Final = ("$schema", "$defs", "definitions")


def find_place(schema: str, fails: Callable[[str], bool]) -> str:
    """The JSON pointer of the innermost schema within `schema` that fails; empty: all of it.

    Args:
        schema: a schema that fails as a whole, in JSON.
        fails: tells whether a schema by itself has the same error. It may raise anything.
    """
    try:
        current = root = json.loads(schema)
    except (ValueError, RecursionError):
        return ""
    place, trials = "", 0
    while isinstance(current, dict):
        for step, inner in _schemas_in(current):
            trials += 1
            if trials > _MOST_TRIALS:
                return place
            if _fails(_with_definitions(inner, root), fails):
                place, current = place + step, inner
                break
        else:
            return place
    return place


def _fails(schema: Any, fails: Callable[[str], bool]) -> bool:
    try:
        return fails(json.dumps(schema))
    except Exception:  # another error than the one that is looked for
        return False


def _with_definitions(schema: Any, root: Any) -> Any:
    """A copy of a schema that can be read alone, with the root's definitions if it needs any."""
    if not isinstance(schema, dict) or not isinstance(root, dict):
        return schema
    shared = {name: root[name] for name in _DEFINITIONS if name in root}
    refers = "$ref" in json.dumps(schema)
    return {**shared, **schema} if refers else schema


def _schemas_in(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside one, each with the step that leads to it."""
    for name in _OF_NAMES:
        members = schema.get(name)
        if isinstance(members, dict):
            yield from ((f"/{name}/{_escaped(key)}", one) for key, one in members.items())
    for name in _OF_LISTS:
        members = schema.get(name)
        if isinstance(members, list):
            yield from ((f"/{name}/{number}", one) for number, one in enumerate(members))
    for name in _SINGLE:
        if name in schema:
            yield f"/{name}", schema[name]


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")

"""A search for the place of an error in a JSON schema; compilers report it without the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from kvrelay.text.json_schema import steps_in

_MOST_TRIALS: Final = 200
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
        for steps, inner in steps_in(current):
            trials += 1
            if trials > _MOST_TRIALS:
                return place
            if _fails(_with_definitions(inner, root), fails):
                place, current = f"{place}/{'/'.join(map(_escaped, steps))}", inner
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


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")

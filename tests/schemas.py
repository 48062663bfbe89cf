"""Random JSON schemas of all kinds that are enforced, whose values have an end."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

_WORDS = ("name", "first name", "größe", "a/b", "x~y", "id", "tags", "next")


def random_schema(random: Random) -> str:
    """A schema of an object, in JSON."""
    schema = {"$defs": {"leaf": _leaf(random)}, **_object(random, 2)}
    return json.dumps(schema, ensure_ascii=random.random() < 0.5)


def _schema(random: Random, depth: int) -> dict[str, Any]:
    kinds: list[Callable[[Random], dict[str, Any]]] = [_leaf, _leaf]
    if depth:
        kinds += [lambda r: _object(r, depth - 1), lambda r: _array(r, depth - 1)]
        kinds += [lambda r: _any_of(r, depth - 1), lambda r: {"$ref": "#/$defs/leaf"}]
    return random.choice(kinds)(random)


def _leaf(random: Random) -> dict[str, Any]:
    low = random.randint(-50, 50)
    return random.choice(
        [
            {"type": "string", "minLength": random.randint(0, 2), "maxLength": 6},
            {"type": "string", "pattern": random.choice(["^[a-c]{1,4}$", "^(ab|c)-[0-9]{2}$"])},
            {"enum": ["red", "green", 3, None, True]},
            {"const": {"k": [1, "é"]}},
            {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 300)},
            {"type": "boolean"},
            {"type": ["null", "boolean"]},
            {"type": "string", "format": "date"},
        ]
    )


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(_WORDS, random.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _schema(random, depth) for name in names},
        "required": [name for name in names if random.random() < 0.7],
        "additionalProperties": False,
    }


def _array(random: Random, depth: int) -> dict[str, Any]:
    least = random.randint(0, 2)
    most = least + random.randint(0, 2)
    return {"type": "array", "items": _schema(random, depth), "minItems": least, "maxItems": most}


def _any_of(random: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(random, depth) for _ in range(random.randint(1, 3))]}

"""JSON schemas as they are enforced: what clients mean, in keywords that the compiler knows."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import urljoin

from kvrelay.text.regex_classes import ascii_classes

OF_NAMES: Final = ("$defs", "definitions", "properties", "patternProperties")
"""The keywords whose values map names to schemas.

Definitions come first: an error in one is found there, and not where they are referred to.
"""
OF_LISTS: Final = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE: Final = ("items", "additionalProperties", "not", "if", "then", "else")
_OBJECT: Final = frozenset(
    {
        *("properties", "patternProperties", "additionalProperties", "required"),
        *("minProperties", "maxProperties"),
    }
)
_COMBINING: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", "not", "const", "enum"})
_ANNOTATIONS: Final = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
        *("writeOnly", "$comment", "contentMediaType", "contentEncoding", "x-guidance"),
    }
)
_FORMATS: Final = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    }
)
"""The formats that the compiler enforces; any other is an annotation."""
_LARGEST: Final = 10**15
_LARGEST_INTEGER: Final = 9 * 10**18
_SMALLEST: Final = 1e-10
"""The bounds of numbers that a schema leaves open: without them digits could go on for ever.

Integers have nearly those of 64 bits, as ids and times in nanoseconds need them.
"""
_NARROW: Final = 1e-6
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ANY: Final = "kvrelay-any-value"
"""The name of a definition that is added, which no client has."""

_MOST_TRIALS: Final = 200
_DEFINITIONS: Final = ("$schema", "$defs", "definitions")


def enforced(schema: str) -> str:
    """A schema in the form that the compiler enforces.

    Unknown formats and the compiler's own options are annotations. An object with `properties` is
    closed, unless it says otherwise or is only a part of one. Numbers have a bounded number of
    digits.

    Raises:
        ValueError: it is no JSON, or no schema.
        RecursionError: it is nested too deeply.
    """
    root = json.loads(schema)
    if root is True:
        root = {}
    if not isinstance(root, dict):
        raise ValueError("expected an object")
    schemas = list(_all(root))
    parts = _parts(schemas, root)
    has_any = False
    numbers: dict[str, str] = {}
    can_refer = not any("$id" in one for one in schemas if one is not root)
    for one in schemas:
        _read_annotations(one)
        if id(one) in parts:
            continue
        _close(one)
        _bound_numbers(one)
        if can_refer:
            _share_number(one, numbers)
            has_any |= _name_any(one)
    if can_refer and not (root.keys() - _ANNOTATIONS - {"$defs", "definitions", "$schema", "$id"}):
        root["$ref"] = f"#/$defs/{_ANY}"
        has_any = True
    if numbers:
        shared = {name: json.loads(number) for number, name in numbers.items()}
        root["$defs"] = {**root.get("$defs", {}), **shared}
    if has_any:
        root["$defs"] = {**root.get("$defs", {}), _ANY: _any_value()}
    return json.dumps(root, ensure_ascii=False)


def without_annotations(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of a schema without texts that are for people and models alone.

    Raises:
        RecursionError: it is nested too deeply.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for one in list(_all(copy)):
        for name in _ANNOTATIONS & one.keys():
            del one[name]
    return copy


def refer_below(schema: dict[str, Any], place: str) -> None:
    """Change the references of a schema to where they lead once it lies at `place` in another.

    Every schema in it that has an `$id` loses it: references lead there by their place.

    Args:
        schema: the schema, a root until now; it is changed.
        place: a JSON pointer into the other one.
    """
    found: dict[int, tuple[dict[str, Any], str]] = {}
    """The schemas, each with the URI that its references begin from."""
    resources: dict[str, tuple[dict[str, Any], str]] = {}
    """The schemas that a URI names, each with its place."""
    awaited: dict[str, list[str]] = {}
    """The pointers of references to a URI whose schema is not found yet."""
    waiting: list[tuple[Any, str, str]] = [(schema, "", place)]

    def follow(uri: str, pointer: str) -> None:
        resource, where = resources[uri]
        waiting.append((_at(resource, pointer), uri, where + pointer))

    while waiting:
        for one, base in _find(*waiting.pop(), found, resources):
            for pointer in awaited.pop(base, ()):
                follow(base, pointer)
            uri, pointer = _resolved(base, one.get("$ref"))
            if pointer.startswith("/") and uri in resources:
                follow(uri, pointer)
            elif pointer.startswith("/"):
                awaited.setdefault(uri, []).append(pointer)
    for one, base in found.values():
        if isinstance(one.get("$anchor"), str):  # another schema there may have the same
            one["$anchor"] += _suffix(resources[base][1])
        uri, pointer = _resolved(base, one.get("$ref"))
        if isinstance(one.get("$ref"), str) and uri in resources:
            where = resources[uri][1]
            is_anchor = pointer and not pointer.startswith("/")
            one["$ref"] = f"#{pointer}{_suffix(where)}" if is_anchor else f"#{where}{pointer}"
    for one, _ in found.values():
        one.pop("$id", None)


def _find(
    root: dict[str, Any],
    base: str,
    place: str,
    found: dict[int, tuple[dict[str, Any], str]],
    resources: dict[str, tuple[dict[str, Any], str]],
) -> list[tuple[dict[str, Any], str]]:
    """Find a schema and all inside it, for `refer_below`; return those that are new."""
    new: list[tuple[dict[str, Any], str]] = []
    waiting: list[tuple[Any, str, str]] = [(root, base, place)]
    while waiting:
        one, base, place = waiting.pop()
        if not isinstance(one, dict) or id(one) in found:
            continue
        base, _ = _resolved(base, one.get("$id"))
        resources.setdefault(base, (one, place))
        found[id(one)] = one, base
        new.append((one, base))
        for steps, inner in steps_in(one):
            waiting.append((inner, base, "/".join([place, *map(_escaped, steps)])))
    return new


def _suffix(place: str) -> str:
    return re.sub(r"\W", "-", place)


def _resolved(base: str, reference: Any) -> tuple[str, str]:
    """The URI and the fragment that a reference means in a schema of the URI `base`."""
    uri, _, fragment = reference.partition("#") if isinstance(reference, str) else ("", "", "")
    with contextlib.suppress(ValueError):  # it is no URI, and names something all the same
        return urljoin(base, uri) if uri else base, fragment
    return uri, fragment


def steps_in(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the schemas directly inside one, each with the steps that lead to it."""
    for name in OF_NAMES:
        members = schema.get(name)
        if isinstance(members, dict):
            yield from (((name, key), one) for key, one in members.items())
    for name in OF_LISTS:
        members = schema.get(name)
        if isinstance(members, list):
            yield from (((name, str(number)), one) for number, one in enumerate(members))
    for name in SINGLE:
        if name in schema:
            yield (name,), schema[name]


def _all(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema, all inside it, and those elsewhere in it that references lead to."""
    waiting, seen = [root], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        found = [*(inner for _, inner in steps_in(one)), _target(one, root)]
        waiting += [inner for inner in found if isinstance(inner, dict)]


def _parts(schemas: list[dict[str, Any]], root: dict[str, Any]) -> set[int]:
    """The ids of schemas that are parts of a value's schema: another one holds beside each.

    What such a schema does not name, the other may name. So it is left as it is.
    """
    waiting = []
    for one in schemas:
        conditions = len(one.get("allOf") or ()) + sum(
            name in one for name in ("anyOf", "oneOf", "$ref")
        )
        if conditions + bool(_OBJECT & one.keys()) > 1 or "if" in one or "not" in one:
            waiting.append(one)
    found: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in found:
            continue
        found.add(id(one))
        inner = [part for name in ("allOf", "anyOf", "oneOf") for part in one.get(name) or ()]
        inner += [one.get(name) for name in ("if", "then", "else", "not")]
        inner.append(_target(one, root))
        waiting += [part for part in inner if isinstance(part, dict)]
    return found


def _target(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """The schema that one refers to; None: none that is known here."""
    if not isinstance(schema.get("$ref"), str):
        return None
    base, _ = _resolved("", root.get("$id"))
    uri, pointer = _resolved(base, schema["$ref"])
    return _at(root, pointer) if uri == base and (pointer + "/").startswith("/") else None


def _at(schema: dict[str, Any], pointer: str) -> Any:
    """The part of a schema at a JSON pointer; None: there is none."""
    found: Any = schema
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict):
            found = found.get(name)
        else:
            return None
    return found


def _read_annotations(schema: dict[str, Any]) -> None:
    """Remove what is no condition, and read the classes of patterns as ASCII."""
    schema.pop("x-guidance", None)
    if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
        del schema["format"]
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = ascii_classes(schema["pattern"])


def _close(schema: dict[str, Any]) -> None:
    """Let an object have no members but those that its schema names."""
    named = schema.get("properties")
    if not isinstance(named, dict) or _COMBINING & schema.keys():
        return
    if "additionalProperties" in schema or "unevaluatedProperties" in schema:
        return
    required, least = schema.get("required", ()), schema.get("minProperties", 0)
    if isinstance(required, list) and any(name not in named for name in required):
        return
    if least == 0 or (isinstance(least, int) and least <= len(named)):
        schema["additionalProperties"] = False


def _allows(schema: dict[str, Any], *types: str) -> bool:
    """Whether a schema names one of these types."""
    named = schema.get("type")
    return named in types if isinstance(named, str) else bool(set(named or ()) & set(types))


def _bound_numbers(schema: dict[str, Any]) -> None:
    """Bound the digits of a number that has none of the bounds."""
    if not _allows(schema, "number", "integer") or _COMBINING & schema.keys():
        return
    largest = _LARGEST if _allows(schema, "number") else _LARGEST_INTEGER
    lower = _number(schema, "minimum", "exclusiveMinimum")
    upper = _number(schema, "maximum", "exclusiveMaximum")
    if upper is None and "maximum" not in schema and (lower is None or lower < largest):
        upper = schema["maximum"] = largest
    if lower is None and "minimum" not in schema and (upper is None or upper > -largest):
        lower = schema["minimum"] = -largest
    is_wide = lower is not None and upper is not None and upper - lower > _NARROW
    if is_wide and _allows(schema, "number") and "multipleOf" not in schema:
        schema["multipleOf"] = _SMALLEST


def _share_number(schema: dict[str, Any], shared: dict[str, str]) -> None:
    """Refer to a definition of a number that may stand elsewhere, too, and is compiled once.

    Args:
        schema: changed if it says nothing but a number.
        shared: the names of definitions by these, in JSON; gets new ones.
    """
    number = {name: schema[name] for name in ("type", *_BOUNDS) if name in schema}
    if schema.get("type") not in ("integer", "number"):
        return
    if schema.keys() - _ANNOTATIONS - number.keys():
        return
    name = shared.setdefault(json.dumps(number, sort_keys=True), f"kvrelay-number-{len(shared)}")
    for one in number:
        del schema[one]
    schema["$ref"] = f"#/$defs/{name}"


def _number(schema: dict[str, Any], *names: str) -> float | None:
    found = [schema[name] for name in names if type(schema.get(name)) in (int, float)]
    return found[0] if found else None


def _name_any(schema: dict[str, Any]) -> bool:
    """Refer to a value of any type where a schema allows one; return whether it does."""
    if _COMBINING & schema.keys() - {"anyOf", "oneOf"}:
        return False
    to_any, used = {"$ref": f"#/$defs/{_ANY}"}, False
    for steps, inner in list(steps_in(schema)):
        if inner is not True and not (isinstance(inner, dict) and not inner.keys() - _ANNOTATIONS):
            continue
        if len(steps) == 1:
            schema[steps[0]], used = to_any, True
        elif isinstance(schema[steps[0]], dict):
            schema[steps[0]][steps[1]], used = to_any, True
    if _allows(schema, "object") and "additionalProperties" not in schema:
        schema["additionalProperties"], used = to_any, True
    if _allows(schema, "array") and "items" not in schema:
        schema["items"], used = to_any, True
    return used


def _any_value() -> dict[str, Any]:
    """The schema of a value of any type."""
    itself = {"$ref": f"#/$defs/{_ANY}"}
    number: dict[str, Any] = {"type": "number"}
    _bound_numbers(number)
    others: list[dict[str, Any]] = [{"type": name} for name in ("null", "boolean", "string")]
    return {
        "anyOf": [
            *others,
            number,
            {"type": "array", "items": itself},
            {"type": "object", "additionalProperties": itself},
        ]
    }


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

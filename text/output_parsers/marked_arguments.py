"""Arguments that are texts between tags, each behind its name, and their values in JSON.

A string stands as it is, and any other value as JSON: which it is, the tool's schema says.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kvrelay.text.output_parsers.call_blocks import Reader, Reading, Source, ToldCalls
from kvrelay.text.output_parsers.held_text import is_long
from kvrelay.text.output_parsers.json_calls import is_json
from kvrelay.text.output_parsers.json_readers import end_call

Schema: TypeAlias = Mapping[str, Any]
Schemas: TypeAlias = Mapping[str, Schema]
"""The schema of each function's arguments, by the function's name."""
_TYPES: Final = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_NAME: Final = re.compile(r"[^\s<>{}\"]+")
MOST_DEPTH: Final = 32
"""The most references, or schemas within schemas, that are followed to a value's types."""
_MOST_REFERENCE: Final = 1024
"""The most characters of a reference that is followed."""
_MOST_LITERAL: Final = 16 << 10
"""The most characters of a value that is read as one of Python's."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The tags around the arguments of a call."""

    call_end: str
    argument: str
    """It begins an argument, and its name follows."""
    key_end: str
    value: str
    """It begins the value behind the name's end; empty: the value follows at once."""
    value_end: str
    is_padded: bool = False
    """Whether a value stands between line breaks that are none of it."""
    call: str = ""
    """It begins a call, and the function's name follows; empty: that follows the block's tag."""
    name_end: str = ""
    read_key: Callable[[str], tuple[str, bool | None]] = lambda text: (text.strip(), None)
    """The name in the text up to `key_end`, and whether the value is a string, if it is told."""


def marked_blocks(marks: Marks, block_end: str, schemas: Schemas) -> Reader:
    """Return a reader of blocks of calls, each with arguments between tags."""

    known = types_by_function(schemas)

    def read(source: Source, calls: ToldCalls) -> Reading:
        is_open = source.taken.endswith(marks.call)  # a model may leave the block's tag out
        has_calls = False
        while is_open or (yield from source.skip(marks.call)):
            name, tag = yield from source.until(marks.name_end)
            if not tag or not _NAME.fullmatch(name.strip()):
                return False
            calls.begin(name.strip())
            types = known(name.strip())
            if not (yield from read_marked_arguments(source, calls, marks, types, block_end)):
                return False
            is_open, has_calls = False, True
        if has_calls:
            yield from source.close(block_end)
        return has_calls

    return read


def read_marked_arguments(
    source: Source,
    calls: ToldCalls,
    marks: Marks,
    known: ValueTypes,
    block_end: str = "",
    *,
    is_open: bool = False,
) -> Generator[None, None, bool]:
    """Read the arguments of a call that was begun, and its end; return whether it is whole.

    A model that ends by itself may leave out the end.

    Args:
        source: the text.
        calls: the calls so far.
        marks: the tags.
        known: the types of the arguments.
        block_end: the block's closing tag, which is not taken; empty: it is the call's.
        is_open: the first argument's tag was taken already.
    """
    seen: set[str] = set()
    ends = [marks.call_end, *filter(None, [block_end])]
    while True:
        if not is_open:
            _, tag = yield from source.until(marks.argument, *ends)
            if tag != marks.argument:
                if not tag and (source.is_cut or not source.has_ended):
                    return False
                if tag and tag == block_end:
                    source.give_back(tag)
                calls.add("}" if seen else "")
                return end_call(source, calls)
        is_open = False
        text, tag = yield from source.until(marks.key_end)
        if not tag or (marks.value and not (yield from source.skip(marks.value))):
            return False
        key, is_string = marks.read_key(text)
        types = known.of_argument(key)
        if is_string is not None:
            types = frozenset({"string"}) if is_string else types - {"string"} or _TYPES
        value = _Value(types, calls.add, "{" if not seen else ", ", key, is_padded=marks.is_padded)
        if key in seen:  # what was told first stays
            value = _Value(types, lambda _: None, "", key, is_padded=marks.is_padded)
        seen.add(key)
        if not (yield from _read_value(source, marks, value, [marks.argument, *ends])):
            return False


def _read_value(
    source: Source, marks: Marks, value: _Value, behind: Sequence[str]
) -> Generator[None, None, bool]:
    """Read a value up to its end tag, which another argument or an end must follow.

    So a value may have its own end tag in it. Where values stand between line breaks, a model may
    leave the end tag out: then a line that begins with one of the tags `behind` ends the value.
    """
    end = marks.value_end
    others = [f"\n{one}" for one in behind] if marks.is_padded else []
    while True:
        text, tag = yield from source.until(end, *others, most=0)
        value.add(text)
        if tag in others:
            source.give_back(tag)
            value.end()
            return True
        if tag:
            if (yield from _follows(source, behind)):
                value.end()
                return True
            value.add(end)
        elif source.has_ended:
            return False


def _follows(source: Source, tags: Sequence[str]) -> Generator[None, None, bool]:
    """Tell whether one of some tags follows, or nothing more; take nothing.

    White space before it is short, since all of it is looked at again with each new token.
    """
    while True:
        bare = source.text.lstrip()
        if is_long(len(source.text) - len(bare)):
            return False
        if any(bare.startswith(tag) for tag in tags):
            return True
        if source.has_ended:
            return not bare
        if not any(tag.startswith(bare) for tag in tags):
            return False
        yield


class _Value:
    """The value of an argument, told in JSON: a string while it comes, any other at its end.

    Args:
        types: the types that it may have.
        tell: takes JSON.
        before: the JSON before the argument.
        key: the argument's name.
        is_padded: whether it stands between line breaks that are none of it.
    """

    def __init__(
        self,
        types: frozenset[str],
        tell: Callable[[str], object],
        before: str,
        key: str,
        *,
        is_padded: bool,
    ) -> None:
        self._types = types
        self._tell = tell
        self._before = f"{before}{_json(key)}: "
        self._is_padded = is_padded
        self._has_begun = False
        self._parts: list[str] | None = None if types == {"string"} else []
        self._break = ""
        """The line break at the end, which is none of the value if nothing follows."""

    def add(self, text: str) -> None:
        """Add some more text."""
        if not text:
            return
        if self._is_padded and not self._has_begun:
            text = text.removeprefix("\n")
        self._begin()
        if self._parts is not None:
            self._parts.append(text)
            return
        text, self._break = self._break + text, ""
        if self._is_padded and text.endswith("\n"):
            text, self._break = text[:-1], "\n"
        self._tell(_json(text)[1:-1])

    def end(self) -> None:
        """End it."""
        self._begin()
        if self._parts is None:
            self._tell('"')
            return
        text = "".join(self._parts)
        self._tell(_as_json(text.removesuffix("\n") if self._is_padded else text, self._types))

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._tell(self._before + ('"' if self._parts is None else ""))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _as_json(text: str, types: frozenset[str]) -> str:
    """A value that is no plain string, in JSON: as JSON or Python writes it, else a string."""
    try:
        if is_json(text):
            value = json.loads(text)
        else:
            value = ast.literal_eval(text.strip() if len(text) <= _MOST_LITERAL else "?")
        written = _json(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return _json(text)
    fits = bool(_types_of_value(value) & types)
    return written if fits or "string" not in types else _json(text)


def _types_of_value(value: Any) -> frozenset[str]:
    """The types of JSON schemas that a value has, but for a string that its quotes may be of."""
    for kind, names in _OF_VALUES:
        if type(value) is kind:
            return names
    return frozenset()


_OF_VALUES: Final = (
    (bool, frozenset({"boolean"})),
    (int, frozenset({"integer", "number"})),
    (float, frozenset({"number"})),
    (type(None), frozenset({"null"})),
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
)


class ValueTypes:
    """The types of values by the parts of a schema, each of which is looked at once.

    Args:
        root: the schema of all arguments, which references lead into.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known: dict[int, frozenset[str]] = {}
        """The types by the id of a part; all, while they are looked for."""

    def of_argument(self, key: str) -> frozenset[str]:
        """The types of an argument."""
        properties = self._root.get("properties")
        return self.of(properties.get(key) if isinstance(properties, Mapping) else None)

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types that a part of the schema allows, as far as it tells."""
        if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
            return _TYPES
        if id(schema) not in self._known:
            self._known[id(schema)] = _TYPES
            self._known[id(schema)] = self._find(schema, depth + 1)
        return self._known[id(schema)]

    def _find(self, schema: Schema, depth: int) -> frozenset[str]:
        types, named = _TYPES, schema.get("type")
        if isinstance(named, str | list):
            names = [named] if isinstance(named, str) else named
            types &= {one for one in names if isinstance(one, str)}
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            types &= frozenset().union(*(_types_of_value(one) or {"string"} for one in values))
        inner = followed(schema, self._root)
        if inner is not None:
            types &= self.of(inner, depth)
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                types &= frozenset().union(*(self.of(one, depth) for one in schema[name]))
        if isinstance(schema.get("allOf"), list):
            for one in schema["allOf"]:
                types &= self.of(one, depth)
        return types or _TYPES


_ANY_TYPES: Final = ValueTypes({})


def types_by_function(schemas: Schemas) -> Callable[[str], ValueTypes]:
    """Return a function that gives the types of a function's arguments, by its name."""
    known = {name: ValueTypes(schema) for name, schema in schemas.items()}
    return lambda name: known.get(name, _ANY_TYPES)


def followed(schema: Schema, root: Schema) -> Any:
    """The schema that a reference within `root` leads to; None: there is no such reference."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    if len(reference) > _MOST_REFERENCE:
        return None
    found: Any = root
    for step in reference.split("/")[1:]:
        if not isinstance(found, Mapping):
            return None
        found = found.get(step.replace("~1", "/").replace("~0", "~"))
    return found

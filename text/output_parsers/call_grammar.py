"""Grammars of outputs that are calls alone, in Lark's form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from kvrelay.text.grammar import MAX_GRAMMAR_BYTES
from kvrelay.text.output_parsers.marked_arguments import (
    MOST_DEPTH,
    Marks,
    Schema,
    Schemas,
    ValueTypes,
    followed,
)

_ARGUMENTS: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
)
"""The keywords of arguments that can be told one by one."""
_OF_TEXT: Final = frozenset({"type", "minLength", "maxLength", "pattern"})
_DEFINITIONS: Final = ("$defs", "definitions")
_KEY: Final = re.compile(r"[^\s<>\"]+")
_ANY_TEXT: Final = r"(.|\n)"
ANY_TEXT: Final = f"/{_ANY_TEXT}*/"
"""Any text, as a part of a grammar."""


_MOST_RULES: Final = 5000


class NoGrammarError(Exception):
    """The tools' schemas cannot be told in a format."""


class CallGrammar:
    """A grammar of calls that is written rule by rule.

    Args:
        schemas: the schemas of the functions that may be called.
        most: the most calls; None: any number.
        special: the ids of the vocabulary's special tokens by their text, which no other token has.
    """

    def __init__(self, schemas: Schemas, most: int | None, special: Mapping[str, int]) -> None:
        self.opening = ""
        """The text that begins calls and comes from elsewhere; empty: it is written here."""
        self._is_opened = False
        """A text was to begin with `opening`: if before `row` is called, each call has its own."""
        self._own_ids: set[int] = set()
        """The special tokens of the format."""
        self.schemas = schemas
        self._most = most
        self._special = special
        parts = sorted(special, key=len, reverse=True)
        self._parts = re.compile("|".join(map(re.escape, parts))) if parts else None
        self._rules: list[str] = []
        self._num_written = 0
        """The characters of values and fixed texts: many arguments may refer to one schema."""
        self._num_looked_at = 0
        """The schemas of arguments that were looked at."""
        self._types: dict[int, ValueTypes] = {}
        self._shared_lengths: dict[int, int] = {}
        """The length of each root's definitions in JSON; both are by the root's id."""

    def text(self, text: str) -> str:
        """A fixed text of the format."""
        if self.opening and text.startswith(self.opening):
            self._is_opened = True
            text = text.removeprefix(self.opening)
        return self._fixed(text)

    def _fixed(self, text: str) -> str:
        """A fixed text, whose special tokens are these."""
        self._count(len(text))
        parts, end = [], 0
        for found in self._parts.finditer(text) if self._parts is not None else ():
            self._own_ids.add(self._special[found[0]])
            parts += [_quoted(text[end : found.start()]), f"<[{self._special[found[0]]}]>"]
            end = found.end()
        return " ".join([part for part in (*parts, _quoted(text[end:])) if part])

    def json(self, schema: Schema) -> str:
        """A value by a schema, in JSON."""
        written = json.dumps(schema, ensure_ascii=False)
        self._count(len(written))
        return self._rule(f"%json {written}")

    def one_of(self, alternatives: Iterable[str]) -> str:
        """One of some alternatives."""
        return self._rule(" | ".join(alternatives))

    def each(self, call: Callable[[str, Schema], str]) -> str:
        """A call of one of the functions, each written by `call` from its name and schema."""
        return self.one_of([call(name, schema) for name, schema in self.schemas.items()])

    def in_text(self, calls: Callable[[CallGrammar], str], openings: Iterable[str]) -> str:
        """The whole grammar of any text with calls in it, from their opening on.

        The text may have all special tokens but the format's. Where one call is the most, it ends
        the text.

        Args:
            calls: writes the calls behind an opening.
            openings: the texts that begin calls.
        """
        each = []
        for opening in openings:
            self.opening, self._is_opened = opening, False
            each.append(self.sequence(self.up_to(ANY_TEXT, opening), calls(self)))
        free = self.free_text()
        held = self.sequence("" if free == ANY_TEXT else free, self.one_of(each))
        return self.lark(f"{held} | {free}" if self._most == 1 else f"({held})* {free}")

    def free_text(self) -> str:
        """Any text, with all special tokens but those of the format, so far as it is written."""
        others = sorted(set(self._special.values()) - self._own_ids)
        return f"(/{_ANY_TEXT}+/ | <[{_ranges(others)}]>)*" if others else ANY_TEXT

    def sequence(self, *parts: str) -> str:
        """One part after the other."""
        return " ".join([part for part in parts if part])

    def row(self, call: str, between: str = "") -> str:
        """One or more calls, with a fixed text between."""
        if self._most == 1 or self._is_opened:
            return call
        return f"{call} ({self.text(between)} {call})*"

    def lark(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules])

    def marked(self, schema: Schema, marks: Marks, between: str = "", key: str = "{}") -> str:
        """Arguments between tags, with a fixed text behind each.

        They come in the order of the schema. If it allows any, they are texts with any name.

        Args:
            schema: the schema of all arguments.
            marks: the tags.
            between: the text between the parts of an argument, and behind it.
            key: the text from `marks.argument` to `marks.key_end`, with the name in it.
        """
        if _allows_any(schema):
            return self._any_arguments(marks, between, key)
        properties, required = _arguments_of(schema)
        padding = "\n" if marks.is_padded else ""
        end = f"{padding}{marks.value_end}"
        parts = []
        for name, described in properties.items():
            if not _KEY.fullmatch(name):
                raise NoGrammarError
            texts, others = self._alternatives(described, schema, end)
            by_key: dict[str, list[str]] = {}
            """The values by the text before them, which may tell whether the value is a string."""
            for is_text, one in [("true", one) for one in texts] + [
                ("false", one) for one in others
            ]:
                by_key.setdefault(key.format(name, is_text), []).append(one)
            written = []
            for named, values in by_key.items():
                behind = between if marks.value else ""
                before = f"{marks.argument}{named}{marks.key_end}{behind}{marks.value}{padding}"
                written.append(self.sequence(self.text(before), self.one_of(values)))
            part = self.sequence(self.one_of(written), self.text(between))
            parts.append(part if name in required else f"({part})?")
        return self.sequence(*parts) or '""'

    def _any_arguments(self, marks: Marks, between: str, key: str) -> str:
        """Any number of texts between tags, with any names."""
        behind = between if marks.value else ""
        padding = "\n" if marks.is_padded else ""
        each = []
        for named in dict.fromkeys(key.format("\0", is_text) for is_text in ("true", "false")):
            head, tail = f"{marks.argument}{named}{marks.key_end}".split("\0")
            before = self.text(f"{tail}{behind}{marks.value}{padding}")
            value = self._text_until(f"{padding}{marks.value_end}")
            each.append(self.sequence(self.text(head), f"/{_KEY.pattern}/", before, value))
        return f"({self.sequence(self.one_of(each), self.text(between))})*"

    def value(self, described: Schema, root: Schema) -> str:
        """A value by a part of a schema, in JSON."""
        shared = {name: root[name] for name in _DEFINITIONS if name in root}
        if id(root) not in self._shared_lengths:
            self._shared_lengths[id(root)] = len(json.dumps(shared, ensure_ascii=False))
        if self._num_written + self._shared_lengths[id(root)] > MAX_GRAMMAR_BYTES:
            raise NoGrammarError
        return self.json({**shared, **described})

    def types_of(self, described: Any, root: Schema) -> frozenset[str]:
        """The types that a part of one of the schemas allows, as far as it tells."""
        return self._types.setdefault(id(root), ValueTypes(root)).of(described)

    def _alternatives(
        self, described: Any, root: Schema, end: str, depth: int = 0
    ) -> tuple[list[str], list[str]]:
        """The texts that a value may be, and its values in JSON, each with its end."""
        self._num_looked_at += 1
        if not isinstance(described, Mapping) or self._num_looked_at > _MOST_RULES:
            raise NoGrammarError
        if depth > MOST_DEPTH:  # they may lead round in circles
            raise NoGrammarError

        def in_json(schema: Schema) -> list[str]:
            return [self.sequence(self.value(schema, root), self.text(end))]

        if "string" not in self.types_of(described, root):
            return [], in_json(described)
        inner = followed(described, root)
        if inner is not None and len(described) == 1:
            return self._alternatives(inner, root, end, depth + 1)
        values = [described["const"]] if "const" in described else described.get("enum")
        if isinstance(values, list) and not described.keys() - {"enum", "const", "type"}:
            others = [one for one in values if not isinstance(one, str)]
            texts = [self._fixed(one + end) for one in values if isinstance(one, str)]
            return texts, in_json({"enum": others}) if others else []
        for name in ("anyOf", "oneOf"):
            if described.keys() == {name} and isinstance(described[name], list):
                each = [self._alternatives(one, root, end, depth + 1) for one in described[name]]
                return [one for texts, _ in each for one in texts], [
                    one for _, others in each for one in others
                ]
        types = described.get("type")
        if not described or (isinstance(types, list) and len(described) == 1):
            rest = [one for one in types or () if one != "string"]
            return [self._text_until(end)], in_json({"type": rest}) if rest else []
        if types != "string" or described.keys() - _OF_TEXT:
            raise NoGrammarError
        return [self._text_until(end, described)], []

    def up_to(self, text: str, end: str) -> str:
        """A text, a regular expression of which is given, up to where another first comes."""
        if self._parts_of(end) != [end]:
            return self.sequence(text, self._fixed(end))
        number = len(self._rules)
        self._rules.append(f"lazy_{number}[lazy]: {text} {_quoted(end)}")
        return f"lazy_{number}"

    def _text_until(self, end: str, bounds: Mapping[str, Any] | None = None) -> str:
        """A text within the bounds of a string's schema, and its end, which it does not have."""
        bounds = bounds or {}
        lengths = (bounds[name] for name in ("minLength", "maxLength") if name in bounds)
        if any(type(one) is not int for one in lengths):
            raise NoGrammarError
        if not isinstance(bounds.get("pattern", ""), str):
            raise NoGrammarError
        least, most = bounds.get("minLength", 0), bounds.get("maxLength", "")
        conditions = [f"/{_ANY_TEXT}{{{least},{most}}}/"]
        if "pattern" in bounds:
            conditions.append(_searched(bounds["pattern"]))
            self._count(len(conditions[-1]))
        number = len(self._rules)
        is_special = self._parts_of(end) != [end]
        self._rules.append(f"TEXT_{number}: {' & '.join(conditions)}")
        if is_special:
            return f"TEXT_{number} {self.text(end)}"
        self._rules.append(f"until_{number}[suffix={json.dumps(end)}]: TEXT_{number}")
        return f"until_{number}"

    def _parts_of(self, text: str) -> list[str]:
        return self._parts.split(text) if self._parts is not None else [text]

    def _count(self, characters: int) -> None:
        self._num_written += characters
        if self._num_written > MAX_GRAMMAR_BYTES:
            raise NoGrammarError

    def _rule(self, body: str) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name


def _allows_any(schema: Schema) -> bool:
    """Whether a schema allows arguments of any name."""
    return not schema.keys() - {"type", "$schema"}


def _arguments_of(schema: Schema) -> tuple[Mapping[str, Any], Collection[str]]:
    """The schemas of arguments that can be told one by one, and the names of those that must be."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if _allows_any(schema) or schema.keys() - _ARGUMENTS or schema.get("additionalProperties"):
        raise NoGrammarError
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise NoGrammarError
    if not all(isinstance(one, str) and one in properties for one in required):
        raise NoGrammarError
    return properties, required


def simple_arguments(
    grammar: CallGrammar, schema: Schema, argument: Callable[[str, Any], str], between: str
) -> str:
    """Arguments in the order of their schema, each written by `argument`, with a text between."""
    properties, required = _arguments_of(schema)
    first = behind = '""'
    for name, described in reversed(list(properties.items())):
        written = argument(name, described)
        one = grammar.sequence(written, behind)
        other = grammar.sequence(grammar.text(between), written, behind)
        if name in required:
            first, behind = grammar.one_of([one]), grammar.one_of([other])
        else:
            first, behind = grammar.one_of([one, first]), grammar.one_of([other, behind])
    return first


def call_object(
    grammar: CallGrammar, before: str = "", behind: str = "", key: str = "arguments"
) -> str:
    """A call as a JSON object with the name and the arguments, between fixed texts."""

    def call(name: str, schema: Schema) -> str:
        named = f'{{"name": {json.dumps(name)}, "{key}": '
        return grammar.sequence(
            grammar.text(before + named), grammar.json(schema), grammar.text("}" + behind)
        )

    return grammar.each(call)


def invocation(grammar: CallGrammar, marks: Marks, key: str = "{}") -> str:
    """A call with its arguments between tags, each on a line of its own."""

    def call(name: str, schema: Schema) -> str:
        return grammar.sequence(
            grammar.text(f"{marks.call}{name}{marks.name_end}\n"),
            grammar.marked(schema, marks, "\n", key),
            grammar.text(f"{marks.call_end}\n"),
        )

    return grammar.each(call)


def _ranges(ids: Iterable[int]) -> str:
    """Rising numbers, those that follow each other as a range."""
    found: list[list[int]] = []
    for one in ids:
        if found and found[-1][1] == one - 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in found)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _searched(pattern: str) -> str:
    """A regular expression that finds a pattern anywhere in a text."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    bare = pattern[begins : len(pattern) - ends]
    if "|" in bare and (begins or ends):
        raise NoGrammarError  # the anchor may be one alternative's alone
    bare = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", bare, flags=re.DOTALL)
    before, behind = "" if begins else f"{_ANY_TEXT}*", "" if ends else f"{_ANY_TEXT}*"
    return f"/{before}(?:{bare}){behind}/"

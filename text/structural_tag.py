"""Structural tags: text in which some tags are followed by what a schema allows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvrelay.text.output_parsers.call_grammar import ANY_TEXT, CallGrammar


class StructuralTagError(Exception):
    """A structural tag cannot be served; the message is one line."""


def structural_tag_grammar(described: Any, special: Mapping[str, int]) -> str:
    """The grammar of a structural tag, in Lark's form.

    Args:
        described: the tag, in vLLM's older form (`structures`, `triggers`) or in that of xgrammar
            (`format`, of the type `triggered_tags`).
        special: the ids of the vocabulary's special tokens by their text.

    Raises:
        StructuralTagError: it is no such tag, or of a type that is not served.
    """
    wanted = _members(described, "a structural tag")
    form, grammar = wanted.get("format"), CallGrammar({}, None, special)
    if form is None:
        tags = [
            {**_members(one, "structures"), "content": {"type": "json_schema", **_schema_of(one)}}
            for one in _list(wanted, "structures")
        ]
        return _lark(grammar, _list(wanted, "triggers"), tags)
    form = _members(form, "format")
    if form.get("type") != "triggered_tags":
        raise StructuralTagError("format.type must be triggered_tags")
    return _lark(
        grammar,
        _list(form, "triggers"),
        _list(form, "tags"),
        at_least_one=bool(form.get("at_least_one")),
        stop_after_first=bool(form.get("stop_after_first")),
    )


def _schema_of(structure: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"json_schema": structure.get("schema", structure.get("json_schema", {}))}


def _lark(
    grammar: CallGrammar,
    triggers: Sequence[Any],
    tags: Sequence[Any],
    *,
    at_least_one: bool = False,
    stop_after_first: bool = False,
) -> str:
    rests: dict[str, list[str]] = {}
    for tag in tags:
        begin, end = _text(_members(tag, "tags"), "begin"), _text(tag, "end")
        fitting = [one for one in triggers if isinstance(one, str) and begin.startswith(one)]
        trigger = next(filter(None, fitting), None)
        if trigger is None:
            raise StructuralTagError(f"no trigger begins {json.dumps(begin[:64])}")
        content = _content(grammar, _members(tag.get("content"), "content"))
        rest = grammar.sequence(grammar.text(begin[len(trigger) :]), content, grammar.text(end))
        rests.setdefault(trigger, []).append(rest)
    if not rests:
        raise StructuralTagError("must have tags")
    tagged = grammar.one_of(_triggered(grammar, rests))
    if stop_after_first:
        return grammar.lark(tagged if at_least_one else f"{tagged} | {ANY_TEXT}")
    return grammar.lark(f"{tagged}{'+' if at_least_one else '*'} {ANY_TEXT}")


def _triggered(grammar: CallGrammar, rests: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield, for each trigger, text up to it and one of its rests."""
    for trigger, each in rests.items():
        before = grammar.up_to(ANY_TEXT, trigger)
        yield grammar.sequence(before, grammar.one_of(each))


def _content(grammar: CallGrammar, content: Mapping[str, Any]) -> str:
    match content.get("type"):
        case "json_schema":
            schema = content.get("json_schema", {})
            return grammar.json(_members(json.loads(schema) if isinstance(schema, str) else schema))
        case "const_string":
            return grammar.text(_text(content, "value"))
    raise StructuralTagError("content.type must be json_schema or const_string")


def _members(given: Any, place: str = "json_schema") -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise StructuralTagError(f"{place} must be an object")
    return given


def _list(given: Mapping[str, Any], name: str) -> Sequence[Any]:
    members = given.get(name)
    if not isinstance(members, list):
        raise StructuralTagError(f"{name} must be a list")
    return members


def _text(given: Mapping[str, Any], name: str) -> str:
    text = given.get(name)
    if not isinstance(text, str):
        raise StructuralTagError(f"{name} must be a text")
    return text

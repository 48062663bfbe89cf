"""Forms mean what clients mean by them: annotations, closed objects, numbers that end, ASCII."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from kvrelay.text import json_schema
from kvrelay.text.grammar import GrammarCompiler, GrammarError
from kvrelay.wire.submit import StructuredOutput
from tests.vocabularies import byte_vocabulary

COMPILER = GrammarCompiler(byte_vocabulary)
LONG = "3" * 60


def begun(wanted: StructuredOutput) -> LLMatcher:
    return COMPILER.compile(wanted).deep_copy()


def is_taken(wanted: StructuredOutput, text: str) -> bool:
    matcher = begun(wanted)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def form(schema: Any) -> StructuredOutput:
    return StructuredOutput(json_schema=json.dumps(schema))


A = {"type": "object", "properties": {"a": {"type": "integer"}}}
EITHER = {"anyOf": [{"properties": {"b": {"type": "null"}}}, {"required": ["a"]}]}
SAID: list[tuple[Any, str, bool]] = [
    # Annotations are no conditions, and no options.
    *(
        ({**A, "x-guidance": {option: value}}, '{"a":1}', True)
        for option, value in [("key_separator", " = "), ("coerce_one_of", True), ("no", 1)]
    ),
    ({**A, "x-guidance": {"key_separator": " = "}}, '{"a" = 1}', False),
    ({"items": {"x-guidance": {"lenient": True}, "type": "null"}, "type": "array"}, "[null]", True),
    ({"type": "object", "properties": {"x-guidance": {}}}, '{"x-guidance":null}', True),
    *(
        ({"type": "string", "format": name}, '"x y"', True)
        for name in ("password", "binary", "byte", "path", "regex", "decimal", "anything")
    ),
    ({"type": "string", "format": "date"}, '"x y"', False),
    ({"type": "array", "uniqueItems": False}, "[1,1]", True),
    *(({"type": "integer"}, str(one), True) for one in (1790000000000000, 2**53 - 1, -(2**62))),
    ({"type": "integer"}, "3" * 20, False),
    ({"type": "number"}, "3" * 16, False),
    (
        {
            "$defs": {"any-value": {"type": "boolean"}},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/any-value"}, "b": {}},
        },
        '{"a":1,"b":1}',
        False,
    ),
    # An object has the members that are named, unless its schema says otherwise.
    (A, '{"a":1,"b":2}', False),
    ({"type": "array", "items": A}, '[{"b":2}]', False),
    ({**A, "additionalProperties": True}, '{"a":1,"b":[2,{"c":null}]}', True),
    ({"type": "object"}, '{"b":2}', True),
    ({"type": "object", "properties": {}}, "{}", True),
    ({"type": "object", "properties": {}}, '{"b":2}', False),
    ({**A, "required": ["b"]}, '{"b":2}', True),
    ({"anyOf": [A, {"type": "null"}]}, '{"b":2}', False),
    ({"allOf": [A, {"properties": {"b": {"type": "null"}}}]}, '{"a":1,"b":null}', True),
    ({**A, **EITHER}, '{"a":1,"b":null}', True),
    ({"$ref": "#/$defs/x", "$defs": {"x": A}}, '{"b":2}', False),
    (
        {
            "allOf": [{"$ref": "#/$defs/x"}, {"properties": {"b": {"type": "null"}}}],
            "$defs": {"x": A},
        },
        '{"a":1,"b":null}',
        True,
    ),
    ({"$ref": "#/components/A", "components": {"A": A}}, '{"a":1}', True),
    ({"$ref": "#/components/A", "components": {"A": A}}, '{"a":1,"b":2}', False),
    # Digits end.
    *(
        (schema, text, is_good)
        for schema in ({}, True, {"title": "x"}, {"type": "number"}, {"type": ["number", "null"]})
        for text, is_good in [("-1.5", True), (LONG, False), ("0." + LONG, False)]
    ),
    ({"type": "integer"}, "123456789012345", True),
    ({"type": "integer"}, LONG, False),
    ({"type": "integer", "maximum": 10**17}, "1" + "0" * 17, True),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.25", True),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, f"0.{LONG}", False),
    ({"type": "array"}, f"[{LONG}]", False),
    ({"type": "object"}, f'{{"a":{LONG}}}', False),
    ({"type": "array", "items": {"type": "number"}}, f"[0.{LONG}]", False),
    ({}, '{"a":[1,"b",null,{"c":true}]}', True),
    # Digits and letters are ASCII.
    ({"type": "string", "pattern": r"^\d\w\s$"}, '"1a "', True),
    ({"type": "string", "pattern": r"^\d$"}, '"٣"', False),
]  # fmt: skip


def test_a_schema_means_what_clients_mean() -> None:
    for schema, text, is_good in SAID:
        assert is_taken(form(schema), text) is is_good, (schema, text)


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput(regex=r"\d[\w.]\s[^\D]"),
        StructuredOutput(grammar='?start: A\nA: /\\d[\\w.]\\s[^\\D]/'),
        StructuredOutput(grammar='// "a" /\\d/\nstart: B A\nB: /\\d/\nA: /[\\w.]\\s[^\\D]/'),
    ],
)  # fmt: skip
def test_classes_of_a_regular_expression_are_ascii(wanted: StructuredOutput) -> None:
    assert is_taken(wanted, "1. 2")
    for text in ("٣. 2", "1é 2", "1.\u20032", "1. ٣"):
        assert not is_taken(wanted, text)


@pytest.mark.parametrize("begin", ["?start: ", "!start: ", "start: "])
def test_a_grammar_in_larks_form_is_known(begin: str) -> None:
    assert is_taken(StructuredOutput(grammar=f'{begin}x\n?x: "a" | "b"\n'), "b")


def test_a_schema_within_a_grammar_is_read_like_any_other() -> None:
    schema = '{"x-guid\\u0061nce": {"lenient": true}, "type": "array", "uniqueItems": true}'
    with pytest.raises(GrammarError, match="uniqueItems"):
        begun(StructuredOutput(grammar=f"start: %json {schema}"))
    wanted = StructuredOutput(grammar=f'start: "<" %json {json.dumps(A)} ">"')
    assert is_taken(wanted, '<{"a":1}>')
    assert not is_taken(wanted, '<{"b":1}>')


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": [1]},
        {"type": "object", "$defs": 1},
        {"allOf": 3},
        {"type": [{}], "anyOf": [1]},
        {"properties": [], "required": 1, "items": [3]},
        {"$ref": "#/allOf/x/y", "allOf": [[]]},
        {"minimum": "a", "type": "number"},
    ],
)
def test_a_schema_that_is_none_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError):
        begun(form(schema))


BRANCHES = [
    {
        "type": "object",
        "properties": {"kind": {"const": kind}, "value": {"type": value}},
        "required": ["kind", "value"],
    }
    for kind, value in (("a", "null"), ("b", "boolean"))
]
REPORTED: list[tuple[str, Any, str, str]] = [
    ("xgrammar#863", {"type": "string", "pattern": "^[^\n\r]{1,129}$"}, '"x y"', '""'),
    ("xgrammar#863", {"type": "string", "pattern": "^[^\n\r]{1,2000}$"}, '"x"', f'"{"x" * 2001}"'),
    ("xgrammar#863", {"type": "string", "maxLength": 1_000_000}, '"x"', "1"),
    ("xgrammar#863", {"enum": [f"name {number}" for number in range(4000)]}, '"name 3999"', '"n"'),
    (
        "livekit/agents#5324",
        {"oneOf": BRANCHES},
        '{"kind":"a","value":null}',
        '{"kind":"b","value":null}',
    ),
    ("club-3090#57", {"type": ["object", "null"], "properties": {"a": {}}}, "null", "[]"),
    ("club-3090#57", {"anyOf": [{"type": "array", "items": False}, {"const": 1}]}, "[]", "[1]"),
]


@pytest.mark.parametrize(("report", "schema", "good", "bad"), REPORTED)
def test_schemas_of_public_reports(report: str, schema: Any, good: str, bad: str) -> None:
    """Forms of other servers' users that came out right stay right."""
    assert is_taken(form(schema), good), report
    assert not is_taken(form(schema), bad), report


MESSAGES = [
    (StructuredOutput(regex=r"[^\s\S]"), "allows no output"),
    (form({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}), "use anyOf"),
    (form(False), "is no JSON schema"),
]


@pytest.mark.parametrize(("wanted", "words"), MESSAGES)
def test_a_refusal_says_what_to_do(wanted: StructuredOutput, words: str) -> None:
    with pytest.raises(GrammarError, match=words) as caught:
        begun(wanted)
    assert "non-verbose" not in str(caught.value)
    assert "coerce" not in str(caught.value)


@pytest.mark.parametrize(
    "number", [{"type": "integer"}, {"type": "number"}, {"type": "integer", "minimum": 0}], ids=str
)
def test_many_numbers_are_compiled_once(number: dict[str, Any]) -> None:
    inner = {"properties": {f"b{one}": {**number, "description": "d"} for one in range(20)}}
    outer = {"properties": {f"a{one}": {"type": "object", **inner} for one in range(60)}}
    wanted = form({"type": "object", **outer})
    assert is_taken(wanted, '{"a3":{"b7":17}}')
    assert not is_taken(wanted, '{"a3":{"b7":"x"}}')


def test_a_chain_of_references_is_followed_link_by_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through places that hold no schemas of their own: the time would grow by the square."""
    links = [{"$ref": f"#/x/{number + 1}"} for number in range(1000)]
    schema = {"properties": {"a": {"$ref": "#/x/0"}}, "x": [*links, {"type": "integer"}]}
    asked: list[str] = []
    resolved = json_schema._resolved
    monkeypatch.setattr(
        json_schema,
        "_resolved",
        lambda base, reference: asked.append(base) or resolved(base, reference),  # type: ignore[func-returns-value]
    )
    json_schema.refer_below(schema, "/$defs/0")
    assert [one["$ref"] for one in links] == [f"#/$defs/0/x/{n + 1}" for n in range(1000)]
    assert len(asked) < 5 * len(links)

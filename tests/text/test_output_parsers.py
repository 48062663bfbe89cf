"""Outputs are taken apart alike however they are cut."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from random import Random

import pytest

from kvrelay.text.grammar import GrammarCompiler
from kvrelay.text.output_parsers import held_text
from kvrelay.text.output_parsers.formats import form_or_calls, format_of
from kvrelay.text.output_parsers.pieces import OutputParser, OutputPiece
from kvrelay.text.output_parsers.plain import CallsAloneParser, NamedCallParser
from kvrelay.text.output_parsers.pythonic import PythonicParser
from kvrelay.text.output_parsers.reasoning import ReasoningParser
from kvrelay.text.output_parsers.tool_format import ToolFormat
from kvrelay.text.output_parsers.tool_formats.hermes import HERMES
from kvrelay.text.output_parsers.tool_formats.llama3_json import LLAMA3_JSON
from kvrelay.text.output_parsers.tool_formats.llama4_pythonic import PYTHONIC
from kvrelay.wire.submit import StructuredOutput
from tests.vocabularies import byte_vocabulary


def hermes(*, is_whole: bool = False) -> OutputParser:
    return HERMES.parser({}, is_whole)


def llama3_json(*, is_whole: bool = False) -> OutputParser:
    return LLAMA3_JSON.parser({}, is_whole)


Said = tuple[str, str, list[tuple[str, str]]]
"""Content, reasoning, and the name and arguments of each call."""


def merged(pieces: Sequence[OutputPiece]) -> Said:
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.call is None:
            continue
        if piece.name:
            assert piece.call == len(calls), "each call begins once, in order"
            calls.append((piece.name, ""))
        assert piece.call == len(calls) - 1
        calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    content = "".join(piece.content for piece in pieces)
    return content, "".join(piece.reasoning for piece in pieces), calls


def parse(parser: OutputParser, chunks: Sequence[str]) -> Said:
    pieces: list[OutputPiece] = []
    for chunk in chunks:
        pieces += parser.push(chunk)
    pieces += parser.finish()
    return merged(pieces)


def cut(text: str, random: Random) -> list[str]:
    places = sorted(random.choices(range(len(text) + 1), k=random.randint(0, len(text))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


NONE: Said = ("", "", [])
F = ("f", '{"a": [1, "}</tool_call>"], "b": {"c": "\\"é \\\\"}}')
CALL_F = f'{{"name": "f", "arguments": {F[1]}}}'
LONG = " \n" * 600
"""White space that is content, wherever it is."""
MAKE: dict[str, Callable[[], OutputParser]] = {
    "hermes": hermes,
    "json": llama3_json,
    "pythonic": PythonicParser,
    "think": lambda: ReasoningParser(hermes(), begins_inside=False),
    "inside": lambda: ReasoningParser(hermes(), begins_inside=True),
    "named": lambda: NamedCallParser("f"),
}
OUTPUTS: list[tuple[str, str, Said]] = [
    ("hermes", "no call <tool> at all <", ("no call <tool> at all <", "", [])),
    ("hermes", "  ", ("  ", "", [])),
    ("hermes", f"<tool_call>\n{CALL_F}\n</tool_call>", ("", "", [F])),
    (
        "hermes",
        f"I look.\n\n<tool_call>{CALL_F}</tool_call>\n<tool_call>\n"
        '{"arguments": {"x": 1}, "name": "g"}\n</tool_call>\n',
        ("I look.", "", [F, ("g", '{"x": 1}')]),
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> done', (" done", "", [("f", "{}")])),
    ("hermes", "<tool_call>what</tool_call>", ("<tool_call>what</tool_call>", "", [])),
    ("hermes", '<tool_call>{"a": 1}</tool_call>', ('<tool_call>{"a": 1}</tool_call>', "", [])),
    (
        "hermes",
        f"<tool_call>{CALL_F} and more\n<tool_call>{CALL_F}\n<tool_call>{CALL_F}",
        (" and more", "", [F, F, F]),
    ),
    ("hermes", f"<tool_call>{CALL_F}}}</tool_call>", ("}", "", [F])),
    (
        "hermes",
        f"<tool_call>{CALL_F}}} <tool_\n</tool_call>\n<tool_call>{CALL_F}</tool_call></tool_call>",
        ("} <tool_</tool_call>", "", [F, F]),
    ),
    ("hermes", f"<tool_call>{CALL_F}</tool_", ("", "", [F])),
    ("hermes", f"<tool_call>what <tool_call>{CALL_F}", ("<tool_call>what", "", [F])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 1}, "name": 3, "arguments": {"y": 2}}'
        f"</tool_call><tool_call>{CALL_F}</tool_call>",
        ("", "", [("f", '{"x": 1}'), F]),
    ),
    ("json", f"{CALL_F}<|python_tag|>{CALL_F}", ("", "", [F, F])),
    ("json", f"{CALL_F}\nThat is all.", ("\nThat is all.", "", [F])),
    ("json", f'{CALL_F}; {{"a": 1', ('; {"a": 1', "", [F])),
    ("json", f'{CALL_F}; {{"name": "g", "arguments": {{', ("", "", [F, ("g", "{")])),
    ("json", f"[{CALL_F}];\n", ("", "", [F])),
    ("json", f"{CALL_F} <|py", (" <|py", "", [F])),
    ("json", f"{CALL_F}\n<|python_tag|>{CALL_F}", ("", "", [F, F])),
    ("pythonic", "[f(a=1e999)]", ("[f(a=1e999)]", "", [])),
    ("hermes", '<tool_call>{"na', ('<tool_call>{"na', "", [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a', ("", "", [("f", '{"a')])),
    ("json", CALL_F.replace("arguments", "parameters"), ("", "", [F])),
    ("json", f"<|python_tag|>{CALL_F}; {CALL_F}", ("", "", [F, F])),
    ("json", f"[{CALL_F}, {CALL_F}]", ("", "", [F, F])),
    ("json", "plain words", ("plain words", "", [])),
    ("json", '{"answer": 42} yes', ('{"answer": 42} yes', "", [])),
    ("json", "[1, 2]", ("[1, 2]", "", [])),
    ("json", "<|py", ("<|py", "", [])),
    ("json", '{"x', ('{"x', "", [])),
    (
        "pythonic",
        '[f(a=1, b="x]"), g.h(c=[True, None])]',
        ("", "", [("f", '{"a": 1, "b": "x]"}'), ("g.h", '{"c": [true, null]}')]),
    ),
    ("pythonic", "[f(1)]", ("[f(1)]", "", [])),
    ("pythonic", "[f(a=", ("[f(a=", "", [])),
    ("pythonic", "[1] is a list", ("[1] is a list", "", [])),
    ("pythonic", "words", ("words", "", [])),
    ("think", "<think>\nI see </thin it.\n</think>\n\nYes.", ("Yes.", "I see </thin it.", [])),
    ("think", f"<think>a</think><tool_call>{CALL_F}</tool_call>", ("", "a", [F])),
    ("think", "<think></think>b", ("b", "", [])),
    ("think", "no <think> here", ("no <think> here", "", [])),
    ("think", " <thi", (" <thi", "", [])),
    ("think", "<think>never ends ", ("", "never ends", [])),
    ("inside", "I see.\n</think>\nYes.", ("Yes.", "I see.", [])),
    ("named", '{"a": 1}', ("", "", [("f", '{"a": 1}')])),
    ("hermes", f"a{LONG}<tool_call>{CALL_F}</tool_call>", (f"a{LONG}", "", [F])),
    ("hermes", f"<tool_call>{CALL_F}</tool_call>{LONG}", (LONG, "", [F])),
    ("json", f"{LONG}{CALL_F}", (LONG, "", [F])),
    ("think", f"{LONG}<think>a</think>", (f"{LONG}<think>a</think>", "", [])),
    ("inside", f"a{LONG}</think>b", ("b", f"a{LONG}", [])),
    ("pythonic", f"[{'f' * 1024}(a=1)]", (f"[{'f' * 1024}(a=1)]", "", [])),
]


@pytest.mark.parametrize(("kind", "text", "said"), OUTPUTS)
def test_streamed_is_as_whole(kind: str, text: str, said: Said) -> None:
    assert parse(MAKE[kind](), [text]) == said
    assert parse(MAKE[kind](), list(text)) == said
    random = Random(text)
    for _ in range(50):
        assert parse(MAKE[kind](), cut(text, random)) == said


BROKEN = '<tool_call>{"name": "f", "arguments": {</tool_call>'
JSON_BROKEN = '{"name": "f", "parameters": {invalid json}}'
TOLD_AT_THE_END: list[tuple[Callable[[], OutputParser], str, bool, Said]] = [
    # What looks like a call, and has arguments that nobody can read, is content.
    (lambda: hermes(is_whole=True), BROKEN, False, (BROKEN, "", [])),
    (lambda: llama3_json(is_whole=True), JSON_BROKEN, False, (JSON_BROKEN, "", [])),
    (
        lambda: hermes(is_whole=True),
        f'<tool_call>{CALL_F}</tool_call><tool_call>{{"name": "g", "arguments": {{"a": NaN}}}}',
        False,
        ('<tool_call>{"name": "g", "arguments": {"a": NaN}}', "", [F]),
    ),
    # What was cut off is neither a call nor content.
    (PythonicParser, "[f(a='San\\", True, NONE),
    (PythonicParser, '[f(a="San\\', True, NONE),
    (hermes, 'I look.\n<tool_call>\n{"na', True, ("I look.", "", [])),
    (lambda: hermes(is_whole=True), '<tool_call>{"name": "f", "arguments": {"a', True, NONE),
    (lambda: llama3_json(is_whole=True), '{"name": "f", "parameters": {"a": "S', True, NONE),
    (lambda: NamedCallParser("f", is_whole=True), '{"city": "San', True, NONE),
    *(
        (PythonicParser, text, True, NONE)
        for text in (
            "[f(a='San", "[f(", "[f(a", "[f(a=", "[f(a=\"it's (", "[f(a=-1, b=[1, {'x': 't', 2",
            "[f()", "[g.h(a='x' 'y'), f(", "[f(a=True, b=None), ",
        )
    ),
    # Words that begin like a call are content.
    *(
        (PythonicParser, text, True, (text, "", []))
        for text in (
            "[note (this is important) that", "[note (x=3) is that", "[f(1", "[f(a=1, 2",
            "[f(a) and", "[see (https://a.b", "[f(a=1 b", "[f(a=b=", "[f(a=[1)", "[f(x), y",
        )
    ),
    (lambda: CallsAloneParser(llama3_json()), '[{\n  "name"', True, NONE),
    (llama3_json, '{"answer": 4', True, ('{"answer": 4', "", [])),
    (lambda: NamedCallParser("f", is_whole=True), '{"a": 1}', True, ("", "", [("f", '{"a": 1}')])),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text", "is_cut", "said"), TOLD_AT_THE_END)
def test_no_call_that_is_none_is_told(
    make: Callable[[], OutputParser], text: str, is_cut: bool, said: Said
) -> None:
    for chunks in ([text], list(text)):
        parser = make()
        pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
        assert merged([*pieces, *parser.finish(is_cut=is_cut)]) == said


@pytest.mark.parametrize("kind", ["hermes", "json", "pythonic", "named", "inside"])
def test_a_long_output_takes_as_long_a_token_as_a_short_one(kind: str) -> None:
    """Nothing is looked at again with each token."""

    def seconds(number: int) -> float:
        parser = MAKE[kind]()
        parser.push({"hermes": "<tool_call>", "pythonic": "[f(a='"}.get(kind, ""))
        parser.push('{"name": "f", "arguments": {"text": "')
        begun = time.process_time()
        for _ in range(number):
            parser.push("word, ")
        parser.finish()
        return time.process_time() - begun

    short = min(seconds(4_000) for _ in range(3))
    assert min(seconds(40_000) for _ in range(2)) < 30 * short


@pytest.mark.parametrize(("kind", "head", "piece"), [
    ("hermes", "", "   \n"), ("hermes", f"<tool_call>{CALL_F}</tool_call>", "   \n"),
    ("hermes", f"<tool_call>{CALL_F}", "   \n"),
    ("json", "", " [;\n"), ("json", CALL_F, "   \n"), ("think", "", "   \n"),
    ("inside", "x", "   \n"), ("pythonic", "", "   \n"), ("pythonic", "[f", "name"),
])  # fmt: skip
def test_what_is_held_back_has_a_bound(kind: str, head: str, piece: str) -> None:
    """All of it is looked at with each new token."""
    parser = MAKE[kind]()
    parser.push(head)
    told = 0
    for number in range(1, 1001):
        told += sum(len(one.content + one.reasoning) for one in parser.push(piece))
        assert number * len(piece) - told <= 1024


@pytest.mark.parametrize("kind", ["hermes", "json", "named"])
def test_arguments_come_in_pieces(kind: str) -> None:
    parser = MAKE[kind]()
    text = json.dumps({"name": "f", "arguments": {"text": "x" * 50}})
    pushed = [
        len(parser.push(character)) for character in f"<tool_call>{text}"[11 * (kind != "hermes") :]
    ]
    assert sum(pushed) > 50


ALPHABET = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f"', ', "arguments": ']
ALPHABET += [CALL_F, f"<tool_call>{CALL_F}</tool_call>", '"name": 3', '"arguments": {"y": 2}']
ALPHABET += ["{", "}", "[", "]", '"', "\\", ",", ":", " ", "\n", "x", "<", "f(", "a=1", ")", ";"]


@pytest.mark.parametrize("most_space", [2, 1024])
@pytest.mark.parametrize("kind", MAKE)
def test_any_text_is_taken_apart_alike_however_it_is_cut(
    kind: str, most_space: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_text, "_MOST_SPACE", most_space)
    random = Random(kind)
    for _ in range(300):
        text = "".join(random.choices(ALPHABET, k=random.randint(1, 14)))
        whole = parse(MAKE[kind](), [text])
        assert parse(MAKE[kind](), cut(text, random)) == whole, text
        assert parse(MAKE[kind](), list(text)) == whole, text


def test_the_format_is_read_from_the_template() -> None:
    assert format_of('{{ tools }} <tool_call>{"name": x, "arguments": y}') is HERMES
    assert format_of('{% if tools %}{"name": f, "parameters": d}') is LLAMA3_JSON
    assert format_of("{{ tools }} [func_name1(params_name1=v)]") is PYTHONIC
    assert format_of("{{ messages }}") is None


WRITTEN: list[tuple[ToolFormat, tuple[str, ...]]] = [
    (
        HERMES,
        (
            '<tool_call>\n{"name": "f", "arguments": {"x": [1, null]}}\n</tool_call>',
            '<tool_call>\n{"name": "f-2", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        ),
    ),
    (LLAMA3_JSON, ('{"name": "f", "parameters": {"x": "y"}}; {"name": "f-2", "parameters": {}}',)),
    (
        PYTHONIC,
        (
            """[f(a=1, b="x]", c='it', d=[True, None, {"k": -1.5}]), f.from_2(from_=0)]""",
            "[f()]",
        ),
    ),
]


@pytest.mark.parametrize(("tools", "written"), WRITTEN)
def test_a_form_or_calls(tools: ToolFormat, written: tuple[str, ...]) -> None:
    form = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    names = ("f", "f-2", "f.from_2", "2f", "from")
    grammar = form_or_calls(form, tools, {name: {"type": "object"} for name in names}, {})
    assert grammar is not None
    compiled = GrammarCompiler(byte_vocabulary).compile(StructuredOutput(grammar=grammar))
    cases = [(text, True) for text in (*written, '{"a": 1}', "{}")]
    cases += [(text.replace("f", "g"), False) for text in written]
    cases += [(text, False) for text in ("", "words", '{"a":  1}', '{"a": 1} [f()]')]
    unread = ("[f-2()]", "[2f()]", "[from()]", '[f(from="x")]', "[f(a=007)]", "[f(a=1__0)]")
    cases += [(text, False) for text in unread]
    for text in written:
        assert parse(tools.parser({}, True), [text])[2], "the parser reads it"
    for text, is_good in cases:
        matcher = compiled.deep_copy()
        taken = matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()
        assert taken is is_good, text

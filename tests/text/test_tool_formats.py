"""Each format in which models write calls: read however it is cut, and forced by its grammar."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from types import FrameType
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from kvrelay.router.config import ToolParser
from kvrelay.text.grammar import GrammarCompiler
from kvrelay.text.output_parsers.call_grammar import CallGrammar, NoGrammarError
from kvrelay.text.output_parsers.formats import TOOL_FORMATS, format_of
from kvrelay.text.output_parsers.json_calls import is_json
from kvrelay.text.output_parsers.pieces import OutputParser, OutputPiece
from kvrelay.text.token_texts import TokenTexts
from kvrelay.wire.submit import StructuredOutput
from tests.known import known
from tests.router.toy_tokenizers import byte_level_tokenizer

Call = tuple[str, dict[str, Any]]
SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "note": {"$ref": "#/$defs/Note"},
        },
        "required": ["city"],
        "$defs": {"Note": {"type": "string", "maxLength": 200}},
    },
    "time": {
        "type": "object",
        "properties": {
            "zone": {"enum": ["CET", "UTC"]},
            "exact": {"type": "boolean"},
            "at": {"anyOf": [{"type": "string", "pattern": "^[0-9]+:[0-9]+$"}, {"type": "null"}]},
        },
    },
}
PLAIN: list[Call] = [("weather", {"city": "Köln 🎉", "days": 3})]
TWO: list[Call] = [*PLAIN, ("time", {"zone": "CET", "exact": True})]
NO_ARGUMENTS: list[Call] = [("time", {})]


@dataclass(frozen=True)
class Format:
    """How a model writes calls, as its template and its vendor's documents have it."""

    write: Callable[[Sequence[Call]], str]
    template: str
    """The part of the published template, in short, that shows the format."""
    tags: tuple[str, ...]
    """Special tokens, or texts that are no content."""
    has_text: bool = True
    """Whether text may stand before and behind calls."""
    one_alone: bool = False
    """Whether a turn has one call at most."""


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def objects(calls: Sequence[Call], key: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{key}": {dumped(given)}}}' for name, given in calls]


def each(call: str, argument: str, between: str = "") -> Callable[[Sequence[Call]], str]:
    """Calls whose arguments are written one by one."""

    def write(calls: Sequence[Call]) -> str:
        written = []
        for name, given in calls:
            parts = [
                argument.format(key=key, value=bare(one), text=str(isinstance(one, str)).lower())
                for key, one in given.items()
            ]
            written.append(call.format(name=name, arguments="".join(parts)))
        return between.join(written)

    return write


def dsml(block: str) -> Callable[[Sequence[Call]], str]:
    write = each(
        '<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>\n',
        '<｜DSML｜parameter name="{key}" string="{text}">{value}</｜DSML｜parameter>\n',
    )
    return lambda calls: f"<｜DSML｜{block}>\n{write(calls)}</｜DSML｜{block}>"


def minimax(calls: Sequence[Call]) -> str:
    write = each(
        '<invoke name="{name}">\n{arguments}</invoke>\n',
        '<parameter name="{key}">{value}</parameter>\n',
    )
    return f"<minimax:tool_call>\n{write(calls)}</minimax:tool_call>"


def kimi(calls: Sequence[Call]) -> str:
    each_one = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{dumped(given)}<|tool_call_end|>"
        for number, (name, given) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(each_one)}<|tool_calls_section_end|>"


def deepseek(head: str, tail: str, between: str = "") -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        each_one = [
            f"<｜tool▁call▁begin｜>{head.format(name=name)}{dumped(given)}{tail}<｜tool▁call▁end｜>"
            for name, given in calls
        ]
        return f"<｜tool▁calls▁begin｜>{between.join(each_one)}<｜tool▁calls▁end｜>"

    return write


def python_calls(calls: Sequence[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        return f"{key}={value if isinstance(value, bool) else dumped(value)}"

    each_one = [
        f"{name}({', '.join(argument(*one) for one in given.items())})" for name, given in calls
    ]
    return f"[{', '.join(each_one)}]"


def harmony(calls: Sequence[Call]) -> str:
    return "<|end|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(given)}"
        for name, given in calls
    )


DEEPSEEK_TAGS = tuple(
    f"<｜tool▁{one}｜>" for one in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
HARMONY_TAGS = tuple(
    f"<|{one}|>" for one in ("channel", "start", "end", "message", "constrain", "call", "return")
)
KIMI_TAGS = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
FORMATS = {
    "hermes": Format(
        lambda calls: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects(calls)),
        'tools <tool_call>\\n{{\\"name\\": <function-name>, "arguments": <args-json-object>}}',
        ("<tool_call>", "</tool_call>"),
    ),
    "qwen3_coder": Format(
        each(
            "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
            "<parameter={key}>\n{value}\n</parameter>\n",
            "\n",
        ),
        "tools <tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
        ("<tool_call>", "</tool_call>"),
    ),
    "glm45": Format(
        each(
            "<tool_call>{name}\n{arguments}</tool_call>",
            "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
            "\n",
        ),
        "tools <tool_call>{function-name}\\n<arg_key>{{ k }}</arg_key>\\n<arg_value>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>"),
    ),
    "glm47": Format(
        each(
            "<tool_call>{name}{arguments}</tool_call>",
            "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        ),
        "tools <tool_call>{function-name}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>"),
    ),
    "minimax_m2": Format(
        minimax,
        "tools <minimax:tool_call>\\n<invoke name=",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "deepseek_v32": Format(
        dsml("function_calls"),
        "tools <｜DSML｜function_calls>",
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ),
    "deepseek_v4": Format(
        dsml("tool_calls"),
        "tools <｜DSML｜tool_calls>",
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ),
    "deepseek_v3": Format(
        deepseek("function<｜tool▁sep｜>{name}\n```json\n", "\n```", "\n"),
        "tools <｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n```json\\n'",
        DEEPSEEK_TAGS,
    ),
    "deepseek_v31": Format(
        deepseek("{name}<｜tool▁sep｜>", ""),
        "tools <｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments",
        DEEPSEEK_TAGS,
    ),
    "kimi_k2": Format(kimi, "tools {{ id }}<|tool_call_argument_begin|>", KIMI_TAGS),
    "mistral": Format(
        lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(given)}" for name, given in calls),
        "tools '[TOOL_CALLS]' + name + '[ARGS]' + arguments",
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    "mistral_list": Format(
        lambda calls: f"[TOOL_CALLS] [{', '.join(objects(calls))}]",
        'tools [TOOL_CALLS] [ {"name": … "arguments": …',
        ("[TOOL_CALLS]",),
    ),
    "granite": Format(
        lambda calls: f"<|tool_call|>[{', '.join(objects(calls))}]",
        'tools <|tool_call|> "name" "arguments"',
        ("<|tool_call|>",),
    ),
    "phi4_mini_json": Format(
        lambda calls: f"functools[{', '.join(objects(calls))}]",
        'tools functools[{"name": [function name], "arguments": [arguments as JSON]}, ...]',
        ("functools[",),
    ),
    "nemotron_json": Format(
        lambda calls: f"<TOOLCALL>[{', '.join(objects(calls))}]</TOOLCALL>",
        'tools <TOOLCALL>[{"name": "tool_name1", "arguments": "tool_args1"}]</TOOLCALL>',
        ("<TOOLCALL>", "</TOOLCALL>"),
    ),
    "llama3_json": Format(
        lambda calls: "; ".join(objects(calls, "parameters")),
        'tools Respond in the format {"name": function name, "parameters": dictionary}',
        ('{"name"',),
    ),
    "pythonic": Format(
        python_calls,
        "tools [func_name1(params_name1=params_value1)]",
        ("[weather",),
        has_text=False,
    ),
    "llama4_pythonic": Format(
        lambda calls: f"<|python_start|>{python_calls(calls)}<|python_end|>",
        "tools [func_name1(params_name1=params_value1)] <|python_start|>",
        ("<|python_start|>", "<|python_end|>"),
    ),
    "openai": Format(
        harmony,
        "tools <|channel|>analysis<|message|>",
        HARMONY_TAGS,
        has_text=False,
        one_alone=True,
    ),
}
IN_TEXT = [name for name, one in FORMATS.items() if one.has_text]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = byte_level_tokenizer()
    special = {tag for one in FORMATS.values() for tag in one.tags if tag[0] in "<["}
    special |= {"<|start|>", "<|end|>", "<|return|>"}
    special -= {"[weather", "[TOOL_CALLS]", "<tool_call>", "<arg_key>"}
    made.add_special_tokens([AddedToken(one, special=True) for one in sorted(special)])
    made.add_tokens([AddedToken(one) for one in ("｜DSML｜", "<tool_call>", "<arg_key>")])
    return made


def parser_of(name: str, *, is_whole: bool = False) -> OutputParser:
    return TOOL_FORMATS[name].parser(SCHEMAS, is_whole)


def parse(
    parser: OutputParser, chunks: Sequence[str], *, is_cut: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """The content, and the name and arguments of each call."""
    pieces: list[OutputPiece] = []
    for chunk in chunks:
        pieces += parser.push(chunk)
    return merged([*pieces, *parser.finish(is_cut=is_cut)])


def merged(pieces: Sequence[OutputPiece]) -> tuple[str, list[tuple[str, str]]]:
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.name:
            assert piece.call == len(calls), "each call begins once, in order"
            calls.append((piece.name, ""))
        if piece.call is not None:
            assert piece.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    assert not any(piece.reasoning for piece in pieces)
    return "".join(piece.content for piece in pieces), calls


def read(
    name: str, chunks: Sequence[str], *, is_whole: bool = False, is_cut: bool = False
) -> tuple[str, list[Call]]:
    content, calls = parse(parser_of(name, is_whole=is_whole), chunks, is_cut=is_cut)
    return content, [(called, json.loads(arguments)) for called, arguments in calls]


def tokens_of(text: str, tokenizer: Tokenizer) -> list[str]:
    """A text in the pieces that its tokens add to it."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    ends = [
        tokenizer.decode(ids[: end + 1], skip_special_tokens=False).rstrip("\ufffd")
        for end in range(len(ids))
    ]
    assert ends[-1] == text
    return [now[len(before) :] for before, now in zip(["", *ends], ends, strict=False)]


def cuts(pieces: Sequence[str]) -> Iterator[list[str]]:
    yield list(pieces)
    for at in range(1, len(pieces)):
        yield ["".join(pieces[:at]), "".join(pieces[at:])]


def test_the_table_has_all_formats() -> None:
    assert FORMATS.keys() == TOOL_FORMATS.keys()
    assert {one.value for one in ToolParser} == {"auto", "none", *FORMATS}


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_however_they_are_cut(name: str, tokenizer: Tokenizer) -> None:
    for calls in (PLAIN, TWO, NO_ARGUMENTS):
        text = FORMATS[name].write(calls)
        assert read(name, [text], is_whole=True) == ("", calls)
        for chunks in cuts(tokens_of(text, tokenizer)):
            assert read(name, chunks) == ("", calls), chunks


@pytest.mark.parametrize("name", IN_TEXT)
def test_text_before_and_behind(name: str, tokenizer: Tokenizer) -> None:
    text = f"I look. <b> [x]\n\n{FORMATS[name].write(TWO)}\nThen I say 🎉."
    for chunks in cuts(tokens_of(text, tokenizer)):
        content, calls = read(name, chunks)
        assert calls == TWO
        assert content == "I look. <b> [x]\nThen I say 🎉." or name == "llama3_json"
    assert read(name, [text], is_whole=True)[1] == TWO


@pytest.mark.parametrize("name", IN_TEXT)
def test_markup_in_quotes_is_no_call(name: str) -> None:
    """Within an argument it is the argument's, and behind a backtick it is content."""
    text = FORMATS[name].write(TWO)
    if name != "llama3_json":
        quoted = f"Write `{FORMATS[name].tags[0]}` before a call."
        for chunks in ([quoted], list(quoted)):
            assert read(name, chunks) == (quoted, [])
    calls: list[Call] = [
        ("weather", {"city": f"a {text} b\n", "note": "</parameter> </arg_value>"})
    ]
    for chunks in ([FORMATS[name].write(calls)], list(FORMATS[name].write(calls))):
        if name not in (
            "glm45",
            "glm47",
            "qwen3_coder",
            "minimax_m2",
            "deepseek_v32",
            "deepseek_v4",
        ):
            assert read(name, chunks) == ("", calls)
    ends: list[Call] = [
        ("weather", {"city": "</parameter> </arg_value> x </tool_call>", "days": 1})
    ]
    written = FORMATS[name].write(ends)
    for chunks in ([written], list(written)):
        assert read(name, chunks) == ("", ends)


@pytest.mark.parametrize("name", FORMATS)
def test_any_text_is_read_alike_however_it_is_cut(name: str) -> None:
    random, form = Random(name), FORMATS[name]
    text = form.write(TWO)
    parts = [text, form.write(PLAIN), *form.tags, *re.findall(r"<[^<>]*>|\[[A-Z]+\]", text)]
    parts += ["{", "}", '"', "[", "]", "`", ",", ";", ":", " ", "\n", "x", "null", "weather", "<"]
    for is_whole, is_cut in ((False, False), (True, False), (True, True)):
        for _ in range(40):
            text = "".join(random.choices(parts, k=random.randint(1, 9)))
            at = random.randint(0, len(text))
            expected, *others = [
                parse(parser_of(name, is_whole=is_whole), chunks, is_cut=is_cut)
                for chunks in ([text], list(text), [text[:at], text[at:]])
            ]
            assert others == [expected] * 2, text
            if is_whole:
                assert all(is_json(arguments) for _, arguments in expected[1])


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_off_leaves_nothing(name: str, tokenizer: Tokenizer) -> None:
    """Of calls before it nothing is lost, and no part of a tag becomes content."""
    pieces = tokens_of(FORMATS[name].write(TWO), tokenizer)
    for number in range(1, len(pieces)):
        content, calls = read(name, pieces[:number], is_whole=True, is_cut=True)
        if len(content) > 1:
            assert name in ("pythonic", "llama3_json"), content
            assert not calls
        assert calls == TWO[: len(calls)]
        begun = parse(parser_of(name), pieces[:number], is_cut=True)[1]
        assert len(calls) <= len(begun) <= len(calls) + 1 or name == "llama4_pythonic"


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_that_are_no_json_are_content(name: str) -> None:
    text = FORMATS[name].write(PLAIN).replace('"city":', "city:")
    content, calls = read(name, [text], is_whole=True)
    assert "Köln" in content or calls == PLAIN, "what stands between tags is text"


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_in_a_string_are_unwrapped(name: str) -> None:
    text = FORMATS[name].write(PLAIN)
    arguments = dumped(PLAIN[0][1])
    if arguments in text:
        wrapped = text.replace(arguments, dumped(arguments))
        for chunks in ([wrapped], list(wrapped)):
            assert read(name, chunks) == ("", PLAIN)


class Counted:
    """Counts the lines of Python that run, and the characters that are held back meanwhile."""

    def __init__(self) -> None:
        self.lines = 0

    def trace(self, _frame: FrameType, event: str, _argument: object) -> Any:
        self.lines += event == "line"
        return self.trace

    def push(self, parser: OutputParser, piece: str) -> Sequence[OutputPiece]:
        self.lines = 0
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            return parser.push(piece)
        finally:
            sys.settrace(before)


@pytest.mark.parametrize("name", FORMATS)
def test_the_work_for_a_piece_does_not_grow(name: str) -> None:
    """Neither the lines that run grow, nor the text that they look at: 400 kB of arguments."""
    before, _, behind = FORMATS[name].write([("weather", {"city": "@"})]).partition("@")
    parser, counted, lines = parser_of(name), Counted(), list[int]()
    pieces = [*parser.push(before)]
    source = vars(vars(parser).get("_tagged", parser)).get("_source")
    for number in range(6_400):
        piece = f"{'wörd <, }' * 7}{number % 10}"
        if number in (100, 3_000, 6_300):
            pieces += counted.push(parser, piece)
            lines.append(counted.lines)
        else:
            pieces += parser.push(piece)
        if source is not None:
            assert len(source.text) < 64
    assert max(lines) < 200
    assert lines[-1] <= lines[1] + 20
    content, calls = merged([*pieces, *parser.push(behind), *parser.finish()])
    is_long = name in ("pythonic", "llama4_pythonic")
    assert len(content) > 400_000 if is_long else len(calls[0][1]) > 400_000


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    eos = known(tokenizer.token_to_id("<|return|>"))
    vocabulary = LLTokenizer(tokenizer.to_str(), eos_token=[eos])
    return GrammarCompiler(lambda: vocabulary)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_must_come_is_written_in_the_format(
    name: str, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    special = TokenTexts(tokenizer).unspelled_ids

    def forced(most: int | None) -> Any:
        grammar = CallGrammar(SCHEMAS, most, special)
        source = grammar.lark(TOOL_FORMATS[name].grammar(grammar))
        return compiler.compile(StructuredOutput(grammar=source))

    any_number, one = forced(None), forced(1)

    def takes(calls: Sequence[Call], most: int | None = None) -> bool:
        matcher = (one if most else any_number).deep_copy()
        text = FORMATS[name].write(calls)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        return bool(matcher.consume_tokens(ids) and matcher.is_accepting())

    assert takes(PLAIN)
    assert takes(NO_ARGUMENTS)
    assert takes([("time", {"zone": "UTC", "at": "12:30"})])
    assert takes([("weather", {"city": "</x> \"q\" 'q'\n", "note": "n"})])
    assert takes(TWO) is not FORMATS[name].one_alone
    assert not takes(TWO, most=1)
    assert not takes([])
    assert not takes([("other", {"city": "x"})])
    assert not takes([("weather", {"days": 3})]), "city is required"
    assert not takes([("weather", {"city": "x", "days": "three"})])
    assert not takes([("weather", {"city": "x", "note": "n" * 201})])
    assert not takes([("time", {"zone": "EST"})])
    assert not takes([("time", {"at": "noon"})])


@pytest.mark.parametrize("name", [name for name in FORMATS if TOOL_FORMATS[name].openings])
def test_a_call_that_may_come_is_held_to_its_schema(
    name: str, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """From its tag on; text before, between and behind is free, and may have others' tags."""
    form, write = TOOL_FORMATS[name], FORMATS[name].write
    special = TokenTexts(tokenizer).unspelled_ids

    def takes(text: str, most: int | None = None) -> bool:
        grammar = CallGrammar(SCHEMAS, most, special)
        source = known(form.grammar_in_text(grammar))
        matcher = compiler.compile(StructuredOutput(grammar=source))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return bool(matcher.consume_tokens(ids) and matcher.is_accepting())

    assert takes("No call <b> [at] all.")
    assert takes(f"<|channel|>Hm.<|channel|>I look.\n{write(TWO)}")
    assert takes(f"{write(PLAIN)}\n{write(NO_ARGUMENTS)} Done.")
    assert not takes(write([("weather", {"days": 3})]))
    assert not takes(f"I look. {write([('other', {'city': 'x'})])}")
    assert not takes(f"{write(PLAIN)}{write(PLAIN)}", most=1)
    for opening in form.openings[1:]:
        good, bad = (
            re.sub(r"^(<tool_call>\n<function=|<\|tool_call\|>|functools\[)", opening, write([one]))
            for one in (PLAIN[0], ("weather", {"days": 3}))
        )
        assert takes(f"I look. {good} Done.")
        assert not takes(bad)


ZONE = '{"zone": "UTC"}'


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "openai",
            [
                "<|channel|>final<|message|>No call to=functions.weather [at] all.",
                "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{}",
                "{}",
                " to=functions.time<|channel|>commentary <|constrain|>json<|message|>" + ZONE,
            ],
            ["{}<|end|><|start|>assistant{}", "No header"],
        ),
        (
            "pythonic",
            ["", " \n", "No call [weather()] at all.", "[1] I look. [weather()]", "{}"],
            [" {}", "[weather() is none", "[ weather()]", "{} Done."],
        ),
    ],
)
def test_a_call_in_place_of_text_is_held_to_its_schema(
    name: str, good: list[str], bad: list[str], tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    form, write = TOOL_FORMATS[name], FORMATS[name].write
    grammar = CallGrammar(SCHEMAS, None, TokenTexts(tokenizer).unspelled_ids)
    source = known(form.grammar_in_text(grammar))
    compiled = compiler.compile(StructuredOutput(grammar=source))

    def takes(text: str) -> bool:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        matcher = compiled.deep_copy()
        return bool(matcher.consume_tokens(ids) and matcher.is_accepting())

    call, wrong = write(PLAIN), write([("weather", {"days": 3})])
    for text in good:
        assert takes(text.replace("{}", call)), text
        assert "{}" not in text or not takes(text.replace("{}", wrong)), text
    for text in bad:
        assert not takes(text.replace("{}", call)), text


@pytest.mark.parametrize("name", [name for name in FORMATS if TOOL_FORMATS[name].openings])
def test_a_tool_that_is_not_strict_has_any_arguments(
    name: str, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    form, write = TOOL_FORMATS[name], FORMATS[name].write
    special = TokenTexts(tokenizer).unspelled_ids
    grammar = CallGrammar({**SCHEMAS, "other": {"type": "object"}}, None, special)
    if name == "llama4_pythonic":
        with pytest.raises(NoGrammarError):
            form.grammar(grammar)
        return
    source = known(form.grammar_in_text(grammar))
    compiled = compiler.compile(StructuredOutput(grammar=source))

    def takes(calls: Sequence[Call]) -> bool:
        ids = tokenizer.encode(write(calls), add_special_tokens=False).ids
        matcher = compiled.deep_copy()
        return bool(matcher.consume_tokens(ids) and matcher.is_accepting())

    free: list[Call] = [("other", {"a": "x </y>\n", "b": 1, "c": {"d": [None]}})]
    assert takes([*free, *TWO, ("other", {})])
    assert not takes([*free, ("weather", {"days": 3})])


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_read_from_the_template(name: str) -> None:
    assert format_of(FORMATS[name].template) is TOOL_FORMATS[name]
    assert format_of(FORMATS[name].template.replace("tools", "")) is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (
            "tools <{{ dsml_token }}function_calls> {% set dsml_token = '｜DSML｜' %}",
            "deepseek_v32",
        ),
        ("tools <|python_start|>{{ text }}<|python_end|> '\"parameters\": '", "llama3_json"),
        ('tools func_name1( <|python_start|> <|header_start|> "parameters"', "llama4_pythonic"),
        ("'tools' in message and '<|tool|>' + message['tools'] + '<|/tool|>'", None),
        ("<|tool|>{{ tools | tojson }}<|/tool|>", "phi4_mini_json"),
        ("tools <seed:tool_call>\n<function=example>", None),
    ],
)
def test_templates_that_look_alike(template: str, name: str | None) -> None:
    assert format_of(template) is (TOOL_FORMATS[name] if name else None)


WIDE = {"anyOf": [{"type": "integer"}] * 1000}
LONG = {"enum": ["x" * 60_000]}


@pytest.mark.parametrize("name", ["qwen3_coder", "llama4_pythonic"])
@pytest.mark.parametrize(
    ("part", "definition", "is_told"),
    [
        ({"$ref": "#/$defs/D"}, {"type": "integer"}, True),
        ({"$ref": "#/$defs/D"}, WIDE, False),
        ({"$ref": "#/$defs/D"}, LONG, False),
        ({"type": "integer"}, LONG, False),
    ],
)
def test_definitions_that_many_arguments_share_are_looked_at_once(
    name: str, part: dict[str, Any], definition: dict[str, Any], is_told: bool
) -> None:
    """A grammar has its definitions once an argument, so few can have large ones."""
    properties = {f"p{number}": part for number in range(200)}
    schema = {"type": "object", "properties": properties, "$defs": {"D": definition}}
    grammar, counted = CallGrammar({"f": schema}, 1, {}), Counted()
    before = sys.gettrace()
    sys.settrace(counted.trace)
    try:
        if is_told:
            assert TOOL_FORMATS[name].grammar(grammar)
        else:
            with pytest.raises(NoGrammarError):
                TOOL_FORMATS[name].grammar(grammar)
    finally:
        sys.settrace(before)
    assert counted.lines < 50_000


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "deepseek_v32", "llama4_pythonic"])
@pytest.mark.parametrize(
    "changes",
    [
        {"required": None},
        {"required": [["a"]]},
        {"properties": {"a": {"type": "string", "pattern": None}}},
        {"properties": {"a": {"type": "string", "maxLength": 10.0}}},
        {"properties": {"a": {"anyOf": 5}}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}},
    ],
    ids=["null", "list", "pattern", "length", "alternatives", "circle"],
)
def test_a_schema_that_is_none_is_left_to_json(name: str, changes: dict[str, Any]) -> None:
    """Its compiler says what is wrong."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **changes}
    grammar = CallGrammar({"f": schema}, 1, {})
    text = {one.get("type") for one in schema["properties"].values()} == {"string"}
    if name == "llama4_pythonic" and text:  # a text there is JSON's
        assert TOOL_FORMATS[name].grammar(grammar)
        return
    with pytest.raises(NoGrammarError):
        TOOL_FORMATS[name].grammar(grammar)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [(r"^\\/x$", r"\/x", "/x"), (r"^a/b$", "a/b", "a/b/"), (r"^a\\$", "a\\", "a\\b")],
)
def test_patterns_with_slashes(
    pattern: str, good: str, bad: str, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    properties = {"a": {"type": "string", "pattern": pattern}}
    special = TokenTexts(tokenizer).unspelled_ids
    grammar = CallGrammar({"f": {"type": "object", "properties": properties}}, 1, special)
    form = TOOL_FORMATS["qwen3_coder"]
    source = StructuredOutput(grammar=grammar.lark(form.grammar(grammar)))
    compiled = compiler.compile(source)
    for text, is_good in ((good, True), (bad, False)):
        written = FORMATS["qwen3_coder"].write([("f", {"a": text})])
        ids = tokenizer.encode(written, add_special_tokens=False).ids
        matcher = compiled.deep_copy()
        assert (matcher.consume_tokens(ids) and matcher.is_accepting()) is is_good, text


def test_types_are_looked_at_once_for_all_arguments_of_all_calls() -> None:
    properties = {f"p{number}": {"$ref": "#/$defs/D"} for number in range(50)}
    schema = {"type": "object", "properties": properties, "$defs": {"D": WIDE}}
    parser, counted = TOOL_FORMATS["glm47"].parser({"f": schema}, False), Counted()
    write = FORMATS["glm47"].write
    calls: list[Call] = [("f", dict.fromkeys(properties, 1))] * 2
    pieces = [*counted.push(parser, write(calls)), *parser.finish()]
    assert [json.loads(one) for _, one in merged(pieces)[1]] == [given for _, given in calls]
    assert counted.lines < 50_000


K = "<tool_call>\n<function=weather>\n<parameter=city>\nKöln 🎉"
D = "<parameter=days>\n3"
INVOKE = '<minimax:tool_call>\n<invoke name="weather">\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", f"{K}\n{D}\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", f"{K}\n</parameter>\n{D}\n</function>\n</tool_call>"),
        ("qwen3_coder", f"{K}\n</parameter>\n{D}\n</parameter>\n</tool_call>"),
        ("qwen3_coder", f"{K}\n{D}\n</tool_call>"),
        (
            "minimax_m2",
            f'{INVOKE}<parameter name="city">Köln 🎉</parameter>\n'
            '<parameter name="days">3</parameter>\n</minimax:tool_call>',
        ),
    ],
)
def test_tags_that_a_model_leaves_out(name: str, text: str) -> None:
    """A call ends with its block, and a value with the next line that has a tag."""
    text = f"{text}\n{FORMATS[name].write(NO_ARGUMENTS)}"
    for chunks in ([text], list(text)):
        for is_whole in (False, True):
            assert read(name, chunks, is_whole=is_whole) == ("", [*PLAIN, *NO_ARGUMENTS])


def test_white_space_behind_an_argument_is_held_to_a_bound() -> None:
    parser = parser_of("qwen3_coder")
    parser.push(f"{K}\n</parameter>")
    for _ in range(200):
        parser.push("\n" * 16)
    assert len(vars(parser)["_source"].text) < 64


@pytest.mark.parametrize("tags", [("<|python_start|>", "<|python_end|>"), ("", "")])
def test_the_tags_of_llama_4_around_text_or_calls(tags: tuple[str, str]) -> None:
    call = FORMATS["llama3_json"].write(PLAIN)
    for text, content in (
        (f"{tags[0]}{call}{tags[1]}", ""),
        (f"{tags[0]}I look.{tags[1]}{call}", "I look."),
    ):
        for chunks in ([text], list(text)):
            assert read("llama3_json", chunks) == (content, PLAIN)

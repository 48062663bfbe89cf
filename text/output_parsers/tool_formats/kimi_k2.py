"""The format of Kimi K2: a call's id, which has its name, and its arguments."""

from __future__ import annotations

import re
from typing import Final

from kvrelay.text.output_parsers.call_blocks import BlockParser, Reading, Source, Tags, ToldCalls
from kvrelay.text.output_parsers.call_grammar import CallGrammar
from kvrelay.text.output_parsers.json_readers import read_arguments
from kvrelay.text.output_parsers.marked_arguments import Schema, Schemas
from kvrelay.text.output_parsers.tool_format import ToolFormat
from kvrelay.text.output_parsers.tool_formats.deepseek_v3 import calls_between

_OPEN: Final = "<|tool_calls_section_begin|>"
_CLOSE: Final = "<|tool_calls_section_end|>"
_CALL_OPEN: Final = "<|tool_call_begin|>"
_CALL_CLOSE: Final = "<|tool_call_end|>"
_BETWEEN: Final = "<|tool_call_argument_begin|>"
_ID: Final = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")


def _read_call(source: Source, calls: ToldCalls) -> Reading:
    text, tag = yield from source.until(_BETWEEN)
    found = _ID.fullmatch(text.strip())
    if not tag or found is None:
        return False
    if not (yield from read_arguments(source, calls, found[1], text.strip())):
        return False
    yield from source.skip(_CALL_CLOSE)
    return True


def _parser(_schemas: Schemas, is_whole: bool) -> BlockParser:
    read = calls_between(_CALL_OPEN, _CLOSE, _read_call)
    return BlockParser(Tags(_OPEN), read, _CLOSE, is_whole=is_whole)


def _grammar(grammar: CallGrammar) -> str:
    def call(name: str, schema: Schema) -> str:
        return grammar.sequence(
            grammar.text(f"{_CALL_OPEN}functions.{name}:"),
            "/[0-9]{1,3}/",
            grammar.text(_BETWEEN),
            grammar.json(schema),
            grammar.text(_CALL_CLOSE),
        )

    calls = grammar.row(grammar.each(call))
    return grammar.sequence(grammar.text(_OPEN), calls, grammar.text(_CLOSE))


KIMI_K2: Final = ToolFormat(
    "kimi_k2",
    _parser,
    _grammar,
    lambda template: _BETWEEN in template,
    (_OPEN,),
    new_id=lambda name, number: f"functions.{name}:{number}",
)

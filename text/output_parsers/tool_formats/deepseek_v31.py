"""The format of DeepSeek V3.1: a call's name and its arguments, with a tag between."""

from __future__ import annotations

from typing import Final

from kvrelay.text.output_parsers.call_grammar import CallGrammar
from kvrelay.text.output_parsers.marked_arguments import Schema
from kvrelay.text.output_parsers.tool_format import ToolFormat
from kvrelay.text.output_parsers.tool_formats.deepseek_v3 import (
    BETWEEN,
    CALL_CLOSE,
    CALL_OPEN,
    CLOSE,
    OPEN,
    parser,
)


def _grammar(grammar: CallGrammar) -> str:
    def call(name: str, schema: Schema) -> str:
        return grammar.sequence(
            grammar.text(f"{CALL_OPEN}{name}{BETWEEN}"),
            grammar.json(schema),
            grammar.text(CALL_CLOSE),
        )

    calls = grammar.row(grammar.each(call))
    return grammar.sequence(grammar.text(OPEN), calls, grammar.text(CLOSE))


DEEPSEEK_V31: Final = ToolFormat(
    "deepseek_v31", parser, _grammar, lambda template: BETWEEN in template, (OPEN,)
)

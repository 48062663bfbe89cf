"""The format ``<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>``, as Nemotron does."""

from __future__ import annotations

from typing import Final

from kvrelay.text.output_parsers.call_blocks import BlockParser, Tags
from kvrelay.text.output_parsers.call_grammar import CallGrammar, call_object
from kvrelay.text.output_parsers.json_readers import json_blocks
from kvrelay.text.output_parsers.marked_arguments import Schemas
from kvrelay.text.output_parsers.tool_format import ToolFormat

_OPEN: Final = "<TOOLCALL>"
_CLOSE: Final = "</TOOLCALL>"


def _parser(_schemas: Schemas, is_whole: bool) -> BlockParser:
    return BlockParser(Tags(_OPEN), json_blocks(_CLOSE), _CLOSE, is_whole=is_whole)


def _grammar(grammar: CallGrammar) -> str:
    calls = grammar.row(call_object(grammar), ", ")
    return grammar.sequence(grammar.text(f"{_OPEN}["), calls, grammar.text(f"]{_CLOSE}"))


NEMOTRON: Final = ToolFormat(
    "nemotron_json", _parser, _grammar, lambda template: _OPEN in template, (_OPEN,)
)

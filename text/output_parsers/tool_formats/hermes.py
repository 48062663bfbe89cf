"""The format ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes and Qwen do."""

from __future__ import annotations

from typing import Final

from kvrelay.text.output_parsers.call_blocks import BlockParser, Tags
from kvrelay.text.output_parsers.call_grammar import CallGrammar, call_object
from kvrelay.text.output_parsers.json_readers import json_blocks
from kvrelay.text.output_parsers.marked_arguments import Schemas
from kvrelay.text.output_parsers.tool_format import ToolFormat

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"


def _parser(_schemas: Schemas, is_whole: bool) -> BlockParser:
    return BlockParser(Tags(_OPEN), json_blocks(_CLOSE), _CLOSE, is_whole=is_whole)


def _grammar(grammar: CallGrammar) -> str:
    call = call_object(grammar, f"{_OPEN}\n", f"\n{_CLOSE}")
    return grammar.row(call, "\n")


HERMES: Final = ToolFormat(
    "hermes",
    _parser,
    _grammar,
    lambda template: _OPEN in template and '"arguments"' in template,
    (_OPEN,),
)

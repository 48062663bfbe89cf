"""The format ``<|tool_call|>[{"name": …, "arguments": {…}}, …]``, as Granite 3 does.

Granite 20B begins each call with ``<function_call>``. Granite 4 has the format of Hermes.
"""

from __future__ import annotations

from typing import Final

from kvrelay.text.output_parsers.call_blocks import BlockParser, Tags
from kvrelay.text.output_parsers.call_grammar import CallGrammar, call_object
from kvrelay.text.output_parsers.json_readers import json_blocks
from kvrelay.text.output_parsers.marked_arguments import Schemas
from kvrelay.text.output_parsers.tool_format import ToolFormat

_OPEN: Final = "<|tool_call|>"
_OTHERS: Final = ("<tool_call>", "<function_call>")
_CLOSE: Final = "</tool_call>"


def _parser(_schemas: Schemas, is_whole: bool) -> BlockParser:
    return BlockParser(Tags(_OPEN, *_OTHERS), json_blocks(_CLOSE), _CLOSE, is_whole=is_whole)


def _grammar(grammar: CallGrammar) -> str:
    calls = grammar.row(call_object(grammar), ", ")
    return grammar.sequence(grammar.text(f"{grammar.opening or _OPEN}["), calls, grammar.text("]"))


GRANITE: Final = ToolFormat(
    "granite",
    _parser,
    _grammar,
    lambda template: _OPEN in template or "<function_call>" in template,
    (_OPEN, *_OTHERS),
)

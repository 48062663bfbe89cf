"""The format of MiniMax M2: ``<invoke name="…">`` with a tag for each argument."""

from __future__ import annotations

from typing import Final

from kvrelay.text.output_parsers.call_blocks import BlockParser, Tags
from kvrelay.text.output_parsers.call_grammar import CallGrammar, invocation
from kvrelay.text.output_parsers.marked_arguments import Marks, Schemas, marked_blocks
from kvrelay.text.output_parsers.tool_format import ToolFormat

_OPEN: Final = "<minimax:tool_call>"
_CLOSE: Final = "</minimax:tool_call>"
_MARKS: Final = Marks(
    call='<invoke name="',
    name_end='">',
    call_end="</invoke>",
    argument='<parameter name="',
    key_end='">',
    value="",
    value_end="</parameter>",
)


def _parser(schemas: Schemas, is_whole: bool) -> BlockParser:
    read = marked_blocks(_MARKS, _CLOSE, schemas)
    return BlockParser(Tags(_OPEN), read, _CLOSE, is_whole=is_whole)


def _grammar(grammar: CallGrammar) -> str:
    calls = grammar.row(invocation(grammar, _MARKS))
    return grammar.sequence(grammar.text(f"{_OPEN}\n"), calls, grammar.text(_CLOSE))


MINIMAX_M2: Final = ToolFormat(
    "minimax_m2", _parser, _grammar, lambda template: _OPEN in template, (_OPEN,)
)

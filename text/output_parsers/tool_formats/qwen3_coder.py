"""The format of Qwen3-Coder and Qwen3.5: ``<function=name>`` with a tag for each argument."""

from __future__ import annotations

from typing import Final

from kvrelay.text.output_parsers.call_blocks import BlockParser, Tags
from kvrelay.text.output_parsers.call_grammar import CallGrammar
from kvrelay.text.output_parsers.marked_arguments import Marks, Schema, Schemas, marked_blocks
from kvrelay.text.output_parsers.tool_format import ToolFormat

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_MARKS: Final = Marks(
    call="<function=",
    name_end=">",
    call_end="</function>",
    argument="<parameter=",
    key_end=">",
    value="",
    value_end="</parameter>",
    is_padded=True,
)


def _parser(schemas: Schemas, is_whole: bool) -> BlockParser:
    read = marked_blocks(_MARKS, _CLOSE, schemas)
    return BlockParser(Tags(_OPEN, _MARKS.call), read, _CLOSE, is_whole=is_whole)


def _grammar(grammar: CallGrammar) -> str:
    before = "" if grammar.opening == _MARKS.call else f"{_OPEN}\n"

    def call(name: str, schema: Schema) -> str:
        return grammar.sequence(
            grammar.text(f"{before}{_MARKS.call}{name}>\n"),
            grammar.marked(schema, _MARKS, "\n"),
            grammar.text(f"{_MARKS.call_end}\n{_CLOSE}"),
        )

    return grammar.row(grammar.each(call), "\n")


QWEN3_CODER: Final = ToolFormat(
    "qwen3_coder",
    _parser,
    _grammar,
    lambda template: _OPEN in template and _MARKS.call in template,
    (_OPEN, _MARKS.call),
)

"""The formats of GLM-4.5 to 5: a call's name, and a pair of tags for each argument."""

from __future__ import annotations

import re
from typing import Final

from kvrelay.text.output_parsers.call_blocks import BlockParser, Reading, Source, Tags, ToldCalls
from kvrelay.text.output_parsers.call_grammar import CallGrammar
from kvrelay.text.output_parsers.json_readers import end_call
from kvrelay.text.output_parsers.marked_arguments import (
    Marks,
    Schema,
    Schemas,
    read_marked_arguments,
    types_by_function,
)
from kvrelay.text.output_parsers.tool_format import ToolFormat

_OPEN: Final = "<tool_call>"
_MARKS: Final = Marks(
    call_end="</tool_call>",
    argument="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
)
_NAME: Final = re.compile(r"[^\s<>{}\"]+")


def _parser(schemas: Schemas, is_whole: bool) -> BlockParser:
    known = types_by_function(schemas)

    def read(source: Source, calls: ToldCalls) -> Reading:
        yield from source.next_character()
        name, tag = yield from source.until("\n", _MARKS.argument, _MARKS.call_end)
        if not tag or not _NAME.fullmatch(name.strip()):
            return False
        calls.begin(name.strip())
        if tag == _MARKS.call_end:
            return end_call(source, calls)
        types = known(name.strip())
        is_open = tag == _MARKS.argument
        return (yield from read_marked_arguments(source, calls, _MARKS, types, is_open=is_open))

    return BlockParser(Tags(_OPEN), read, _MARKS.call_end, is_whole=is_whole)


def _format(name: str, between: str, shown: str) -> ToolFormat:
    """A format with a fixed text between its parts."""

    def grammar(grammar: CallGrammar) -> str:
        def call(name: str, schema: Schema) -> str:
            return grammar.sequence(
                grammar.text(f"{_OPEN}{name}{between}"),
                grammar.marked(schema, _MARKS, between),
                grammar.text(_MARKS.call_end),
            )

        return grammar.row(grammar.each(call), between)

    return ToolFormat(name, _parser, grammar, lambda template: shown in template, (_OPEN,))


GLM45: Final = _format("glm45", "\n", _MARKS.argument)
GLM47: Final = _format("glm47", "", f"{_MARKS.key_end}{_MARKS.value}")

"""The format of DeepSeek V3.2 and V4: invocations in a markup of its own, DSML."""

from __future__ import annotations

import re
from typing import Final

from kvrelay.text.output_parsers.call_blocks import BlockParser, Tags
from kvrelay.text.output_parsers.call_grammar import CallGrammar, invocation
from kvrelay.text.output_parsers.marked_arguments import Marks, Schemas, marked_blocks
from kvrelay.text.output_parsers.tool_format import ToolFormat

_MARK: Final = "｜DSML｜"
_BLOCKS: Final = {"deepseek_v32": "function_calls", "deepseek_v4": "tool_calls"}
_KEY: Final = re.compile(r'([^"]*)(?:"(?:\s+string="(true|false)")?)?')


def _read_key(text: str) -> tuple[str, bool | None]:
    found = _KEY.match(text)
    assert found is not None, "it matches any text"
    return found[1], None if found[2] is None else found[2] == "true"


_MARKS: Final = Marks(
    call=f'<{_MARK}invoke name="',
    name_end='">',
    call_end=f"</{_MARK}invoke>",
    argument=f'<{_MARK}parameter name="',
    key_end=">",
    value="",
    value_end=f"</{_MARK}parameter>",
    read_key=_read_key,
)


def _format(name: str) -> ToolFormat:
    block = _BLOCKS[name]
    opening, close = f"<{_MARK}{block}>", f"</{_MARK}{block}>"

    def parser(schemas: Schemas, is_whole: bool) -> BlockParser:
        read = marked_blocks(_MARKS, close, schemas)
        return BlockParser(Tags(opening), read, close, is_whole=is_whole)

    def grammar(grammar: CallGrammar) -> str:
        calls = grammar.row(invocation(grammar, _MARKS, '{}" string="{}"'))
        return grammar.sequence(grammar.text(f"{opening}\n"), calls, grammar.text(close))

    def is_shown(template: str) -> bool:  # it may have the mark in a variable
        return _MARK in template and f"{block}>" in template

    return ToolFormat(name, parser, grammar, is_shown, (opening,))


DEEPSEEK_V32: Final = _format("deepseek_v32")
DEEPSEEK_V4: Final = _format("deepseek_v4")

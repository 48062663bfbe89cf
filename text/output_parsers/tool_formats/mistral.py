"""The format ``[TOOL_CALLS]name[ARGS]{…}``, as Mistral's newer models do.

Older ones write ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, which is read, too.
"""

from __future__ import annotations

import secrets
import string
from typing import Final

from kvrelay.text.output_parsers.call_blocks import BlockParser, Reading, Source, Tags, ToldCalls
from kvrelay.text.output_parsers.call_grammar import CallGrammar, call_object
from kvrelay.text.output_parsers.json_readers import json_blocks, read_arguments
from kvrelay.text.output_parsers.marked_arguments import Schema, Schemas
from kvrelay.text.output_parsers.tool_format import ToolFormat

_OPEN: Final = "[TOOL_CALLS]"
_ARGUMENTS: Final = "[ARGS]"
_ID: Final = "[CALL_ID]"
_ID_CHARACTERS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9
"""The length that Mistral's templates demand."""


def _read(source: Source, calls: ToldCalls) -> Reading:
    first = yield from source.next_character()
    if first in ("[", "{"):
        return (yield from json_blocks()(source, calls))
    name, tag = yield from source.until(_ARGUMENTS, _ID, "{")
    call_id = ""
    if tag == _ID:
        call_id, tag = yield from source.until(_ARGUMENTS)
    name = name.strip()
    if not tag or not name or any(one.isspace() for one in name):
        return False
    if tag == "{":
        source.give_back(tag)
    return (yield from read_arguments(source, calls, name, call_id.strip()))


def _parser(_schemas: Schemas, is_whole: bool) -> BlockParser:
    return BlockParser(Tags(_OPEN), _read, is_whole=is_whole)


def _new_grammar(grammar: CallGrammar) -> str:
    def call(name: str, schema: Schema) -> str:
        return grammar.sequence(grammar.text(f"{_OPEN}{name}{_ARGUMENTS}"), grammar.json(schema))

    return grammar.row(grammar.each(call))


def _old_grammar(grammar: CallGrammar) -> str:
    calls = grammar.row(call_object(grammar), ", ")
    return grammar.sequence(grammar.text(f"{_OPEN} ["), calls, grammar.text("]"))


def _new_id(_name: str, _number: int) -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


MISTRAL: Final = ToolFormat(
    "mistral",
    _parser,
    _new_grammar,
    lambda template: _OPEN in template and _ARGUMENTS in template,
    (_OPEN,),
    new_id=_new_id,
)
MISTRAL_LIST: Final = ToolFormat(
    "mistral_list",
    _parser,
    _old_grammar,
    lambda template: _OPEN in template,
    (_OPEN,),
    new_id=_new_id,
)

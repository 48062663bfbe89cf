"""The format of DeepSeek V3 and R1: a call's type, its name, and arguments in a fence of JSON."""

from __future__ import annotations

from typing import Final

from kvrelay.text.output_parsers.call_blocks import (
    BlockParser,
    Reader,
    Reading,
    Source,
    Tags,
    ToldCalls,
)
from kvrelay.text.output_parsers.call_grammar import CallGrammar
from kvrelay.text.output_parsers.json_readers import read_arguments
from kvrelay.text.output_parsers.marked_arguments import Schema, Schemas
from kvrelay.text.output_parsers.tool_format import ToolFormat

OPEN: Final = "<｜tool▁calls▁begin｜>"
CLOSE: Final = "<｜tool▁calls▁end｜>"
CALL_OPEN: Final = "<｜tool▁call▁begin｜>"
CALL_CLOSE: Final = "<｜tool▁call▁end｜>"
BETWEEN: Final = "<｜tool▁sep｜>"


def calls_between(opening: str, close: str, read_call: Reader) -> Reader:
    """Return a reader of blocks of calls, each behind a tag of its own.

    Args:
        opening: begins a call.
        close: ends the block.
        read_call: reads a call and its end.
    """

    def read(source: Source, calls: ToldCalls) -> Reading:
        has_calls = False
        while (yield from source.skip(opening)):
            if not (yield from read_call(source, calls)):
                return False
            has_calls = True
        if has_calls:
            yield from source.close(close)
        return has_calls

    return read


def read_call(source: Source, calls: ToldCalls) -> Reading:
    """Read a call of DeepSeek V3, or of V3.1, and its end."""
    name, tag = yield from source.until(BETWEEN)
    if not tag:
        return False
    is_fenced = (yield from source.next_character()) not in ("{", '"', "<")
    if is_fenced:
        name, tag = yield from source.until("\n")
        yield from source.skip("```json")
    name = name.strip()
    if not tag or not name or any(one.isspace() for one in name):
        return False
    if not (yield from read_arguments(source, calls, name)):
        return False
    if is_fenced:
        yield from source.skip("```")
    yield from source.skip(CALL_CLOSE)
    return True


def parser(_schemas: Schemas, is_whole: bool) -> BlockParser:
    """Make a parser of both formats."""
    read = calls_between(CALL_OPEN, CLOSE, read_call)
    return BlockParser(Tags(OPEN), read, CLOSE, is_whole=is_whole)


def _grammar(grammar: CallGrammar) -> str:
    def call(name: str, schema: Schema) -> str:
        return grammar.sequence(
            grammar.text(f"{CALL_OPEN}function{BETWEEN}{name}\n```json\n"),
            grammar.json(schema),
            grammar.text(f"\n```{CALL_CLOSE}"),
        )

    calls = grammar.row(grammar.each(call), "\n")
    return grammar.sequence(grammar.text(OPEN), calls, grammar.text(CLOSE))


DEEPSEEK_V3: Final = ToolFormat(
    "deepseek_v3",
    parser,
    _grammar,
    lambda template: BETWEEN in template and "```json" in template,
    (OPEN,),
)

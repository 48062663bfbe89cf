"""The format ``{"name": …, "parameters": {…}}``, as Llama 3 does."""

from __future__ import annotations

import re
from typing import Final

from kvrelay.text.output_parsers.call_blocks import BlockParser, Reading, Source, Tags, ToldCalls
from kvrelay.text.output_parsers.call_grammar import CallGrammar, call_object
from kvrelay.text.output_parsers.held_text import is_long
from kvrelay.text.output_parsers.json_readers import read_json_call
from kvrelay.text.output_parsers.marked_arguments import Schemas
from kvrelay.text.output_parsers.tool_format import ToolFormat

_TAG: Final = "<|python_tag|>"
_AROUND: Final = ("<|python_start|>", "<|python_end|>")
"""The tags that Llama 4 writes around text before calls, or around calls; they are no content."""
_TAGS: Final = (_TAG, *_AROUND)
_BEFORE: Final = " \n\t\r[;,"
_IN_TEXT: Final = re.compile(r'\{\s{0,64}"name"\s{0,64}:')
_BEGUN: Final = re.compile(r'\{\s{0,64}(?:"(?:n(?:a(?:m(?:e(?:"\s{0,64})?)?)?)?)?)?')
"""The beginning of what `_IN_TEXT` matches."""


class _JsonStart:
    """An opening that is a JSON object, or a tag before one."""

    def __init__(self) -> None:
        self.is_in_text = False
        """The latest object has text before it, so it may be no call."""

    def find(self, text: str, *, is_start: bool) -> tuple[int, int] | None:
        """Return the place and the length of the first opening tag; None: there is none."""
        self.is_in_text = False
        bare = text.lstrip(_BEFORE)
        if is_start and bare.startswith("{") and not is_long(len(text) - len(bare)):
            return 0, len(text) - len(bare)
        tag, found = Tags(*_TAGS).find(text), _IN_TEXT.search(text)
        if found is not None and (tag is None or found.start() < tag[0]):
            self.is_in_text = True
            return found.start(), 0
        return tag

    def possible(self, text: str, *, is_start: bool) -> int:
        """Return the number of characters at the end that an opening tag may begin with."""
        bare = text.lstrip(_BEFORE)
        if (
            is_start
            and any(one.startswith(bare) for one in _TAGS)
            and not is_long(len(text) - len(bare))
        ):
            return len(text)
        at = text.rfind("{")
        begun = len(text) - at
        is_begun = at >= 0 and _BEGUN.fullmatch(text, at)
        return begun if is_begun else Tags(*_TAGS).possible(text)


def json_calls_parser(schemas: Schemas, is_whole: bool) -> BlockParser:
    """Make a parser; an object within text is a call if its name is a tool's."""
    opening = _JsonStart()

    def is_tool(name: str) -> bool:
        return bool(name) and (not schemas or name in schemas)

    def read(source: Source, calls: ToldCalls) -> Reading:
        check = is_tool if opening.is_in_text else None
        source.is_text = not source.taken.endswith(_TAGS)
        if source.taken.endswith(_AROUND) and (yield from source.next_character()) not in (
            "[",
            "{",
        ):
            return True
        yield from source.skip("[")
        while (yield from read_json_call(source, calls, check)):
            has_more = False
            while between := (yield from source.skip(",", ";", "]", *_TAGS)):
                has_more = between not in ("]", *_AROUND)
            if not (yield from source.skip("{")):
                return source.has_ended or not has_more
            source.give_back("{")
        return False

    return BlockParser(opening, read, is_whole=is_whole)


def _grammar(grammar: CallGrammar) -> str:
    return grammar.row(call_object(grammar, key="parameters"), "; ")


LLAMA3_JSON: Final = ToolFormat(
    "llama3_json", json_calls_parser, _grammar, lambda template: '"parameters"' in template
)

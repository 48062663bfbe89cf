"""The format ``functools[{"name": …, "arguments": {…}}, …]``, as Phi-4 mini does.

Its own template has ``<|tool_call|>[…]<|/tool_call|>`` in place of it, which is read, too.
"""

from __future__ import annotations

import re
from typing import Final

from kvrelay.text.output_parsers.call_blocks import BlockParser, Tags
from kvrelay.text.output_parsers.call_grammar import CallGrammar, call_object
from kvrelay.text.output_parsers.json_readers import json_blocks
from kvrelay.text.output_parsers.marked_arguments import Schemas
from kvrelay.text.output_parsers.tool_format import ToolFormat

_WORD: Final = "functools["
_OPEN: Final = "<|tool_call|>"
_CLOSE: Final = "<|/tool_call|>"
_TOOLS: Final = re.compile(r"(?<!['\"])\btools\b(?!['\"])")
"""The tools of a call: Microsoft's template takes them from a message alone."""


def _parser(_schemas: Schemas, is_whole: bool) -> BlockParser:
    tags, read = Tags(_WORD, _OPEN), json_blocks(_CLOSE)
    return BlockParser(tags, read, _CLOSE, is_whole=is_whole)


def _grammar(grammar: CallGrammar) -> str:
    calls = grammar.row(call_object(grammar), ", ")
    return grammar.sequence(grammar.text(grammar.opening or _WORD), calls, grammar.text("]"))


def _is_shown(template: str) -> bool:
    has_tags = _WORD in template or "<|/tool|>" in template
    return has_tags and _TOOLS.search(template) is not None


PHI4_MINI: Final = ToolFormat(
    "phi4_mini_json",
    _parser,
    _grammar,
    _is_shown,
    (_WORD, f"{_OPEN}["),
)

"""The format ``[name(argument=value)]``, as Llama 3.2 does; Llama 4 has tags around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvrelay.text.output_parsers.call_blocks import BlockParser, Reading, Source, Tags, ToldCalls
from kvrelay.text.output_parsers.call_grammar import CallGrammar, NoGrammarError, simple_arguments
from kvrelay.text.output_parsers.marked_arguments import Schema
from kvrelay.text.output_parsers.pieces import OutputPiece
from kvrelay.text.output_parsers.pythonic import PythonicParser, is_name
from kvrelay.text.output_parsers.tool_format import ToolFormat

_OPEN: Final = "<|python_start|>"
_CLOSE: Final = "<|python_end|>"
_PLAIN: Final = frozenset({"string", "number", "integer"})
"""The types whose values are alike in JSON and in Python."""
_MOST: Final = 16 << 10
_SPACES: Final = r"\x09-\x0d\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""Python's white space, as in a class of characters."""
_SPACE: Final = f"[{_SPACES}]"


def _read(source: Source, calls: ToldCalls) -> Reading:
    text, has_more = "", True
    pieces: list[OutputPiece] = []
    while has_more and not pieces:  # a closing tag within a string ends nothing
        part, tag = yield from source.until(_CLOSE, most=_MOST - len(text))
        if not tag and (source.is_cut or not source.has_ended):
            return False
        parser = PythonicParser()
        pieces = [*parser.push(text + part), *parser.finish()]
        if any(piece.content for piece in pieces):
            pieces = []
        text, has_more = text + part + tag, bool(tag)
    if not pieces:
        return False
    for piece in pieces:
        if piece.name:
            calls.begin(piece.name)
        else:
            calls.add(piece.arguments)
            calls.end()
    source.settle()
    return True


class Llama4Parser:
    """A parser of calls between tags, and of outputs that are calls alone, without tags.

    Args:
        is_whole: tell a call when it is complete.
    """

    def __init__(self, *, is_whole: bool = False) -> None:
        self._tagged = BlockParser(Tags(_OPEN), _read, _CLOSE, is_whole=is_whole)
        self._bare = PythonicParser()
        self._has_calls = False

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The pieces that are certain after some more text."""
        return self._all(self._tagged.push(text))

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputPiece]:
        """The remaining pieces; calls that were cut off are none."""
        pieces = self._all(self._tagged.finish(is_cut=is_cut))
        return pieces if self._has_calls else [*pieces, *self._bare.finish(is_cut=is_cut)]

    def _all(self, pieces: Sequence[OutputPiece]) -> list[OutputPiece]:
        found: list[OutputPiece] = []
        for piece in pieces:
            if piece.call is not None and not self._has_calls:
                self._has_calls = True
                found += self._bare.finish(is_cut=True)
            if piece.call is not None or self._has_calls:
                found.append(piece)
            else:
                found += self._bare.push(piece.content)
        return found


def _bare_grammar(grammar: CallGrammar) -> str:
    def call(name: str, schema: Schema) -> str:
        def argument(key: str, described: Any) -> str:
            if not is_name(key) or "." in key:
                raise NoGrammarError
            return grammar.sequence(grammar.text(f"{key}="), _literal(grammar, described, schema))

        arguments = simple_arguments(grammar, schema, argument, ", ")
        return grammar.sequence(grammar.text(f"{name}("), arguments, grammar.text(")"))

    if not all(map(is_name, grammar.schemas)):
        raise NoGrammarError
    calls = grammar.row(grammar.each(call), ", ")
    return grammar.sequence(grammar.text("["), calls, grammar.text("]"))


def _text_grammar(grammar: CallGrammar) -> str:
    """Write the grammar of calls alone, or of text that does not begin as they do."""
    calls, free = _bare_grammar(grammar), grammar.free_text()
    return rf"{calls} | /{_SPACE}*/ | /{_SPACE}*([^\[{_SPACES}]|\[[^A-Za-z_{_SPACES}])/ {free}"


def _literal(grammar: CallGrammar, described: Any, root: Schema) -> str:
    """A value as Python writes it."""
    if not isinstance(described, dict):
        raise NoGrammarError
    if described.keys() == {"anyOf"} and isinstance(described["anyOf"], list):
        return grammar.one_of([_literal(grammar, one, root) for one in described["anyOf"]])
    types = grammar.types_of(described, root)
    if types == {"boolean"}:
        return grammar.one_of([grammar.text("True"), grammar.text("False")])
    if types == {"null"}:
        return grammar.text("None")
    items = grammar.types_of(described.get("items"), root) if types == {"array"} else types
    if not items <= _PLAIN:
        raise NoGrammarError
    return grammar.value(described, root)


def _is_shown(template: str) -> bool:
    """Tell whether a template shows tags around calls, and not around other text alone."""
    names_calls = "func_name1(" in template and "<|header_start|>" in template
    return names_calls or (_OPEN in template and '"parameters"' not in template)


def _tagged_grammar(grammar: CallGrammar) -> str:
    calls = _bare_grammar(grammar)
    return grammar.sequence(grammar.text(_OPEN), calls, grammar.text(_CLOSE))


PYTHONIC: Final = ToolFormat(
    "pythonic",
    lambda _schemas, _is_whole: PythonicParser(),
    _bare_grammar,
    lambda template: "func_name1(" in template,
    text_grammar=_text_grammar,
)
LLAMA4_PYTHONIC: Final = ToolFormat(
    "llama4_pythonic",
    lambda _schemas, is_whole: Llama4Parser(is_whole=is_whole),
    _tagged_grammar,
    _is_shown,
    (_OPEN,),
)

"""The format ``[name(argument=value)]``, and nothing else."""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Iterable, Sequence
from typing import Final

from kvrelay.text.output_parsers.held_text import is_long
from kvrelay.text.output_parsers.pieces import OutputPiece

_MOST: Final = 16 << 10

_TOKEN: Final = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*\\?'?|"(?:[^"\\]|\\.)*\\?"?)"""
    r"""|(?P<name>[A-Za-z_][\w.]*)|(?P<number>[\d.][\w.]*)|(?P<mark>\S)""",
    re.DOTALL,
)
_CLOSES: Final = {")": "(", "]": "[", "}": "{"}
_IN_VALUES: Final = frozenset(",:+-")
_IN_CALL: Final = ["[", "("]
"""The brackets that are open around a call's arguments."""


KEYWORDS: Final = tuple(keyword.kwlist)
"""The words that are no names in Python."""


def is_name(text: str) -> bool:
    """Whether a text is a name, perhaps with dots, that the parser reads in a call."""
    return text.isascii() and all(
        part.isidentifier() and part not in KEYWORDS for part in text.split(".")
    )


class PythonicParser:
    """A parser of outputs that are calls alone, as a Python list, or else content alone.

    Calls come whole, at the end. An output of more than `_MOST` characters is content: to read it
    at once would hold up everybody.
    """

    _MAY_BE_CALLS: Final = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*\s*(\(.*)?)?)?", re.DOTALL)

    def __init__(self) -> None:
        self._held = ""
        self._arguments: list[str] = []
        """The text behind `_held`, once a call's arguments have begun."""
        self._room = _MOST
        self._is_content = False
        self._in_arguments = False
        """A call's arguments have begun: whether it is a call is known at the end."""

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The pieces that are certain after some more text."""
        if self._is_content:
            return [OutputPiece(content=text)] if text else []
        self._room -= len(text)
        if self._in_arguments:
            self._arguments.append(text)
        else:
            self._held += text
            self._look()
        if self._room < 0:
            self._is_content = True
        if not self._is_content:
            return []
        content = self._take()
        return [OutputPiece(content=content)] if content else []

    def _look(self) -> None:
        """Decide whether the held text may be calls."""
        found = self._MAY_BE_CALLS.fullmatch(self._held)
        self._in_arguments = found is not None and found[3] is not None
        begins = self._held.find("(") if self._in_arguments else len(self._held)
        self._is_content = found is None or is_long(begins)

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputPiece]:
        """The calls, or the content that looked like them.

        Calls that were cut off are neither.
        """
        held = self._take()
        if self._is_content or not held:
            return []
        calls = _python_calls(held)
        if calls is None and is_cut and self._in_arguments and _begins_calls(held):
            return []
        return calls or [OutputPiece(content=held)]

    def _take(self) -> str:
        held = "".join([self._held, *self._arguments])
        self._held, self._arguments = "", []
        return held


def _python_calls(text: str) -> list[OutputPiece] | None:
    """The calls in a Python list; None if the text is not such a list."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        calls = parsed.elts if isinstance(parsed, ast.List) else []
        return [piece for number, call in enumerate(calls) for piece in _call(number, call)] or None
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def _begins_calls(text: str) -> bool:
    """Whether a text that was cut off may go on as a list of calls with named arguments."""
    opened: list[str] = []
    before = ""
    """The mark before, or the kind of what stands in its place."""
    is_named = False  # the argument
    for token in _TOKEN.finditer(text):
        mark, kind = token["mark"], token.lastgroup or ""
        begins = opened == _IN_CALL and before in ("(", ",")
        follows = before in ("text", "name", "number", ")", "]", "}")
        is_named = is_named and not begins
        if mark is None:
            if (follows and (before, kind) != ("text", "text")) or (begins and kind != "name"):
                return False
            before = kind
            continue
        if opened == _IN_CALL and not is_named and mark != "=" and (mark != ")" or not begins):
            return False
        if mark in _CLOSES:
            if not opened or opened.pop() != _CLOSES[mark]:
                return False
        elif mark in _CLOSES.values():
            if follows != (opened == ["["]):
                return False
            opened.append(mark)
        elif mark == "=":
            if opened != _IN_CALL or is_named or before != "name":
                return False
            is_named = True
        elif mark not in _IN_VALUES:
            return False
        before = mark
    return True


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return f"{_name(function.value)}.{function.attr}"
    if not isinstance(function, ast.Name):
        raise ValueError("no name of a function")
    return function.id


def _call(number: int, call: ast.expr) -> Iterable[OutputPiece]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call with named arguments")
    values = {one.arg or "": ast.literal_eval(one.value) for one in call.keywords}
    yield OutputPiece(call=number, name=_name(call.func))
    yield OutputPiece(
        call=number, arguments=json.dumps(values, ensure_ascii=False, allow_nan=False)
    )

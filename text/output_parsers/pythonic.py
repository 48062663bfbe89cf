"""The format ``[name(argument=value)]``, and nothing else."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Sequence
from typing import Final

from kvrelay.text.output_parsers.held_text import is_long
from kvrelay.text.output_parsers.pieces import OutputPiece


class PythonicParser:
    """A parser of outputs that are calls alone, as a Python list, or else content alone.

    Calls come whole, at the end.
    """

    _MAY_BE_CALLS: Final = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*\s*(\(.*)?)?)?", re.DOTALL)

    def __init__(self) -> None:
        self._held = ""
        self._is_content = False
        self._in_arguments = False
        """A call's arguments have begun: whether it is a call is known at the end."""

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The pieces that are certain after some more text."""
        self._held += text
        if not self._is_content and not self._in_arguments:
            self._look()
        if not self._is_content or not self._held:
            return []
        content, self._held = self._held, ""
        return [OutputPiece(content=content)]

    def _look(self) -> None:
        """Decide whether the held text may be calls."""
        found = self._MAY_BE_CALLS.fullmatch(self._held)
        self._in_arguments = found is not None and found[3] is not None
        begins = self._held.find("(") if self._in_arguments else len(self._held)
        self._is_content = found is None or is_long(begins)

    def finish(self) -> Sequence[OutputPiece]:
        """The calls, or the content that looked like them."""
        held, self._held = self._held, ""
        if self._is_content or not held:
            return []
        return _python_calls(held) or [OutputPiece(content=held)]


def _python_calls(text: str) -> list[OutputPiece] | None:
    """The calls in a Python list; None if the text is not such a list."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        calls = parsed.elts if isinstance(parsed, ast.List) else []
        return [piece for number, call in enumerate(calls) for piece in _call(number, call)] or None
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def _call(number: int, call: ast.expr) -> Iterable[OutputPiece]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call with named arguments")
    values = {one.arg or "": ast.literal_eval(one.value) for one in call.keywords}
    yield OutputPiece(call=number, name=ast.unparse(call.func))
    yield OutputPiece(
        call=number, arguments=json.dumps(values, ensure_ascii=False, allow_nan=False)
    )

"""The format ``{"name": …, "parameters": {…}}``: one or several objects, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvrelay.text.output_parsers.held_text import is_long
from kvrelay.text.output_parsers.json_calls import JsonCall, JsonCalls
from kvrelay.text.output_parsers.pieces import OutputPiece, all_pieces


class JsonCallsParser:
    """A parser of outputs that are calls alone, in a row or in a list, or content alone.

    Args:
        is_whole: tell a call when it is complete, and only if its arguments are JSON.
    """

    _TAG: Final = "<|python_tag|>"
    _BETWEEN: Final = " \n\t\r[];,"

    def __init__(self, *, is_whole: bool = False) -> None:
        self._held = ""
        self._before = ""
        self._call: JsonCall | None = None
        self._calls = JsonCalls(is_whole=is_whole)
        self._is_content = False

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The pieces that are certain after some more text."""
        self._held += text
        return all_pieces(self._step)

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputPiece]:
        """The remaining pieces; a call that was cut off is none, once it has its name."""
        if self._calls.in_call or (is_cut and self._call is not None and self._call.name):
            return []
        begun = self._call.text if self._call is not None else ""
        text = self._before + begun + self._held
        if self._calls.num_begun and text.strip(self._BETWEEN) in ("", self._TAG):
            return []
        return [OutputPiece(content=text)] if text else []

    def _step(self, pieces: list[OutputPiece]) -> bool:
        """Take what can be taken of the held text; return whether there may be more."""
        if self._is_content:
            pieces += [OutputPiece(content=self._held)] if self._held else []
            self._held = ""
            return False
        if self._call is None:
            behind = self._held.lstrip(self._BETWEEN)
            is_tag_begun = self._TAG.startswith(behind)
            if not is_tag_begun:
                behind = behind.removeprefix(self._TAG).lstrip(self._BETWEEN)
            if is_long(len(self._held) - len(behind)):
                self._is_content = True
                return True
            if is_tag_begun or not behind:
                return False
            self._before = self._held[: len(self._held) - len(behind)]
            self._call, self._held = JsonCall(), behind
        self._held = self._call.push(self._held)
        pieces += self._calls.pieces(self._call)
        if self._calls.refuses(self._call):
            self._held = self._before + self._call.text + self._held
            self._before, self._call, self._is_content = "", None, True
            return True
        if not self._call.is_complete:
            return False
        self._before, self._call = "", None
        return bool(self._held)

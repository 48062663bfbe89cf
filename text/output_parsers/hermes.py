"""The format ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, with content between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvrelay.text.output_parsers.held_text import EndingSpace, is_long, overlap
from kvrelay.text.output_parsers.json_calls import JsonCall, JsonCalls
from kvrelay.text.output_parsers.pieces import OutputPiece, all_pieces


class HermesParser:
    """A parser of content with calls in it, each between two tags.

    Args:
        is_whole: tell a call when it is complete, and only if its arguments are JSON.
    """

    _OPEN: Final = "<tool_call>"
    _CLOSE: Final = "</tool_call>"

    def __init__(self, *, is_whole: bool = False) -> None:
        self._held = ""
        self._before = ""
        """The white space and the tag before the call."""
        self._call: JsonCall | None = None
        self._calls = JsonCalls(is_whole=is_whole)
        self._space = EndingSpace()
        self._is_unclosed = False
        """Something else has come in place of the latest call's closing tag."""

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The pieces that are certain after some more text."""
        self._held += text
        return all_pieces(self._step)

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputPiece]:
        """The remaining pieces; a call that was cut off is none."""
        call, held = self._call, self._held
        self._held, self._call = "", None
        if call is None:
            return self._content(held)
        if self._calls.in_call or call.is_complete or is_cut:
            return []
        return [OutputPiece(content=self._before + call.text + held)]

    def _step(self, pieces: list[OutputPiece]) -> bool:
        """Take what can be taken of the held text; return whether there may be more."""
        if self._call is not None:
            return self._step_in_call(self._call, pieces)
        tags = (self._OPEN, self._CLOSE) if self._is_unclosed else (self._OPEN,)
        found = [(at, tag) for tag in tags if (at := self._held.find(tag)) >= 0]
        if not found:
            possible = max(overlap(self._held, tag) for tag in tags)
            # White space waits for what comes: it may be that before a call.
            sure = self._space.cut(self._held[: len(self._held) - possible])
            pieces += self._content(sure)
            self._held = self._held[len(sure) :]
            return False
        at, tag = min(found)
        said = self._space.cut(self._held[:at])
        pieces += self._content(said)
        self._is_unclosed = self._space.is_long = False
        if tag == self._OPEN:
            self._before, self._call = self._held[len(said) : at + len(tag)], JsonCall()
        self._held = self._held[at + len(tag) :]
        return True

    def _step_in_call(self, call: JsonCall, pieces: list[OutputPiece]) -> bool:
        if not call.is_complete:
            self._held = call.push(self._held)
            pieces += self._calls.pieces(call)
            if self._calls.refuses(call):
                pieces.append(OutputPiece(content=self._before + call.text))
                self._call = None
                return True
            if not call.is_complete:
                return False
        behind = self._held.lstrip()
        is_near = not is_long(len(self._held) - len(behind))
        if is_near and len(behind) < len(self._CLOSE) and self._CLOSE.startswith(behind):
            return False
        if is_near and behind.startswith(self._CLOSE):
            self._held = behind.removeprefix(self._CLOSE)
        else:  # what follows is content or another call
            self._is_unclosed = True
        self._call = None
        return True

    def _content(self, text: str) -> list[OutputPiece]:
        """The content; short white space between calls does not count."""
        between = self._calls.num_begun and not self._space.is_long
        if not text or (between and not text.strip()):
            return []
        return [OutputPiece(content=text)]

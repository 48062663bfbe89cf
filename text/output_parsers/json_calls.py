"""Tool calls that are JSON objects, parsed while they arrive."""

from __future__ import annotations

import json
from collections.abc import Iterable

from kvrelay.text.output_parsers.pieces import OutputPiece


class JsonCall:
    """One call, a JSON object with a name and arguments, parsed while it arrives."""

    def __init__(self) -> None:
        self.text = ""
        self.name = ""
        self.is_complete = False
        self.is_bad = False
        """The text cannot become a call."""
        self._at = self._depth = self._string_begin = self._told = 0
        self._in_string = self._escaped = False
        self._key = self._last_string = ""
        self._value_begin = 0
        self._arguments: tuple[int, int | None] | None = None

    def push(self, text: str) -> str:
        """Take text up to the object's end, or to where it is bad; return the text behind that."""
        self.text += text
        while self._at < len(self.text) and not (self.is_complete or self.is_bad):
            self._take(self.text[self._at])
            self._at += 1
        if not self.is_complete and not self.is_bad:
            return ""
        if self.is_bad:
            self._at -= 1  # this character may begin something else
        self.is_bad = not self.name
        rest, self.text = self.text[self._at :], self.text[: self._at]
        return rest

    def new_arguments(self) -> str:
        """The arguments that have come since the last use of this; none until the name is known."""
        if not self.name or self._arguments is None:
            return ""
        begin, end = self._arguments
        said = self.text[begin : self._at if end is None else end].strip()
        new, self._told = said[self._told :], max(self._told, len(said))
        return new

    def _take(self, character: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                self._last_string = self.text[self._string_begin : self._at + 1]
        elif self._depth == 0 and character != "{":
            self.is_bad = not character.isspace()
        elif character == '"':
            self._in_string, self._string_begin = True, self._at
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()
                self.is_complete = True
        elif self._depth == 1:
            self._between(character)

    def _between(self, character: str) -> None:
        if character == ":":
            self._key, self._value_begin = self._last_string, self._at + 1
            # The first arguments count: what was reported of them stays.
            if self._key in ('"arguments"', '"parameters"') and self._arguments is None:
                self._arguments = (self._value_begin, None)
        elif character == ",":
            self._end_value()

    def _end_value(self) -> None:
        if self._key == '"name"' and not self.name:
            try:
                name = json.loads(self.text[self._value_begin : self._at])
            except ValueError:
                name = ""
            self.name = name if isinstance(name, str) else ""
        elif self._arguments is not None and self._arguments[1] is None:
            self._arguments = (self._arguments[0], self._at)
        self._key = ""


class JsonCalls:
    """The numbering of calls, and the pieces of each."""

    def __init__(self) -> None:
        self.num_begun = 0
        self._is_told = False
        self._has_arguments = False

    def pieces(self, call: JsonCall) -> Iterable[OutputPiece]:
        """Yield what is new of the latest call."""
        if call.name and not self._is_told:
            self._is_told = True
            self.num_begun += 1
            yield OutputPiece(call=self.num_begun - 1, name=call.name)
        arguments = call.new_arguments()
        if arguments:
            self._has_arguments = True
            yield OutputPiece(call=self.num_begun - 1, arguments=arguments)
        if call.is_complete and self._is_told:
            if not self._has_arguments:
                yield OutputPiece(call=self.num_begun - 1, arguments="{}")
            self._is_told = self._has_arguments = False

    @property
    def in_call(self) -> bool:
        """Whether a call was begun that is not complete."""
        return self._is_told

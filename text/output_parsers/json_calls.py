"""Tool calls that are JSON objects, parsed while they arrive."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NoReturn

from kvrelay.text.output_parsers.pieces import OutputPiece


class JsonCall:
    """One call, a JSON object with a name and arguments, parsed while it arrives.

    Each character is looked at once, however the text is cut.
    """

    def __init__(self) -> None:
        self.name = ""
        self.is_complete = False
        self.is_bad = False
        """The text cannot become a call."""
        self._taken: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False
        self._string: list[str] = []
        """The latest string, with its quotes: a key, if a colon follows."""
        self._key = ""
        self._named: list[str] = []
        """The value of the name, as it comes."""
        self._has_arguments = self._is_begun = False
        self._new: list[str] = []
        """The arguments that `new_arguments` has not returned yet."""
        self._space: list[str] = []
        """The white space behind them, which is a part of them if more follows."""

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self._taken)

    @property
    def has_whole_arguments(self) -> bool:
        """Whether the arguments, none of which were told yet, are JSON."""
        return is_json("".join(self._new) or "{}")

    def push(self, text: str) -> str:
        """Take text up to the object's end, or to where it is bad; return the text behind that."""
        at = 0
        while at < len(text) and not (self.is_complete or self.is_bad):
            self._take(text[at])
            at += 1
        if self.is_bad:
            at -= 1  # this character may begin something else
        self._taken.append(text[:at])
        if self.is_complete or self.is_bad:
            self.is_bad = not self.name
        return text[at:]

    def new_arguments(self) -> str:
        """The arguments that have come since the last use of this; none until the name is known."""
        if not self.name:
            return ""
        new, self._new = "".join(self._new), []
        return new

    def _take(self, character: str) -> None:
        if self._in_string:
            self._string.append(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif self._depth == 0 and character != "{":
            self.is_bad = not character.isspace()
        elif character == '"':
            self._in_string, self._string = True, ['"']
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()
                self.is_complete = True
        elif self._depth == 1 and character == ":":
            self._begin_value()
            return
        elif self._depth == 1 and character == ",":
            self._end_value()
        self._keep(character)

    def _begin_value(self) -> None:
        self._key = "".join(self._string)
        if self._key in ('"arguments"', '"parameters"'):
            if self._has_arguments:  # the first arguments count: what was told of them stays
                self._key = ""
            self._has_arguments = True
        self._named = []

    def _keep(self, character: str) -> None:
        """Add a character to the value that it is a part of."""
        if self._key == '"name"':
            self._named.append(character)
        elif self._key in ('"arguments"', '"parameters"'):
            if character.isspace():
                self._space.append(character)
                return
            if self._is_begun:
                self._new += self._space
            self._is_begun = True
            self._space = []
            self._new.append(character)

    def _end_value(self) -> None:
        if self._key == '"name"' and not self.name:
            try:
                name = json.loads("".join(self._named))
            except ValueError:
                name = ""
            self.name = name if isinstance(name, str) else ""
        self._key = ""


def is_json(text: str) -> bool:
    """Whether a text is JSON as clients read it."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


class JsonCalls:
    """The numbering of calls, and the pieces of each.

    Args:
        is_whole: tell a call when it is complete, and only if its arguments are JSON.
    """

    def __init__(self, *, is_whole: bool) -> None:
        self.num_begun = 0
        self._is_whole = is_whole
        self._is_told = False
        self._has_arguments = False

    def refuses(self, call: JsonCall) -> bool:
        """Whether a call is none after all."""
        if call.is_bad:
            return True
        return self._is_whole and call.is_complete and not call.has_whole_arguments

    def pieces(self, call: JsonCall) -> Iterable[OutputPiece]:
        """Yield what is new of the latest call."""
        if self.refuses(call) or (self._is_whole and not call.is_complete):
            return
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

"""The input of a call of a custom tool, read from its arguments in JSON while they arrive."""

from __future__ import annotations

import json
import re
from typing import Final

from kvrelay.router.doors.http.responses.called_tools import INPUT

_BEGINNING: Final = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_MOST_BEGINNING: Final = 64
_SURE: Final = re.compile(
    r'(?:[^"\\\ud800-\udfff]++'
    r'|\\["\\/bfnrt]'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
"""Characters of a JSON string that more text cannot change: half an escape is not among them."""

_LONGEST_ESCAPE: Final = len(r"\ud83d\ude00")
_SHORTEST_ESCAPE: Final = 2
_ESCAPE: Final = re.compile(r"\\u[0-9a-fA-F]{4}")


class CustomInput:
    """A reader of arguments that are an object with one text.

    Each piece is looked at once; what is held back is shorter than an escape, or than the
    beginning of the object. Arguments of another form are told at their end.
    """

    def __init__(self) -> None:
        self._held = ""
        self._parts: list[str] = []
        """All arguments, until the text has begun."""
        self._has_begun = self._has_ended = self._is_other = False

    def push(self, arguments: str) -> str:
        """Take some more arguments; return the text that they bring."""
        if self._has_ended:
            return ""
        if not self._has_begun:
            self._parts.append(arguments)
            if self._is_other:
                return ""
        self._held += arguments
        if not self._has_begun and not self._begin():
            return ""
        return self._text(_LONGEST_ESCAPE)

    def finish(self) -> str:
        """Return the remaining text, as all arguments are there."""
        if self._has_begun:
            return self._text(_SHORTEST_ESCAPE)
        arguments = "".join(self._parts)
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        text = read.get(INPUT) if isinstance(read, dict) else read
        return text if isinstance(text, str) else arguments

    def _text(self, enough: int) -> str:
        """Take what is certain; an escape is, whatever it is, if so many characters are there."""
        text = ""
        while not self._has_ended:
            sure = _SURE.match(self._held)
            assert sure is not None, "it matches the empty text"
            text += json.loads(f'"{sure[0]}"', strict=False)
            self._held = self._held[sure.end() :]
            self._has_ended = self._held.startswith('"')
            if self._has_ended or len(self._held) < enough:
                break
            escape = _ESCAPE.match(self._held)
            taken = 1 if escape is None else escape.end()
            text += json.loads(f'"{escape[0]}"') if escape is not None else self._held[0]
            self._held = self._held[taken:]
        return text

    def _begin(self) -> bool:
        """Look for the text's beginning; return whether it is there."""
        found = _BEGINNING.match(self._held)
        if found is not None:
            self._held, self._has_begun = self._held[found.end() :], True
            self._parts.clear()
        elif len(self._held) > _MOST_BEGINNING:
            self._is_other, self._held = True, ""
        return self._has_begun

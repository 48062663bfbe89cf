"""Tool calls that are JSON objects, parsed while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final, NoReturn

IN_STRING: Final = re.compile(r'["\\]')
"""The characters of a string in JSON that are none of its text."""
_ARGUMENTS: Final = ('"arguments"', '"parameters"')
_OTHER_KEYS: Final = ('"name"', '"type"', '"id"')
"""The members of a call beside its arguments."""


class JsonCall:
    """One call, a JSON object with a name and arguments, parsed while it arrives.

    Each character is looked at once, however the text is cut.

    Args:
        is_tool: tells whether a name is a tool's, if the object may be something else than a call;
            it then has a call's members alone.
    """

    def __init__(self, is_tool: Callable[[str], bool] | None = None) -> None:
        self._is_tool = is_tool
        self.name = ""
        self.is_complete = False
        self.is_bad = False
        """The text cannot become a call."""
        self._depth = 0
        self._in_string = self._escaped = False
        self._string: list[str] = []
        """The latest string, with its quotes: a key, if a colon follows."""
        self._key = ""
        self._named: list[str] = []
        """The value of the name, as it comes."""
        self._has_arguments = self._is_begun = self._is_wrapped = False
        self._new: list[str] = []
        """The arguments that `new_arguments` has not returned yet."""
        self._space: list[str] = []
        """The white space behind them, which is a part of them if more follows."""

    @property
    def is_certain(self) -> bool:
        """Whether it is a call, whatever follows."""
        return bool(self.name) and (self._is_tool is None or self._has_arguments)

    def push(self, text: str) -> str:
        """Take text up to the object's end, or to where it is bad; return the text behind that."""
        at = 0
        while at < len(text) and not (self.is_complete or self.is_bad):
            if self._in_string and not self._escaped:
                found = IN_STRING.search(text, at)
                end = found.start() if found is not None else len(text)
                if end > at:
                    self._take_plain(text[at:end])
                    at = end
                    continue
            self._take(text[at])
            at += 1
        if self.is_bad:
            at -= 1  # this character may begin something else
        self.is_bad = self.is_bad or (self.is_complete and not self.is_certain)
        return text[at:]

    def new_arguments(self) -> str:
        """The arguments that have come since the last use of this; none until the name is known."""
        if not self.name or self._is_wrapped:
            return ""
        new, self._new = "".join(self._new), []
        return new

    def _take(self, character: str) -> None:
        if self._in_string:
            self._take_in_string(character)
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

    def _take_in_string(self, character: str) -> None:
        if self._depth == 1:
            self._string.append(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False

    def _take_plain(self, text: str) -> None:
        """Take a part of a string, without quotes and backslashes."""
        if self._depth == 1:
            self._string.append(text)
        if self._key == '"name"':
            self._named.append(text)
        elif self._key in _ARGUMENTS:
            self._new += [*self._space, text]
            self._space = []

    def _begin_value(self) -> None:
        self._key = "".join(self._string)
        if self._key in _ARGUMENTS:
            if self._has_arguments:  # the first arguments count: what was told of them stays
                self._key = ""
            self._has_arguments = True
        elif self._is_tool is not None and self._key not in _OTHER_KEYS:
            self.is_bad = True
        self._named = []

    def _keep(self, character: str) -> None:
        """Add a character to the value that it is a part of."""
        if self._key == '"name"':
            self._named.append(character)
        elif self._key in _ARGUMENTS:
            if character.isspace():
                self._space.append(character)
                return
            if self._is_begun:
                self._new += self._space
            elif character == '"':
                self._is_wrapped = True
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
            if self._is_tool is not None and not self._is_tool(self.name):
                self.is_bad = True
        elif self._is_wrapped:
            self._new, self._is_wrapped = [unwrapped("".join(self._new))], False
        self._key = ""


def unwrapped(arguments: str) -> str:
    """Arguments that are a JSON string of an object, as that object; others as they are."""
    try:
        inner = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    is_object = isinstance(inner, str) and inner.lstrip()[:1] == "{" and is_json(inner)
    return inner.strip() if is_object else arguments


def is_json(text: str) -> bool:
    """Whether a text is JSON as clients read it."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")

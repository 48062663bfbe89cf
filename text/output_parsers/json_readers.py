"""Readers of blocks in which arguments, or whole calls, are JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final

from kvrelay.text.output_parsers.call_blocks import Reader, Reading, Source, ToldCalls
from kvrelay.text.output_parsers.json_calls import IN_STRING, JsonCall, unwrapped

_OUTSIDE: Final = re.compile(r'["{}\[\]]')


class _JsonValue:
    """The end of a JSON value, an object or a string, that is looked for while it arrives.

    Each character is looked at once, however the text is cut.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> str:
        """Take text up to the value's end; return the text behind that."""
        at = 0
        if self._escaped and text:
            self._escaped, at = False, 1
        while not self.is_complete:
            found = (IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return ""
            at = found.end()
            mark = found[0]
            if mark == "\\":
                self._escaped = at == len(text)
                at += 1
            elif mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
            self.is_complete = not self._in_string and self._depth <= 0
        return text[at:]


def read_json_call(
    source: Source, calls: ToldCalls, is_tool: Callable[[str], bool] | None = None
) -> Reading:
    """Read one object with a name and arguments; return whether it is a call.

    Args:
        source: the text.
        calls: the calls so far.
        is_tool: as for `JsonCall`.
    """
    call = JsonCall(is_tool)
    while True:
        source.take_with(call.push)
        if call.is_bad:
            return False
        if call.is_certain:
            source.is_text = False
            if not calls.in_call:
                calls.begin(call.name)
            calls.add(call.new_arguments())
        if call.is_complete:
            return end_call(source, calls)
        if source.has_ended:
            return False
        yield


def read_arguments(
    source: Source, calls: ToldCalls, name: str, call_id: str = ""
) -> Generator[None, None, bool]:
    """Read the arguments of a call whose name is known; return whether it is a call.

    Without any they are `{}`.
    """
    first = yield from source.next_character()
    if first not in ("{", '"'):
        is_empty = bool((yield from source.skip("null"))) or first in ("<", "[", "`")
        if source.is_cut or not (is_empty or not first):
            return False
        calls.begin(name, call_id)
        return end_call(source, calls)
    calls.begin(name, call_id)
    value, wrapped = _JsonValue(), list[str]()
    while True:
        before = len(source.text)
        rest = value.push(source.text)
        taken = source.take(before - len(rest))
        if first == '"':
            wrapped.append(taken)
        else:
            calls.add(taken)
        if value.is_complete:
            calls.add(unwrapped("".join(wrapped)))
            return end_call(source, calls)
        if source.has_ended:
            return False
        yield


def end_call(source: Source, calls: ToldCalls) -> bool:
    """End a call; return whether it is one, whose text then is no content."""
    is_call = calls.end()
    if is_call:
        source.settle()
    return is_call


def json_blocks(*closes: str) -> Reader:
    """Return a reader of calls that are JSON objects with a name, one or a list of them.

    Args:
        closes: the closing tags of a block, one of which may follow.
    """

    def read(source: Source, calls: ToldCalls) -> Reading:
        is_list = source.taken.endswith("[") or bool((yield from source.skip("[")))
        while (yield from read_json_call(source, calls)):
            if is_list:
                if (yield from source.skip(",")):
                    continue
                yield from source.skip("]")
            yield from source.close(*closes)
            return True
        return False

    return read

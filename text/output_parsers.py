"""Takes a chat's output apart as it comes: reasoning, content, and calls of tools.

What is said does not depend on where the text is cut. What turns out to be no call is content.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

_MOST_SPACE: Final = 1024
"""Characters of white space, or of a call's name, that wait for what comes behind them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some more of one part of an output."""

    content: str = ""
    reasoning: str = ""
    call: int | None = None
    """The call that it is a part of, from 0."""
    name: str = ""
    """Of the tool; the first piece of a call has it, whole."""
    arguments: str = ""
    """Of the call, in JSON."""


class OutputParser(Protocol):
    """Takes one output apart."""

    def push(self, text: str) -> Sequence[Piece]:
        """What is sure after some more text."""

    def finish(self) -> Sequence[Piece]:
        """The rest: the output has ended."""


class ToolFormat(StrEnum):
    """How a model writes calls."""

    HERMES = "hermes"
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes and Qwen do."""
    LLAMA3_JSON = "llama3_json"
    """``{"name": …, "parameters": {…}}``, and nothing else."""
    PYTHONIC = "pythonic"
    """``[name(argument=value)]``, and nothing else."""


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template tells the model to use; None: none that is known."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return ToolFormat.HERMES if '"arguments"' in template else None
    if "func_name1(" in template:
        return ToolFormat.PYTHONIC
    if '"parameters"' in template:
        return ToolFormat.LLAMA3_JSON
    return None


class _JsonCall:
    """One call, an object with a name and arguments, as it comes."""

    def __init__(self) -> None:
        self.text = ""
        self.name = ""
        self.is_complete = False
        self.is_bad = False
        """It cannot become a call."""
        self._at = self._depth = self._string_begin = self._told = 0
        self._in_string = self._escaped = False
        self._key = self._last_string = ""
        self._value_begin = 0
        self._arguments: tuple[int, int | None] | None = None

    def push(self, text: str) -> str:
        """Take text up to the object's end, or to where it is bad; returns what is behind that."""
        self.text += text
        while self._at < len(self.text) and not (self.is_complete or self.is_bad):
            self._take(self.text[self._at])
            self._at += 1
        if not self.is_complete and not self.is_bad:
            return ""
        if self.is_bad:
            self._at -= 1  # what no call begins with may begin something else
        self.is_bad = not self.name
        rest, self.text = self.text[self._at :], self.text[: self._at]
        return rest

    def new_arguments(self) -> str:
        """What has come of the arguments since the last call of this, once the name is known."""
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
            # The first ones count: what was told of them stays.
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


class _Calls:
    """Numbers calls, and makes pieces of each."""

    def __init__(self) -> None:
        self.num_begun = 0
        self._is_told = False
        self._has_arguments = False

    def pieces(self, call: _JsonCall) -> Iterable[Piece]:
        """What is new of the latest call."""
        if call.name and not self._is_told:
            self._is_told = True
            self.num_begun += 1
            yield Piece(call=self.num_begun - 1, name=call.name)
        arguments = call.new_arguments()
        if arguments:
            self._has_arguments = True
            yield Piece(call=self.num_begun - 1, arguments=arguments)
        if call.is_complete and self._is_told:
            if not self._has_arguments:
                yield Piece(call=self.num_begun - 1, arguments="{}")
            self._is_told = self._has_arguments = False

    @property
    def in_call(self) -> bool:
        """Whether a call was begun that is not complete."""
        return self._is_told


class _EndingSpace:
    """Decides about white space at the end of a text that may be that before a tag.

    So much of it is held back, since all that is held is looked at with each new token. A longer
    run is a part of the text before it, however it was cut.
    """

    def __init__(self) -> None:
        self.is_long = False
        """The latest text has ended in such a run."""

    def cut(self, text: str) -> str:
        """The text, less white space at its end that is not too long."""
        bare = text.rstrip()
        goes_on = self.is_long and not bare
        self.is_long = goes_on or len(text) - len(bare) > _MOST_SPACE
        return text if self.is_long else bare


class HermesParser:
    """Content with calls in it, each between two tags."""

    _OPEN: Final = "<tool_call>"
    _CLOSE: Final = "</tool_call>"

    def __init__(self) -> None:
        self._held = ""
        self._before = ""
        """White space and tag before the call."""
        self._call: _JsonCall | None = None
        self._calls = _Calls()
        self._space = _EndingSpace()
        self._is_unclosed = False
        """The latest call's closing tag has not come, but something else."""

    def push(self, text: str) -> Sequence[Piece]:
        """What is sure after some more text."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> Sequence[Piece]:
        """The rest."""
        call, held = self._call, self._held
        self._held, self._call = "", None
        if call is None:
            return self._content(held)
        if self._calls.in_call or call.is_complete:
            return []
        return [Piece(content=self._before + call.text + held)]

    def _step(self, pieces: list[Piece]) -> bool:
        """Take as much as can be of what is held; whether more may be."""
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
            self._before, self._call = self._held[len(said) : at + len(tag)], _JsonCall()
        self._held = self._held[at + len(tag) :]
        return True

    def _step_in_call(self, call: _JsonCall, pieces: list[Piece]) -> bool:
        if not call.is_complete:
            self._held = call.push(self._held)
            pieces += self._calls.pieces(call)
            if call.is_bad:
                pieces.append(Piece(content=self._before + call.text))
                self._call = None
                return True
            if not call.is_complete:
                return False
        behind = self._held.lstrip()
        is_near = len(self._held) - len(behind) <= _MOST_SPACE
        if is_near and len(behind) < len(self._CLOSE) and self._CLOSE.startswith(behind):
            return False
        if is_near and behind.startswith(self._CLOSE):
            self._held = behind.removeprefix(self._CLOSE)
        else:  # what follows is content or another call
            self._is_unclosed = True
        self._call = None
        return True

    def _content(self, text: str) -> list[Piece]:
        """Content; white space between calls is none, unless it is long."""
        between = self._calls.num_begun and not self._space.is_long
        if not text or (between and not text.strip()):
            return []
        return [Piece(content=text)]


class JsonCallsParser:
    """Calls alone, as objects one after the other or in a list, or else content alone."""

    _TAG: Final = "<|python_tag|>"
    _BETWEEN: Final = " \n\t\r[];,"

    def __init__(self) -> None:
        self._held = ""
        self._before = ""
        self._call: _JsonCall | None = None
        self._calls = _Calls()
        self._is_content = False

    def push(self, text: str) -> Sequence[Piece]:
        """What is sure after some more text."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> Sequence[Piece]:
        """The rest."""
        if self._calls.in_call:
            return []
        begun = self._call.text if self._call is not None else ""
        text = self._before + begun + self._held
        if self._calls.num_begun and text.strip(self._BETWEEN) in ("", self._TAG):
            return []
        return [Piece(content=text)] if text else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Take as much as can be of what is held; whether more may be."""
        if self._is_content:
            pieces += [Piece(content=self._held)] if self._held else []
            self._held = ""
            return False
        if self._call is None:
            behind = self._held.lstrip(self._BETWEEN)
            is_tag_begun = self._TAG.startswith(behind)
            if not is_tag_begun:
                behind = behind.removeprefix(self._TAG).lstrip(self._BETWEEN)
            if len(self._held) - len(behind) > _MOST_SPACE:
                self._is_content = True
                return True
            if is_tag_begun or not behind:
                return False
            self._before = self._held[: len(self._held) - len(behind)]
            self._call, self._held = _JsonCall(), behind
        self._held = self._call.push(self._held)
        pieces += self._calls.pieces(self._call)
        if self._call.is_bad:
            self._held = self._before + self._call.text + self._held
            self._before, self._call, self._is_content = "", None, True
            return True
        if not self._call.is_complete:
            return False
        self._before, self._call = "", None
        return bool(self._held)


class PythonicParser:
    """Calls alone, as a list in Python, or else content alone. Calls come whole, at the end."""

    _MAY_BE_CALLS: Final = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*\s*(\(.*)?)?)?", re.DOTALL)

    def __init__(self) -> None:
        self._held = ""
        self._is_content = False
        self._in_arguments = False
        """A call's arguments have begun: what it is shows at the end."""

    def push(self, text: str) -> Sequence[Piece]:
        """What is sure after some more text."""
        self._held += text
        if not self._is_content and not self._in_arguments:
            self._look()
        if not self._is_content or not self._held:
            return []
        content, self._held = self._held, ""
        return [Piece(content=content)]

    def _look(self) -> None:
        """Find out whether it may be calls."""
        found = self._MAY_BE_CALLS.fullmatch(self._held)
        self._in_arguments = found is not None and found[3] is not None
        begins = self._held.find("(") if self._in_arguments else len(self._held)
        self._is_content = found is None or begins > _MOST_SPACE

    def finish(self) -> Sequence[Piece]:
        """The calls, or the content that looked like them."""
        held, self._held = self._held, ""
        if self._is_content or not held:
            return []
        return _python_calls(held) or [Piece(content=held)]


class NamedCallParser:
    """The arguments of one call, and nothing else.

    Args:
        name: of the tool.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def push(self, text: str) -> Sequence[Piece]:
        """The text, after the name."""
        if not text:
            return []
        name, self._name = self._name, ""
        return [*([Piece(call=0, name=name)] if name else []), Piece(call=0, arguments=text)]

    def finish(self) -> Sequence[Piece]:
        """Nothing."""
        return []


class ContentParser:
    """Content, and nothing else."""

    def push(self, text: str) -> Sequence[Piece]:
        """The text."""
        return [Piece(content=text)] if text else []

    def finish(self) -> Sequence[Piece]:
        """Nothing."""
        return []


class FirstCallParser:
    """What another parser finds, less all calls but the first.

    Args:
        parser: finds calls.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def push(self, text: str) -> Sequence[Piece]:
        """What is sure after some more text."""
        return [piece for piece in self._parser.push(text) if not piece.call]

    def finish(self) -> Sequence[Piece]:
        """The rest."""
        return [piece for piece in self._parser.finish() if not piece.call]


class ReasoningParser:
    """Reasoning between two tags, and behind it what another parser takes apart.

    Args:
        rest: takes what is behind the reasoning.
        begins_inside: the prompt has ended with the opening tag.
    """

    OPEN: Final = "<think>"
    CLOSE: Final = "</think>"

    def __init__(self, rest: OutputParser, *, begins_inside: bool) -> None:
        self._rest = rest
        self._held = ""
        self._is_inside: bool | None = True if begins_inside else None
        """None: it is not known yet."""
        self._skips_space = True
        """White space right behind a tag is none of the text."""
        self._space = _EndingSpace()

    def push(self, text: str) -> Sequence[Piece]:
        """What is sure after some more text."""
        self._held += text
        if self._is_inside is None:
            begun = self._held.lstrip()
            is_long = len(self._held) - len(begun) > _MOST_SPACE
            if begun.startswith(self.OPEN) and not is_long:
                self._is_inside, self._held = True, begun.removeprefix(self.OPEN)
            elif self.OPEN.startswith(begun) and not is_long:
                return []
            else:
                self._is_inside = self._skips_space = False
        if self._is_inside:
            return self._inside()
        return self._behind()

    def finish(self) -> Sequence[Piece]:
        """The rest."""
        if self._is_inside:
            held, self._held = self._space.cut(self._held), ""
            return [Piece(reasoning=held)] if held else []
        if self._is_inside is None:
            self._skips_space = False
        return [*self._behind(), *self._rest.finish()]

    def _inside(self) -> Sequence[Piece]:
        if self._skips_space:
            self._held = self._held.lstrip()
            self._skips_space = not self._held
        at = self._held.find(self.CLOSE)
        if at < 0:
            possible = overlap(self._held, self.CLOSE)
            sure = self._space.cut(self._held[: len(self._held) - possible])
            self._held = self._held[len(sure) :]
            return [Piece(reasoning=sure)] if sure else []
        said = self._space.cut(self._held[:at])
        self._held = self._held[at + len(self.CLOSE) :]
        self._is_inside, self._skips_space = False, True
        return [*([Piece(reasoning=said)] if said else []), *self._behind()]

    def _behind(self) -> Sequence[Piece]:
        text, self._held = self._held, ""
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return self._rest.push(text)


def overlap(text: str, tag: str) -> int:
    """Characters at the end of a text that a tag may begin with."""
    most = min(len(text), len(tag) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(tag[:n])), 0)


def _python_calls(text: str) -> list[Piece] | None:
    """The calls of a list in Python; None: it is none."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        calls = parsed.elts if isinstance(parsed, ast.List) else []
        return [piece for number, call in enumerate(calls) for piece in _call(number, call)] or None
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def _call(number: int, call: ast.expr) -> Iterable[Piece]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call with named arguments")
    values = {one.arg or "": ast.literal_eval(one.value) for one in call.keywords}
    yield Piece(call=number, name=ast.unparse(call.func))
    yield Piece(call=number, arguments=json.dumps(values, ensure_ascii=False, allow_nan=False))

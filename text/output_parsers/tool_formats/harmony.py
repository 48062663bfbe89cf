"""The format of gpt-oss, harmony: messages in channels, of which one is a call's."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Final

from kvrelay.text.output_parsers.call_blocks import Source, ToldCalls
from kvrelay.text.output_parsers.call_grammar import ANY_TEXT, CallGrammar
from kvrelay.text.output_parsers.json_readers import read_arguments
from kvrelay.text.output_parsers.marked_arguments import Schema
from kvrelay.text.output_parsers.pieces import OutputPiece
from kvrelay.text.output_parsers.reasoning_tags import ReasoningTags
from kvrelay.text.output_parsers.tool_format import ToolFormat

_CHANNEL: Final = "<|channel|>"
_MESSAGE: Final = "<|message|>"
_START: Final = "<|start|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_NAMED: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_PEOPLE: Final = ("assistant", "user", "all")
_ANSWER: Final = f"{_START}assistant"
FINAL: Final = f"{_CHANNEL}final{_MESSAGE}"
"""The header of a message that is the answer."""
_ANALYSIS: Final = ReasoningTags((f"{_CHANNEL}analysis",), ("<|end|>",))
_BEFORE_CALLS: Final = ReasoningTags(_ANALYSIS.opens, (_ANSWER,), forced_end=f"<|end|>{_ANSWER}")
_BEFORE_FORM: Final = ReasoningTags(
    (),
    (FINAL, *(f"{_CHANNEL}final{space}<|constrain|>json{_MESSAGE}" for space in ("", " "))),
    begins_inside=True,
    forced_end=f"<|end|>{_ANSWER}{FINAL}",
)


def harmony_reasoning(*, has_form: bool, has_calls: bool) -> ReasoningTags:
    """The tags around what comes before the message that has a form, or before any other.

    Args:
        has_form: whether the output has a form.
        has_calls: whether calls may be in it, which have headers of their own.
    """
    if not has_form:
        return _ANALYSIS
    return _BEFORE_CALLS if has_calls else _BEFORE_FORM


class HarmonyParser:
    """A parser of harmony: reasoning in the channel `analysis`, content, and calls of tools.

    A text that begins without a header is content, and so is a tag behind a backtick.

    Args:
        is_whole: tell a call when it is complete, and only if its arguments are JSON.
        tells_calls: tell calls; otherwise they are content.
        tells_reasoning: tell reasoning; otherwise it is content.
    """

    def __init__(
        self, *, is_whole: bool = False, tells_calls: bool = True, tells_reasoning: bool = True
    ) -> None:
        self._tells_calls = tells_calls
        self._tells_reasoning = tells_reasoning
        self._source = Source()
        self._calls = ToldCalls(is_whole=is_whole)
        self._pieces: list[OutputPiece] = []
        self._reading = self._messages()
        self._has_reasoning = self._has_content = False

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The pieces that are certain after some more text."""
        self._source.text += text
        return self._read_on()

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputPiece]:
        """The remaining pieces; a call that was cut off is none."""
        self._source.has_ended, self._source.is_cut = True, is_cut
        return self._read_on()

    def _read_on(self) -> list[OutputPiece]:
        next(self._reading, None)
        pieces = [*self._pieces, *self._calls.take()]
        self._pieces = []
        return pieces

    def _messages(self) -> Generator[None, None, None]:
        source = self._source
        is_first = True
        while not (source.has_ended and not source.text):
            source.begin("")
            header = ""
            if begins := (yield from source.skip(_CHANNEL, _START, "to=")):
                source.give_back(begins)
                header, tag = yield from source.until(_MESSAGE)
                if not tag:
                    if not source.is_cut:
                        self._add(header, is_reasoning=False)
                    is_first = False
                    continue
            elif is_first:
                yield from self._all_content()
            is_first = False
            yield from self._message(header)

    def _all_content(self) -> Generator[None, None, None]:
        """Take all that comes as content."""
        is_first = True
        while not self._source.has_ended or self._source.text:
            if text := self._source.take(len(self._source.text)):
                self._add(text, is_reasoning=False, is_first=is_first)
                is_first = False
            if not self._source.has_ended:
                yield

    def _message(self, header: str) -> Generator[None, None, None]:
        """Read a message behind its header, and its end."""
        channel, recipient = _NAMED.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient is not None else ""
        is_call = bool(name) and name not in _PEOPLE
        if is_call and self._tells_calls:
            yield from self._call(name)
        is_reasoning = channel is not None and channel[1] == "analysis" and self._tells_reasoning
        is_first, is_quoting = True, False
        while True:
            text, tag = yield from self._source.until(*_ENDS, _START, _CHANNEL, most=0)
            is_quoting = text.endswith("`") if text else is_quoting
            if is_quoting and tag:
                text, tag, is_quoting = text + tag, "", False
            if name and is_first:  # white space behind a call is none of its
                text = text.lstrip()
            if text:
                self._add(text, is_reasoning=is_reasoning, is_first=is_first)
                is_first = False
            if tag in (_START, _CHANNEL):
                self._source.give_back(tag)
            if tag or self._source.has_ended:
                if is_reasoning and not tag:
                    self._pieces.append(OutputPiece(is_unclosed=True))
                return

    def _call(self, name: str) -> Generator[None, None, None]:
        """Read a message that is a call; what is none stays, as a message."""
        source = self._source
        source.begin("")
        is_call = yield from read_arguments(source, self._calls, name)
        self._pieces += self._calls.take()
        if is_call or not self._calls.drop():
            return
        if not source.is_cut:
            source.give_back(source.taken)

    def _add(self, text: str, *, is_reasoning: bool, is_first: bool = True) -> None:
        """Add to the reasoning or to the content; each message of these begins a line."""
        has_before = self._has_reasoning if is_reasoning else self._has_content
        text = f"\n{text}" if is_first and has_before else text
        if is_reasoning:
            self._has_reasoning = True
            self._pieces.append(OutputPiece(reasoning=text))
        else:
            self._has_content = True
            self._pieces.append(OutputPiece(content=text))


def _header(name: str) -> str:
    return f"{_CHANNEL}commentary to=functions.{name} <|constrain|>json{_MESSAGE}"


def _grammar(grammar: CallGrammar) -> str:
    def call(name: str, schema: Schema) -> str:
        return grammar.sequence(grammar.text(_header(name)), grammar.json(schema))

    return grammar.each(call)


def _text_grammar(grammar: CallGrammar) -> str:
    """Messages without recipients, the last of which may be a call."""

    def call(name: str, schema: Schema) -> str:
        other = f" to=functions.{name}{_CHANNEL}commentary <|constrain|>json{_MESSAGE}"
        headers = [grammar.text(one) for one in (_header(name), other)]
        return grammar.sequence(grammar.one_of(headers), grammar.json(schema))

    channels = ("analysis", "commentary", "final")
    header = grammar.one_of([grammar.text(f"{_CHANNEL}{one}{_MESSAGE}") for one in channels])
    before = grammar.sequence(header, grammar.up_to(ANY_TEXT, f"<|end|>{_ANSWER}"))
    said = grammar.sequence(header, ANY_TEXT)
    return f"({before})* {grammar.one_of([said, grammar.each(call)])}"


HARMONY: Final = ToolFormat(
    "openai",
    lambda _schemas, is_whole: HarmonyParser(is_whole=is_whole),
    _grammar,
    lambda template: _CHANNEL in template,
    text_grammar=_text_grammar,
)

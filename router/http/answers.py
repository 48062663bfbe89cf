"""What a call for completions is answered, as chunks of a stream or as one object.

A chunk is bytes that are known from the start with a text in between: to encode it costs a
tenth of a microsecond where `json.dumps` of the whole takes two.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Final, Protocol

from kvrelay.router.events import ChoiceEnd, Completion, Delta, Event

DONE: Final = b"data: [DONE]\n\n"


class Style(Protocol):
    """How one of the two endpoints words its answers."""

    prefix: str
    """Of a call's id."""
    chunk_object: str
    whole_object: str

    def opening(self) -> str | None:
        """What the first chunk of a choice says beside its text; None: there is no such chunk."""

    def text_of_chunk(self, text: str) -> str:
        """The member of a chunk's choice that has a text; it is quoted already."""

    def text_of_whole(self, text: str) -> str:
        """The member of the whole answer's choice that has a text; it is quoted already."""

    no_text: str
    """In place of `text_of_chunk`, in a chunk that says why a choice ended."""


class CompletionStyle:
    """/v1/completions."""

    prefix = "cmpl"
    chunk_object = whole_object = "text_completion"
    no_text = '"text":""'

    def opening(self) -> str | None:
        """None."""
        return None

    def text_of_chunk(self, text: str) -> str:
        """The text."""
        return f'"text":{text}'

    def text_of_whole(self, text: str) -> str:
        """The text."""
        return f'"text":{text}'


class ChatStyle:
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    no_text = '"delta":{}'

    def opening(self) -> str | None:
        """Who speaks."""
        return '"delta":{"role":"assistant","content":""}'

    def text_of_chunk(self, text: str) -> str:
        """A piece of the message."""
        return f'"delta":{{"content":{text}}}'

    def text_of_whole(self, text: str) -> str:
        """The message."""
        return f'"message":{{"role":"assistant","content":{text}}}'


@dataclass(frozen=True)
class Answer:
    """What all parts of one call's answer have in common."""

    style: Style
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> str:
        """The beginning of an object of this kind, open for its choices."""
        return (
            f'{{"id":{quoted(self.id)},"object":"{kind}","created":{self.created},'
            f'"model":{quoted(self.model)},"choices":['
        )


class Chunks:
    """Makes the chunks of one prompt's choices: the `Form` of a streamed answer.

    Args:
        answer: that the chunks are of.
        first_choice: the index of the prompt's first choice in the whole answer.
        prompt_tokens: counted in the usage that every chunk has; None: no chunk has any.
        echo: the prompt, if the text begins with it.
    """

    def __init__(
        self, answer: Answer, first_choice: int, prompt_tokens: int | None, echo: str = ""
    ) -> None:
        self._style = answer.style
        self._head = f"data: {answer.head(answer.style.chunk_object)}"
        self._first_choice = first_choice
        self._prompt_tokens = prompt_tokens
        self._echo = echo
        self._begun: set[int] = set()
        self._output_tokens = 0

    def __call__(self, event: Event) -> bytes:
        """The chunks of an event, as events of a text/event-stream."""
        if isinstance(event, Delta):
            self._output_tokens += len(event.tokens)
            return self._delta(event).encode()
        ends = enumerate(event.choices)
        return "".join([self._end(choice, end) for choice, end in ends]).encode()

    def _delta(self, delta: Delta) -> str:
        choice, text = delta.choice, delta.text
        if choice in self._begun:
            return self._chunk(choice, self._style.text_of_chunk(quoted(text)))
        if not delta.tokens and not text:  # log-probabilities of the prompt alone
            return ""
        return self._beginning(choice) + self._chunk(choice, self._first_text(text))

    def _first_text(self, text: str) -> str:
        return self._style.text_of_chunk(quoted(self._echo + text))

    def _beginning(self, choice: int) -> str:
        self._begun.add(choice)
        opening = self._style.opening()
        return "" if opening is None else self._chunk(choice, opening)

    def _end(self, choice: int, end: ChoiceEnd) -> str:
        beginning = "" if choice in self._begun else self._beginning(choice)
        return beginning + self._chunk(choice, self._style.no_text, _reason(end))

    def _chunk(self, choice: int, text: str, reason: str = '"finish_reason":null') -> str:
        index = self._first_choice + choice
        usage = ""
        if self._prompt_tokens is not None:
            usage = f',"usage":{usage_of(self._prompt_tokens, self._output_tokens)}'
        return f'{self._head}{{"index":{index},{text},"logprobs":null,{reason}}}]{usage}}}\n\n'


class Whole:
    """Collects one prompt's choices: the `Form` of an answer that is sent at once.

    Args:
        answer: that the choices are of.
        first_choice: the index of the prompt's first choice in the whole answer.
        n: choices of the prompt.
        echo: the prompt, if the text begins with it.
    """

    def __init__(self, answer: Answer, first_choice: int, n: int, echo: str = "") -> None:
        self._style = answer.style
        self._first_choice = first_choice
        self._texts: list[list[str]] = [[echo] for _ in range(n)]

    def __call__(self, event: Event) -> bytes:
        """Nothing: no reader is sent any of it before the end."""
        if isinstance(event, Delta):
            self._texts[event.choice].append(event.text)
        return b""

    def choices(self, completion: Completion) -> str:
        """All of them, separated by commas."""
        parts = zip(self._texts, completion.choices, strict=True)
        return ",".join([self._choice(n, *part) for n, part in enumerate(parts)])

    def _choice(self, choice: int, texts: Sequence[str], end: ChoiceEnd) -> str:
        text = self._style.text_of_whole(quoted("".join(texts)))
        index = self._first_choice + choice
        return f'{{"index":{index},{text},"logprobs":null,{_reason(end)}}}'


def _reason(end: ChoiceEnd) -> str:
    """Why a choice ended; `stop_reason`, as vLLM has it, names the stop token or string."""
    return f'"finish_reason":"{end.finish_reason}","stop_reason":{json.dumps(end.matched_stop)}'


def usage_of(prompt_tokens: int, output_tokens: int, cached_tokens: int | None = None) -> str:
    """A usage object."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return json.dumps(usage)


def usage_of_all(completions: Sequence[Completion]) -> str:
    """The usage of all prompts of a call together."""
    return usage_of(
        sum(one.prompt_tokens for one in completions),
        sum(one.completion_tokens for one in completions),
        sum(one.cached_tokens for one in completions),
    )


def usage_chunk(answer: Answer, completions: Sequence[Completion]) -> bytes:
    """The last chunk of a stream that was asked for its usage."""
    head = answer.head(answer.style.chunk_object)
    return f'data: {head}],"usage":{usage_of_all(completions)}}}\n\n'.encode()


def whole_answer(
    answer: Answer, wholes: Sequence[Whole], completions: Sequence[Completion]
) -> bytes:
    """The whole of an answer that is not streamed."""
    pairs = zip(wholes, completions, strict=True)
    choices = ",".join([whole.choices(completion) for whole, completion in pairs])
    head = answer.head(answer.style.whole_object)
    return f'{head}{choices}],"usage":{usage_of_all(completions)}}}'.encode()

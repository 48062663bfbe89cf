"""The wording of a call's answer: what a path adds to the one life of a call in `completions`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvrelay.router.doors.http.answers import (
    COMMENT,
    DONE,
    Chunks,
    CompletionAnswer,
    HeldAnswer,
    PromptPart,
    Style,
    Whole,
    parts_of_whole,
    usage_chunk,
)
from kvrelay.router.doors.http.completion_bodies import Call
from kvrelay.router.requests.events import Completion
from kvrelay.router.requests.output_stream import Form


class Reply(Protocol):
    """The answer to one call, in the words of its path.

    A call is streamed, by `chunks` and `last_events`, or told at its end, by `whole` and `parts`.
    """

    id: str
    """The call's id, which the answer has."""
    operation: str
    """The operation's name in spans."""
    sign_of_life: bytes
    """The comment, or the event, in a stream without a token for long."""

    def chunks(self, prompt: PromptPart) -> Form:
        """Return the form of the events of the next prompt's stream."""

    def last_events(self, completions: Sequence[Completion]) -> bytes:
        """Return the events after those of all prompts."""

    def whole(self, prompt: PromptPart, held: HeldAnswer) -> Form:
        """Return the form that collects the next prompt's answer, and counts its bytes."""

    def parts(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        """Yield the collected answer."""


class CompletionReply:
    """The `Reply` of /v1/completions and /v1/chat/completions.

    Args:
        style: the path's style.
        call: the call.
        model: the model's name in the answer.
    """

    sign_of_life = COMMENT

    def __init__(self, style: Style, call: Call, model: str) -> None:
        self.id = f"{style.prefix}-{uuid.uuid4().hex}"
        self.operation = style.operation
        self._answer = CompletionAnswer(style, self.id, model)
        self._call = call
        self._chunks: list[Chunks] = []
        self._wholes: list[Whole] = []

    def chunks(self, prompt: PromptPart) -> Form:
        """Return the form of the chunks of the next prompt's choices."""
        self._chunks.append(Chunks(self._answer, prompt, self._call.shown))
        return self._chunks[-1]

    def last_events(self, completions: Sequence[Completion]) -> bytes:
        """Return the usage, if the client asked for it, and the end."""
        if not self._call.include_usage:
            return DONE
        return usage_chunk(self._answer, self._chunks, completions) + DONE

    def whole(self, prompt: PromptPart, held: HeldAnswer) -> Form:
        """Return the form that collects the next prompt's choices."""
        self._wholes.append(Whole(self._answer, prompt, self._call.shown, held))
        return self._wholes[-1]

    def parts(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        """Yield one object, choice by choice."""
        return parts_of_whole(self._answer, self._wholes, completions)

"""The answer to a call of /v1/responses: one object, or the events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvrelay.router.doors.http.answers import COMMENT, HeldAnswer, PromptPart, Shown, is_cut
from kvrelay.router.doors.http.chat_parts import Spoken, ToldReasoning
from kvrelay.router.doors.http.errors import ErrorAnswer
from kvrelay.router.doors.http.responses.response_chat import ResponsesCall
from kvrelay.router.doors.http.responses.response_output import ResponseOutput, Told
from kvrelay.router.requests.events import Completion, Delta, Event, FinishReason
from kvrelay.router.requests.output_stream import Form
from kvrelay.router.requests.request_trace import CHAT
from kvrelay.text.output_parsers.plain import ContentParser

_STATUSES: Final = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
}
_CODES: Final = {429: "rate_limit_exceeded"}
"""The codes of errors in mid-stream that OpenAI has, by status; all others are the server's."""

_MOST_ECHOED: Final = 256 << 10
"""The longest beginning that repeats what the call has brought: a stream has it three times."""
_UNTOLD: Final[dict[str, Any]] = {
    "instructions": None,
    "metadata": {},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
}
"""The members in place of those that make a beginning longer."""


class _Head:
    """The members of a response that its call decides.

    Args:
        asked: the call.
        response_id: the response's id.
        model: the model's name in the answer.
    """

    def __init__(self, asked: ResponsesCall, response_id: str, model: str) -> None:
        members = _echoed(asked, response_id, model)
        written = json.dumps(members)
        if len(written) > _MOST_ECHOED:
            written = json.dumps({**members, **_UNTOLD})
        self._members = written[1:-1]

    def written(
        self,
        status: str,
        *,
        output: str = "[]",
        usage: str = "null",
        error: str = "null",
    ) -> str:
        """Return a response in JSON, its parts being so already."""
        is_short = status == "incomplete"
        incomplete = '{"reason":"max_output_tokens"}' if is_short else "null"
        ended = int(time.time()) if status == "completed" else "null"
        return (
            f'{{{self._members},"status":"{status}","completed_at":{ended},"error":{error},'
            f'"incomplete_details":{incomplete},"output":{output},"usage":{usage}}}'
        )


def _echoed(asked: ResponsesCall, response_id: str, model: str) -> dict[str, Any]:
    """Return the members of a response that are known before its output."""
    body, choice = asked.body, asked.body.tool_choice
    text, reasoning = body.text, body.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": None,
        },
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": (text.format if text is not None else None) or {"type": "text"}},
        "tool_choice": "auto" if choice is None else choice,
        "tools": asked.tools.served,
        "top_logprobs": 0,
        "top_p": body.top_p,
        "truncation": "disabled",
    }


class ResponsesReply:
    """The `Reply` of /v1/responses: its one prompt has one choice.

    Args:
        asked: the call.
        shown: the parts of the chat's answer.
        model: the model's name in the answer.
    """

    operation = CHAT
    sign_of_life = COMMENT

    def __init__(self, asked: ResponsesCall, shown: Shown, model: str) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._shown = shown
        self._head = _Head(asked, self.id, model)
        tells_reasoning = shown.reasoning is not ToldReasoning.NEVER
        self._output = ResponseOutput(asked.tools.told_as, tells_reasoning=tells_reasoning)
        self._response = ""
        """The complete response in JSON; empty: it is not complete."""
        self._num_events = 0

    def chunks(self, prompt: PromptPart) -> Form:
        """Return the form of the stream's events."""
        return self._events(self._speaker(is_whole=False))

    def last_events(self, completions: Sequence[Completion]) -> bytes:
        """Return nothing: the end of the response was the last event."""
        return b""

    def whole(self, prompt: PromptPart, held: HeldAnswer) -> Form:
        """Return the form that collects the output."""
        spoken = self._speaker(is_whole=True)

        def collect(event: Event) -> bytes:
            self._take(spoken, event)
            if isinstance(event, Delta):
                held.add(len(event.text))
            return b""

        return collect

    def parts(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        """Yield the response."""
        yield self._response.encode()

    def error_event(self, error: ErrorAnswer) -> bytes:
        """Return the events of a response that fails in mid-stream, with the items until then."""
        code = error.code or _CODES.get(error.status, "server_error")
        told = json.dumps({"code": code, "message": error.message})
        failed = self._head.written("failed", output=self._output.items, error=told)
        return self._written([("response.failed", f'"response":{failed}')])

    def _speaker(self, *, is_whole: bool) -> Spoken:
        shown = self._shown
        parser = ContentParser() if shown.parser is None else shown.parser(is_whole)
        return Spoken(parser, shown.new_call_id, shown.reasoning)

    def _events(self, spoken: Spoken) -> Form:
        return lambda event: self._written(self._take(spoken, event))

    def _take(self, spoken: Spoken, event: Event) -> list[Told]:
        """Take some more output; return the events that tell of it."""
        if isinstance(event, Delta):
            return self._output.take(spoken.pieces(event.text, len(event.tokens)))
        [end] = event.choices
        told = self._output.take(spoken.last_pieces(is_cut=is_cut(end)))
        status = _STATUSES[end.finish_reason]
        is_whole = status == "completed"
        told += self._output.finish(status if is_whole else "incomplete")
        usage = _usage(event, spoken.reasoning_tokens)
        self._response = self._head.written(status, output=self._output.items, usage=usage)
        kind = "response.completed" if is_whole else "response.incomplete"
        return [*told, (kind, f'"response":{self._response}')]

    def _written(self, told: Sequence[Told]) -> bytes:
        """Return events as a text/event-stream; the response's beginning is before the first."""
        if not self._num_events:
            begun = f'"response":{self._head.written("in_progress")}'
            told = [("response.created", begun), ("response.in_progress", begun), *told]
        first = self._num_events
        self._num_events += len(told)
        return "".join(
            [
                f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},{members}}}\n\n'
                for number, (kind, members) in enumerate(told, first)
            ]
        ).encode()


def _usage(completion: Completion, reasoning_tokens: int) -> str:
    prompt, output = completion.prompt_tokens, completion.completion_tokens
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": completion.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt + output,
    }
    return json.dumps(usage)

"""The answers of /v1/messages, as Anthropic's API has them: the events of a stream, or one object.

An answer is a list of blocks: thinking, text, and calls of tools. One ends where another begins.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Final

from kvrelay.router.doors.http.answers import HeldAnswer, PromptPart, is_cut
from kvrelay.router.doors.http.chat_parts import Spoken, ToldReasoning
from kvrelay.router.doors.http.completion_bodies import Call
from kvrelay.router.requests.events import ChoiceEnd, Completion, Delta, Event, FinishReason
from kvrelay.router.requests.output_stream import Form
from kvrelay.router.requests.request_trace import CHAT
from kvrelay.text.output_parsers.json_calls import is_json
from kvrelay.text.output_parsers.pieces import OutputPiece
from kvrelay.text.output_parsers.plain import ContentParser

SIGNATURE: Final = "unsigned"
"""The signature of all thinking: clients send back what has one, and nobody checks it here."""
PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'
"""The event that says nothing."""


class MessagesReply:
    """The `Reply` of /v1/messages.

    Args:
        call: the call.
        model: the model's name in the answer.
    """

    operation = CHAT
    sign_of_life = PING

    def __init__(self, call: Call, model: str) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self.model = model
        self._call = call
        self._whole: _WholeMessage | None = None

    def chunks(self, prompt: PromptPart) -> Form:
        """Return the form of the stream's events."""
        return _MessageEvents(self, self._call, prompt)

    def last_events(self, completions: Sequence[Completion]) -> bytes:
        """Return nothing: a message's end is its last event."""
        return b""

    def whole(self, prompt: PromptPart, held: HeldAnswer) -> Form:
        """Return the form that collects the message."""
        self._whole = _WholeMessage(self._call, held)
        return self._whole

    def parts(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        """Yield the message."""
        assert self._whole is not None, "a call has one prompt"
        [completion] = completions
        told = self._whole.told(completion)
        yield json.dumps(self.message(**told)).encode()

    def message(
        self,
        content: Sequence[Any],
        stop_reason: str | None,
        stop_sequence: str | None,
        usage: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the message as an object."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }


class _SpokenMessage:
    """The output of a call, split into pieces of blocks."""

    _is_whole = False

    def __init__(self, call: Call) -> None:
        shown = call.shown
        parser = shown.parser(self._is_whole) if shown.parser is not None else ContentParser()
        self._spoken = Spoken(parser, shown.new_call_id, shown.reasoning)
        self._is_shown = shown.output
        self._most_tokens = call.message.sampling_params.max_tokens
        self._blank = ""
        """Space that is told with the text that follows it in its block, and else not at all."""

    def _pieces(self, delta: Delta) -> list[OutputPiece]:
        """Return the pieces that are told, for the next tokens."""
        if not self._is_shown:
            return []
        return self._told(self._spoken.pieces(delta.text, len(delta.tokens)))

    def _last_pieces(self, end: ChoiceEnd) -> list[OutputPiece]:
        return self._told(self._spoken.last_pieces(is_cut=is_cut(end))) if self._is_shown else []

    def _told(self, pieces: Sequence[OutputPiece]) -> list[OutputPiece]:
        if self._spoken.told is ToldReasoning.NEVER:
            return [piece for piece in pieces if not piece.reasoning]
        return list(pieces)

    def _usage(self, completion: Completion) -> dict[str, Any]:
        """Return the usage, in which cached tokens are no input tokens."""
        details = {"thinking_tokens": self._spoken.reasoning_tokens}
        return {
            **_input_usage(completion.prompt_tokens, completion.cached_tokens),
            "output_tokens": completion.completion_tokens if self._is_shown else 0,
            "output_tokens_details": details,
        }

    def _stop(self, completion: Completion) -> dict[str, str | None]:
        """Return why the message ended."""
        [end] = completion.choices
        reason, sequence = "end_turn", None
        if end.finish_reason is not FinishReason.STOP or not self._is_shown:
            reason = "max_tokens"
            if self._is_shown and completion.completion_tokens < self._most_tokens:
                reason = "model_context_window_exceeded"
        elif isinstance(end.matched_stop, str):
            reason, sequence = "stop_sequence", end.matched_stop
        elif self._spoken.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}


class _MessageEvents(_SpokenMessage):
    """The form of a streamed message.

    Args:
        reply: the answer that it is.
        call: its call.
        prompt: its prompt.
    """

    def __init__(self, reply: MessagesReply, call: Call, prompt: PromptPart) -> None:
        super().__init__(call)
        self._reply = reply
        self._prompt_tokens = len(prompt.input_ids)
        self._has_begun = False
        self._number = -1
        """The number of the latest block."""
        self._open = ""
        """The type of the block that is open; empty: none."""

    def __call__(self, event: Event) -> bytes:
        """Return the events of a stream that an event is told by."""
        beginning = b"" if self._has_begun else self._beginning()
        if isinstance(event, Delta):
            return beginning + self._events(self._pieces(event)).encode()
        [end] = event.choices
        last = self._events(self._last_pieces(end)) + self._close()
        delta = {"delta": self._stop(event), "usage": self._usage(event)}
        ending = _event("message_delta", **delta) + _event("message_stop")
        return beginning + (last + ending).encode()

    def _beginning(self) -> bytes:
        self._has_begun = True
        usage = {**_input_usage(self._prompt_tokens), "output_tokens": 0}
        message = self._reply.message([], None, None, usage)
        return _event("message_start", message=message).encode() + PING

    def _events(self, pieces: Sequence[OutputPiece]) -> str:
        return "".join(map(self._piece, pieces))

    def _piece(self, piece: OutputPiece) -> str:
        if piece.call is not None:
            begun = self._begin_call(piece) if piece.name else ""
            if not piece.arguments:
                return begun
            return begun + self._delta("input_json_delta", "partial_json", piece.arguments)
        if piece.reasoning:
            return self._begin("thinking") + self._delta(
                "thinking_delta", "thinking", piece.reasoning
            )
        text = self._blank + piece.content
        if self._open != "text" and not text.strip():
            self._blank = text
            return ""
        self._blank = ""
        return self._begin("text") + self._delta("text_delta", "text", text)

    def _begin(self, kind: str) -> str:
        """Return the events by which a block begins, unless it is open already."""
        if self._open == kind:
            return ""
        empty = {kind: "", "signature": ""} if kind == "thinking" else {kind: ""}
        return self._begin_block(kind, empty)

    def _begin_call(self, piece: OutputPiece) -> str:
        return self._begin_block("tool_use", {"id": piece.call_id, "name": piece.name, "input": {}})

    def _begin_block(self, kind: str, members: dict[str, Any]) -> str:
        closing = self._close()
        self._number, self._open, self._blank = self._number + 1, kind, ""
        block = {"type": kind, **members}
        return closing + _event("content_block_start", index=self._number, content_block=block)

    def _close(self) -> str:
        """Return the events by which the open block ends."""
        if not self._open:
            return ""
        signature = ""
        if self._open == "thinking":
            signature = self._delta("signature_delta", "signature", SIGNATURE)
        self._open = ""
        return signature + _event("content_block_stop", index=self._number)

    def _delta(self, kind: str, name: str, text: str) -> str:
        """Return the event of a piece of the open block; it is as often as tokens are."""
        return (
            'event: content_block_delta\ndata: {"type":"content_block_delta","index":'
            f'{self._number},"delta":{{"type":"{kind}","{name}":{quoted(text)}}}}}\n\n'
        )


class _WholeMessage(_SpokenMessage):
    """The form that collects a message, which is sent at its end.

    Args:
        call: its call.
        held: counts the collected bytes.
    """

    _is_whole = True

    def __init__(self, call: Call, held: HeldAnswer) -> None:
        super().__init__(call)
        self._held = held
        self._collected: list[OutputPiece] = []

    def __call__(self, event: Event) -> bytes:
        """Return nothing: no part of the answer is sent before the end."""
        if isinstance(event, Delta):
            self._held.add(len(event.text))
            self._collected += self._pieces(event)
        return b""

    def told(self, completion: Completion) -> dict[str, Any]:
        """Return the members of the message that the output decides."""
        [end] = completion.choices
        self._collected += self._last_pieces(end)
        blocks = [block for block in _blocks_of(self._collected) if not _is_blank(block)]
        return {
            "content": blocks,
            **self._stop(completion),
            "usage": self._usage(completion),
        }


def _blocks_of(pieces: Sequence[OutputPiece]) -> list[dict[str, Any]]:
    """Return the blocks that pieces make together."""
    blocks: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    for piece in pieces:
        kind = "tool_use" if piece.call is not None else "thinking" if piece.reasoning else "text"
        if not blocks or blocks[-1]["type"] != kind or piece.name:
            blocks.append({"type": kind})
            texts.append([])
            if piece.name:
                blocks[-1] |= {"id": piece.call_id, "name": piece.name}
        texts[-1].append(piece.arguments or piece.reasoning or piece.content)
    for block, parts in zip(blocks, map("".join, texts), strict=True):
        if block["type"] == "tool_use":
            # A call that was cut off has no arguments that clients can read.
            block["input"] = json.loads(parts) if is_json(parts) else {}
        else:
            block[block["type"]] = parts
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
    return blocks


def _is_blank(block: dict[str, Any]) -> bool:
    return block["type"] == "text" and not block["text"].strip()


def _input_usage(prompt_tokens: int, cached_tokens: int = 0) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
    }


def _event(name: str, **members: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **members})}\n\n"

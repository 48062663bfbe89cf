"""The chat that a body of /v1/responses asks for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvrelay.router.admission.served_tokenizer import Texts
from kvrelay.router.doors.http.chat_tools import Dialect
from kvrelay.router.doors.http.completion_bodies import Call, read_chat_completion
from kvrelay.router.doors.http.json_body import read_body
from kvrelay.router.doors.http.left_out import unknown_members
from kvrelay.router.doors.http.protocol import ChatCompletionRequest
from kvrelay.router.doors.http.responses.called_tools import ResponseTools
from kvrelay.router.doors.http.responses.response_bodies import (
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from kvrelay.router.doors.http.responses.response_items import ChatMessages
from kvrelay.router.errors import InvalidField

_NOT_OF_A_CHAT: Final = frozenset(
    {
        *("messages", "max_tokens", "max_completion_tokens", "response_format"),
        *("reasoning_effort", "n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs"),
        *("echo", "return_token_ids", "return_tokens_as_token_ids", "functions", "function_call"),
        *("separate_reasoning", "stream_reasoning", "modalities"),
    }
)
"""The members of a chat that no Responses body has: those with words of their own, or answers."""
_ALIKE: Final = ("model", "parallel_tool_calls", "temperature", "top_p", "stream")
"""The members that mean the same in a chat."""
_TOLD_AS: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "tool_choice.function.name": "tool_choice.name",
}
"""The names in a Responses body of a chat's members."""
_TOOL: Final = re.compile(r"tools\[(\d+)\](?:\.function)?")


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """A body's call, as a chat."""

    body: ResponsesRequest
    chat: ChatCompletionRequest
    tools: ResponseTools
    left_out: Sequence[str]
    """The members, tools and items that have no meaning here."""

    def read(self, body_bytes: int, texts: Texts, dialect: Dialect) -> Call:
        """Convert the chat to a call; raise `InvalidField`.

        Args:
            body_bytes: the bytes of the body.
            texts: tokenizes the conversation.
            dialect: the model's dialect.
        """
        with _told_of(self.tools):
            call = read_chat_completion(self.chat, body_bytes, texts, dialect)
        asked_as = {one: _told_as(asked, self.tools) for one, asked in call.asked_as.items()}
        return replace(call, asked_as={**_TOLD_AS, **asked_as})


def read_responses(members: dict[str, Any]) -> ResponsesCall:
    """Read a body, and the chat that it asks for; raise `InvalidField`."""
    body = read_body(ResponsesRequest, members)
    tools = ResponseTools.read(body.tools or [], body.tool_choice)
    conversation = ChatMessages(body.instructions)
    conversation.read(body.input)
    unknown = unknown_members(ResponsesRequest, members)
    in_chats = ChatCompletionRequest.model_fields.keys() - _NOT_OF_A_CHAT
    chat = {name: members[name] for name in unknown if name in in_chats}
    left_out = [
        *(f"fields.{name}" for name in unknown if name not in chat),
        *(f"tools.{kind}" for kind in tools.left_out),
        *(f"input.{kind}" for kind in conversation.left_out),
        *(["fields.truncation"] if body.truncation == "auto" else ()),
    ]
    chat |= {name: getattr(body, name) for name in _ALIKE}
    chat |= {
        "messages": conversation.messages,
        "max_completion_tokens": body.max_output_tokens,
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        "response_format": _response_format(body.text),
        "tools": tools.functions or None,
        "tool_choice": tools.choice,
    }
    with _told_of(tools):
        read = read_body(ChatCompletionRequest, chat)
    return ResponsesCall(body, read, tools, left_out)


def _response_format(text: TextOptions | None) -> Mapping[str, Any] | None:
    """Return the form of a chat's content; raise `InvalidField`."""
    if text is None or text.format is None:
        return None
    try:
        kind = read_body(TextFormat, text.format).type
    except InvalidField as error:
        error.rename(f"text.format.{error.field}")
        raise
    if kind != "json_schema":
        return {"type": kind}
    described = {name: value for name, value in text.format.items() if name != "type"}
    return {"type": kind, "json_schema": {name: described.get(name) for name in ("name", "schema")}}


@contextlib.contextmanager
def _told_of(tools: ResponseTools) -> Iterator[None]:
    """Let errors name the members of the body, where a chat's would be named."""
    try:
        yield
    except InvalidField as error:
        error.rename(_told_as(error.field, tools))
        raise


def _told_as(field: str, tools: ResponseTools) -> str:
    tool = _TOOL.match(field)
    if tool is not None and int(tool[1]) < len(tools.places):
        return tools.places[int(tool[1])] + field[tool.end() :]
    return _TOLD_AS.get(field, field)

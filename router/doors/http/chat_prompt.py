"""The conversation in a body of /v1/chat/completions, as a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvrelay.router.admission.prompt_input import encoded
from kvrelay.router.admission.served_tokenizer import Texts
from kvrelay.router.doors.http.fields import Fields, Schema
from kvrelay.router.errors import InvalidField
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.text.chat_template import ChatTemplate, TemplateError
from kvrelay.text.encoding import encode
from kvrelay.text.output_parsers.reasoning import ReasoningParser

_PART: Final[Schema] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["text"],
        },
    ]
}
_CALL: Final[Schema] = {
    "type": "object",
    "properties": {
        "function": {
            "type": "object",
            "properties": {"arguments": {"type": ["string", "object", "null"]}},
        }
    },
    "required": ["function"],
}
_MESSAGES: Final[Schema] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string"},
            "content": {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": _PART}]},
            "tool_calls": {"anyOf": [{"type": "null"}, {"type": "array", "items": _CALL}]},
        },
        "required": ["role"],
    },
}


class ChatPrompt:
    """A conversation that a chat template turns into text.

    Args:
        texts: tokenizes the text.
        template: renders it.
        messages: the messages, whose contents are strings.
        options: the arguments of `ChatTemplate.render`.
        num_bytes: the approximate bytes of the text.
        add_special_tokens: whether to add special tokens beside those that the template writes.
    """

    field = "messages"
    num_tokens: int | None = None

    def __init__(
        self,
        texts: Texts,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        num_bytes: int,
        *,
        add_special_tokens: bool,
    ) -> None:
        self._texts = texts
        self._template = template
        self._messages = messages
        self._options = options
        self.num_bytes = num_bytes
        self._add_special_tokens = add_special_tokens
        self.ends_in_reasoning = False
        """Whether the rendered text has begun the answer's reasoning; known after the rendering."""

    def input_ids(self, limits: RequestLimits) -> Sequence[int]:
        """Return the conversation's tokens; raise `InvalidField` if no room for output is left."""
        try:
            text = self._template.render(self._messages, **self._options)
        except TemplateError as error:
            raise InvalidField(self.field, str(error)) from error
        self.ends_in_reasoning = text.rstrip().endswith(ReasoningParser.OPEN)
        return encoded(self.field, text, self._encode, limits)

    def _encode(self, text: str, most_tokens: int) -> Sequence[int]:
        return encode(
            self._texts.tokenizer, text, most_tokens, add_special_tokens=self._add_special_tokens
        )


def read_chat(
    fields: Fields,
    body_bytes: int,
    texts: Texts,
    template: ChatTemplate | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> ChatPrompt:
    """Read the conversation and its rendering options; raise `InvalidField`.

    Args:
        fields: the body's fields.
        body_bytes: the bytes of the whole body, since a template may write any part of it.
        texts: tokenizes the conversation.
        template: renders it; None: there is none.
        tools: the tools that the model is told of.
    """
    messages = _read_messages(fields)
    fields.only("chat_template")
    fields.only("documents", [])
    variables = dict(fields.members("chat_template_kwargs") or {})
    effort = fields.text("reasoning_effort")
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    goes_on = fields.flag("continue_final_message")
    begins = fields.optional_flag("add_generation_prompt")
    if goes_on and begins:
        raise fields.error("continue_final_message", "is not allowed with add_generation_prompt")
    options = {
        "add_generation_prompt": not goes_on and begins is not False,
        "continue_final_message": goes_on,
        "tools": tools,
        "variables": variables,
    }
    add = fields.flag("add_special_tokens")
    if template is None:
        raise InvalidField(
            "messages",
            "the model has no chat template: use /v1/completions, or serve it with --chat-template",
        )
    return ChatPrompt(texts, template, messages, options, body_bytes, add_special_tokens=add)


def _read_messages(fields: Fields) -> Sequence[Mapping[str, Any]]:
    given = fields.take("messages", _MESSAGES)
    if not isinstance(given, list) or not given:
        raise InvalidField("messages", "must be a list of messages, at least one")
    return [_read_message(f"messages[{number}]", one) for number, one in enumerate(given)]


def _read_message(place: str, given: Any) -> Mapping[str, Any]:
    """Read a message, with its content as one text; its other members are for the template."""
    if not isinstance(given, dict):
        raise InvalidField(place, "must be an object")
    if not isinstance(given.get("role"), str):
        raise InvalidField(f"{place}.role", "must be a string")
    read = {**given, "content": _content(f"{place}.content", given.get("content"))}
    if given.get("tool_calls") is not None:
        read["tool_calls"] = _read_calls(f"{place}.tool_calls", given["tool_calls"])
    return read


def _read_calls(place: str, given: Any) -> Sequence[Mapping[str, Any]]:
    """Read calls of earlier turns, with their arguments as the object that templates expect."""
    if not isinstance(given, list):
        raise InvalidField(place, "must be a list of calls")
    return [_read_call(f"{place}[{number}]", one) for number, one in enumerate(given)]


def _read_call(place: str, given: Any) -> Mapping[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise InvalidField(f"{place}.function", "must be an object")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise InvalidField(f"{place}.function.arguments", "must be JSON") from None
    if not isinstance(arguments, dict):
        raise InvalidField(f"{place}.function.arguments", "must be a JSON object")
    return {**given, "function": {**function, "arguments": arguments}}


def _content(place: str, given: Any) -> str:
    """Return the text of a content, which may come in parts; each becomes a line."""
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise InvalidField(place, "must be a text, or a list of parts")
    return "\n".join(_part(f"{place}[{number}]", one) for number, one in enumerate(given))


def _part(place: str, given: Any) -> str:
    if isinstance(given, str):
        return given
    text = given.get("text") if isinstance(given, dict) else None
    if not isinstance(text, str) or given.get("type", "text") != "text":
        raise InvalidField(place, 'must be a text: {"type": "text", "text": …}')
    return text

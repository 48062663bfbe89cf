"""A body of /v1/messages as one of /v1/chat/completions, by which it becomes a call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from kvrelay.router.doors.http.field_types import Object
from kvrelay.router.doors.http.messages.message_bodies import (
    Blocks,
    CountTokensRequest,
    MessagesRequest,
    OutputConfig,
    ThinkingConfig,
    ToolChoice,
    ToolParam,
)
from kvrelay.router.errors import InvalidField

_SAME: Final = ("model", "stream", "temperature", "top_p", "top_k", "chat_template_kwargs")
_OWN: Final = ("cache_salt", "priority", "seed", "session_id")
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""The body's names of the members of a chat that have others."""
_TAG_OF_EACH_CALL: Final = "x-anthropic-billing-header:"
"""The beginning of a text that some agents put before the system's, with a value for each call.

A prompt that began with it would share no prefix with any other.
"""
_NOT_SHOWN: Final = "[an image or a file, which this model cannot read]"
"""The text in place of a tool's result that is none: a refusal would end the conversation."""


def asked_name(field: str) -> str:
    """Return the body's name of a chat's field, as far as they have the same parts."""
    outer = re.split(r"[.\[]", field, maxsplit=1)[0]
    return _NAMES.get(outer, field if outer not in ("tools", "messages") else outer)


def chat_members(body: CountTokensRequest, left_out: list[str]) -> dict[str, Any]:
    """Return the members of a chat that asks for the same; raise `InvalidField`.

    Args:
        body: the body.
        left_out: is given the names of what has no meaning here.
    """
    members = {name: getattr(body, name) for name in _SAME if hasattr(body, name)}
    messages = _Conversation(left_out)
    if body.system is not None:
        messages.add_system("system", body.system)
    for number, one in enumerate(body.messages):
        messages.add(f"messages[{number}].content", one.role, one.content)
    chat = messages.chat()
    members["messages"] = chat
    last = chat[-1] if chat else {}
    if last.get("tool_calls"):
        raise InvalidField("messages", "must not end with a call of a tool: its result is missing")
    if last.get("role") == "assistant":
        members["continue_final_message"] = True
    tools = [*_tools(body.tools or (), left_out)]
    members["tools"] = tools or None
    members |= _choice(body.tool_choice, has_tools=bool(tools))
    members |= _thinking(body.thinking)
    config = body.output_config or OutputConfig()
    members["reasoning_effort"] = config.effort
    form = config.format or body.output_format
    if form is not None:
        schema = {"schema": form.json_schema}
        members["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        members |= {name: getattr(body, name) for name in _OWN}
        members |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
        members["cache_control"] = _retention(body)
    return members


def _retention(body: MessagesRequest) -> dict[str, Any] | None:
    """Return the mark for the cache that lasts longest, wherever it is; None: there is none."""
    contents = [body.system, *(message.content for message in body.messages)]
    blocks = [block for one in contents if not isinstance(one, str) for block in one or ()]
    hints = [body.cache_control, *(block.get("cache_control") for block in blocks)]
    marks = [one for one in hints if isinstance(one, dict) and one.get("type") == "ephemeral"]
    if not marks:
        return None
    longest = any(mark.get("ttl") == "1h" for mark in marks)
    return {"type": "ephemeral", "ttl": "1h" if longest else "5m"}


def _thinking(thinking: ThinkingConfig | None) -> dict[str, Any]:
    """Return the members that ask for reasoning; without a word of it, none is thought or shown."""
    thinks = thinking is not None and thinking.type != "disabled"
    if thinking is None or not thinks:
        return {"enable_thinking": False, "include_reasoning": False}
    return {
        "enable_thinking": True,
        "include_reasoning": thinking.display != "omitted",
        "thinking_token_budget": thinking.budget_tokens,
    }


def _choice(choice: ToolChoice | None, *, has_tools: bool) -> dict[str, Any]:
    if choice is None:
        return {}
    if choice.type == "tool":
        if not choice.name:
            raise InvalidField("tool_choice.name", "is missing")
        function = {"type": "function", "function": {"name": choice.name}}
        members: dict[str, Any] = {"tool_choice": function}
    elif choice.type == "any" or has_tools:
        members = {"tool_choice": _CHOICES[choice.type]}
    else:
        return {}
    if choice.disable_parallel_tool_use:
        members["parallel_tool_calls"] = False
    return members


def _tools(tools: Sequence[ToolParam], left_out: list[str]) -> Iterator[Object]:
    for number, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            left_out.append(f"tools.{tool.type}")
            continue
        if not tool.name:
            raise InvalidField(f"tools[{number}].name", "is missing")
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema,
            "strict": tool.strict,
        }
        told = {name: value for name, value in function.items() if value is not None}
        yield {"type": "function", "function": told}


class _Conversation:
    """The messages of a chat, translated turn by turn.

    Args:
        left_out: is given the types of blocks that have no meaning here.
    """

    def __init__(self, left_out: list[str]) -> None:
        self._messages: list[dict[str, Any]] = []
        """The messages so far, whose contents are lists of texts, as reasoning is."""
        self._left_out = left_out

    def chat(self) -> list[dict[str, Any]]:
        """Return the messages; all that the model has said in one turn is one text."""
        return [_one_text(one) if one["role"] == "assistant" else one for one in self._messages]

    def add_system(self, place: str, content: Blocks) -> None:
        """Add a system's message; several in a row become one, as templates may take one alone."""
        parts = [
            text
            for text in self._texts(place, content)
            if not text.startswith(_TAG_OF_EACH_CALL) or self._leave_out("system.billing_header")
        ]
        if parts:
            self._add_texts("system", parts)

    def add(self, place: str, role: str, content: Blocks) -> None:
        """Add a turn; several of one role in a row become one."""
        if role == "system":
            self.add_system(place, content)
        elif role == "user":
            self._add_user(place, content)
        else:
            self._add_assistant(place, content)

    def _add_user(self, place: str, content: Blocks) -> None:
        """Add what a user says; results of tools are messages of their own, and come first."""
        said = []
        for where, block in _blocks(place, content):
            if block.get("type") == "tool_result":
                self._messages.append(self._result(where, block))
            else:
                said += self._texts_of(where, block)
        if said:
            self._add_texts("user", said)

    def _add_texts(self, role: str, texts: list[str]) -> None:
        self._turn(role)["content"] += texts

    def _turn(self, role: str) -> dict[str, Any]:
        """Return the turn of a role that goes on, or a new one."""
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]

    def _result(self, place: str, block: Object) -> dict[str, Any]:
        """Return a tool's result as a message."""
        content = block.get("content") or ""
        texts: list[str] = []
        for where, part in _blocks(f"{place}.content", content):
            read = self._read_texts(where, part)
            texts += [_NOT_SHOWN] if read is None else read
        if block.get("is_error"):
            texts = ["Error: " + "\n".join(texts)]
        call_id = _text(block, "tool_use_id", place)
        return {"role": "tool", "tool_call_id": call_id, "content": texts}

    def _add_assistant(self, place: str, content: Blocks) -> None:
        """Add what the model has said: reasoning, text, and calls."""
        message = self._turn("assistant")
        for where, block in _blocks(place, content):
            kind = block.get("type")
            if kind == "thinking":
                message.setdefault("reasoning", []).append(_text(block, "thinking", where))
            elif kind == "tool_use":
                message.setdefault("tool_calls", []).append(_call(where, block))
            else:
                message["content"] += self._texts_of(where, block)

    def _texts(self, place: str, content: Blocks) -> list[str]:
        found = [self._texts_of(where, block) for where, block in _blocks(place, content)]
        return [text for texts in found for text in texts]

    def _texts_of(self, place: str, block: Object) -> list[str]:
        """Return the texts of a block that is no result and no call."""
        read = self._read_texts(place, block)
        if read is None:
            raise InvalidField(place, "has no text, and images and files are not served")
        return read

    def _read_texts(self, place: str, block: Object) -> list[str] | None:
        """Return the texts of a block; None: it has what is no text and cannot be left out."""
        kind = _text(block, "type", place)
        read = _TEXTS.get(kind)
        if read is not None:
            return read(place, block)
        self._leave_out(f"blocks.{kind}")
        return []

    def _leave_out(self, name: str) -> bool:
        """Note what is left out; return False, for it is no part of what is told."""
        self._left_out.append(name)
        return False


def _one_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose texts are joined: once, for there may be very many."""
    texts = {name: "".join(message[name]) for name in ("content", "reasoning") if name in message}
    return {**message, **texts}


def _blocks(place: str, content: Any) -> Iterator[tuple[str, Object]]:
    """Yield the blocks of a content, each with its place."""
    if isinstance(content, str):
        yield place, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise InvalidField(place, "must be a text, or a list of blocks")
    for number, block in enumerate(content):
        where = f"{place}[{number}]"
        if not isinstance(block, dict):
            raise InvalidField(where, "must be an object")
        yield where, block


def _call(place: str, block: Object) -> Object:
    given = block.get("input") or {}
    if not isinstance(given, str | dict):  # a model may have written a list: it can be sent back
        given = json.dumps(given)
    function = {"name": _text(block, "name", place), "arguments": given}
    return {"id": _text(block, "id", place), "type": "function", "function": function}


def _text(block: Object, name: str, place: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise InvalidField(f"{place}.{name}", "must be a string")
    return text


def _plain(place: str, block: Object) -> list[str]:
    return [_text(block, "text", place)]


def _no_text(place: str, block: Object) -> None:
    """Return None: an image has no text."""


def _document(place: str, block: Object) -> list[str] | None:
    """Return the texts of a document, after its title; None: it has another form."""
    source = block.get("source")
    if not isinstance(source, dict):
        raise InvalidField(f"{place}.source", "must be an object")
    title = [_text(block, "title", place)] if block.get("title") else []
    where = f"{place}.source"
    if source.get("type") == "text":
        return [*title, _text(source, "data", where)]
    if source.get("type") == "content":
        parts = _blocks(f"{where}.content", source.get("content"))
        return [*title, *(_text(part, "text", at) for at, part in parts)]
    return None


def _search_result(place: str, block: Object) -> list[str]:
    told = [_text(block, name, place) for name in ("title", "source") if block.get(name)]
    parts = _blocks(f"{place}.content", block.get("content") or "")
    return [*told, *(_text(part, "text", at) for at, part in parts)]


_TEXTS: Final[Mapping[str, Callable[[str, Object], list[str] | None]]] = {
    "text": _plain,
    "image": _no_text,
    "document": _document,
    "search_result": _search_result,
}

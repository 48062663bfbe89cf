"""The items of a Responses body's `input`, as the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvrelay.router.doors.http.responses.called_tools import INPUT, flat_name
from kvrelay.router.errors import InvalidField

_ROLES: Final = ("user", "assistant", "system", "developer")
_LEADING: Final = ("system", "developer")
_ACTIONS: Final = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
"""The name in a chat of each call that names no function, and its member with arguments."""
_OUTPUTS: Final = frozenset(
    {
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
    }
)
_REFERENCE: Final = "item_reference"
_NO_TEXT: Final = "(left out: {type}, which this model cannot read)"
"""The text in place of an image or a file in a tool's output; without one no agent could go on."""


class ChatMessages:
    """The messages of a chat that some items become, one after the other.

    Neighbours of one turn of the assistant are one message: its reasoning, its text, its calls.

    Args:
        instructions: the words before all items; None: there are none.
    """

    def __init__(self, instructions: str | None) -> None:
        self._messages: list[dict[str, Any]] = []
        """The messages so far, whose contents are lists of texts, as reasoning is."""
        self.left_out: list[str] = []
        """The types of items that no chat has, in the order of `input`."""
        self._turn: dict[str, Any] | None = None
        """The turn of the assistant that further items may belong to, the last message."""
        self._names: dict[str, str] = {}
        """The names of called tools by the call's id."""
        self._leads = True
        """Whether nobody but the system has spoken."""
        self._readers: Mapping[str, Callable[[Mapping[str, Any], str], None]] = {
            "message": self._read_message,
            "reasoning": self._read_reasoning,
            "function_call": self._read_function_call,
            "custom_tool_call": self._read_custom_call,
            **dict.fromkeys(_ACTIONS, self._read_action),
            **dict.fromkeys(_OUTPUTS, self._read_output),
        }
        if instructions:
            self._say("system", instructions)

    def read(self, given: str | Sequence[Any]) -> None:
        """Read the whole `input`; raise `InvalidField` if an item cannot be read."""
        if isinstance(given, str):
            self._say("user", given)
            return
        for number, item in enumerate(given):
            place = f"input[{number}]"
            if not isinstance(item, dict):
                raise InvalidField(place, "must be an object")
            self._read_item(item, place)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far."""
        return [_with_whole_texts(one) for one in self._messages]

    def _read_item(self, item: Mapping[str, Any], place: str) -> None:
        kind = item.get("type")
        if kind is None:
            kind = _REFERENCE if "role" not in item and "id" in item else "message"
        if not isinstance(kind, str):
            raise InvalidField(f"{place}.type", "must be a string")
        if kind == _REFERENCE:
            what = "is not served, since no response is stored: send the item itself"
            raise InvalidField(f"{place}.{_REFERENCE}", what)
        reader = self._readers.get(kind)
        if reader is None:
            self.left_out.append(kind)
        else:
            reader(item, place)

    def _read_message(self, item: Mapping[str, Any], place: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidField(f"{place}.role", f"must be one of {', '.join(_ROLES)}")
        content = item.get("content")
        text = _text_of_parts(content, f"{place}.content")
        if role == "assistant":
            turn = self._open_turn(begins=self._said("content") and not self._said("tool_calls"))
            turn["content"] += [text] if text else []
        else:
            self._say(role, text)

    def _read_reasoning(self, item: Mapping[str, Any], place: str) -> None:
        """Take the reasoning itself, or else its summary; what is encrypted nobody can read."""
        for name in ("content", "summary"):
            text = _text_of_parts(item.get(name), f"{place}.{name}")
            if text:
                self._open_turn().setdefault("reasoning_content", []).append(text)
                return

    def _read_function_call(self, item: Mapping[str, Any], place: str) -> None:
        name = flat_name(_string(item, "name", place), _string(item, "namespace", place, ""))
        self._call(item, place, name, item.get("arguments"))

    def _read_custom_call(self, item: Mapping[str, Any], place: str) -> None:
        name = flat_name(_string(item, "name", place), _string(item, "namespace", place, ""))
        self._call(item, place, name, {INPUT: _string(item, "input", place)})

    def _read_action(self, item: Mapping[str, Any], place: str) -> None:
        name, member = _ACTIONS[item["type"]]
        given = item.get(member)
        if not isinstance(given, dict):
            raise InvalidField(f"{place}.{member}", "must be an object")
        self._call(item, place, name, given)

    def _call(self, item: Mapping[str, Any], place: str, name: str, arguments: Any) -> None:
        call_id = _string(item, "call_id", place)
        self._names[call_id] = name
        if not isinstance(arguments, str | dict | None):
            raise InvalidField(f"{place}.arguments", "must be a string")
        call = {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._open_turn().setdefault("tool_calls", []).append(call)

    def _read_output(self, item: Mapping[str, Any], place: str) -> None:
        """Take a call's output, which older clients name by the member `id`."""
        call_id = _string(item, "call_id", place, "") or _string(item, "id", place)
        output = item.get("output")
        if output is None:
            output = item.get("status") or ""
        message = {"role": "tool", "tool_call_id": call_id, "content": [_text_of_output(output)]}
        name = self._names.get(call_id)
        self._turn = None
        self._leads = False
        self._messages.append(message if name is None else {**message, "name": name})

    def _say(self, role: str, text: str) -> None:
        """Add a message; all that the system says before others speak is one."""
        self._turn = None
        is_leading = self._leads and role in _LEADING
        if is_leading and self._messages:
            self._messages[0]["content"].append(text)
        else:
            self._messages.append({"role": "system" if is_leading else role, "content": [text]})
        self._leads = is_leading

    def _open_turn(self, *, begins: bool = False) -> dict[str, Any]:
        """Return the assistant's turn that goes on, or a new one."""
        if self._turn is None or begins:
            self._turn = {"role": "assistant", "content": []}
            self._messages.append(self._turn)
            self._leads = False
        return self._turn

    def _said(self, member: str) -> bool:
        return self._turn is not None and bool(self._turn.get(member))


def _with_whole_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose texts are joined: once, for there may be very many."""
    between = "\n\n" if message["role"] == "system" else "\n"
    names = [name for name in ("content", "reasoning_content") if name in message]
    return {**message, **{name: between.join(message[name]) for name in names}}


def _string(item: Mapping[str, Any], name: str, place: str, default: str | None = None) -> str:
    """Return a member that is a string; without a default it must be there."""
    given = item.get(name)
    given = default if given is None else given
    if given is None:
        raise InvalidField(f"{place}.{name}", "is missing")
    if not isinstance(given, str):
        raise InvalidField(f"{place}.{name}", "must be a string")
    return given


def _text_of_parts(given: Any, place: str) -> str:
    """Return the text of a content, each part of which becomes a line."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise InvalidField(place, "must be a text, or a list of parts")
    return "\n".join([_text_of(part, f"{place}[{n}]") for n, part in enumerate(given)])


def _text_of(part: Any, place: str) -> str:
    """Return a part's text, whatever type of text it is; a refusal is the model's word, too."""
    text = _text_or_none(part)
    if text is None:
        raise InvalidField(place, "must be a text: the model reads no images, files or sounds")
    return text


def _text_or_none(part: Any) -> str | None:
    if not isinstance(part, dict):
        return part if isinstance(part, str) else None
    text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
    return text if isinstance(text, str) else None


def _text_of_output(given: Any) -> str:
    """Return a tool's output as text; an output without parts is shown as JSON."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(_is_part(one) for one in given):
        return json.dumps(given, ensure_ascii=False)
    texts = [(_text_or_none(one), one["type"]) for one in given]
    return "\n".join([_NO_TEXT.format(type=t[:64]) if text is None else text for text, t in texts])


def _is_part(given: Any) -> bool:
    return isinstance(given, dict) and isinstance(given.get("type"), str)

"""The output of a Responses answer: its items, and the events that tell of each as it grows."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Final

from kvrelay.router.doors.http.responses.called_tools import INPUT, CalledTool
from kvrelay.router.doors.http.responses.custom_input import CustomInput
from kvrelay.text.output_parsers.pieces import OutputPiece

Told = tuple[str, str]
"""The type of an event, and its members in JSON, without type and number."""
_STARTS: Final = "in_progress"


class _Words:
    """A message or reasoning: an item with one part, which is text.

    Args:
        index: its place in the output.
        is_reasoning: whether it is reasoning.
    """

    def __init__(self, index: int, *, is_reasoning: bool) -> None:
        self.is_reasoning = is_reasoning
        self._id = f"{'rs' if is_reasoning else 'msg'}_{uuid.uuid4().hex}"
        self._kind = "reasoning_text" if is_reasoning else "output_text"
        self._place = f'"output_index":{index}'
        self._within = f'"item_id":"{self._id}",{self._place},"content_index":0'
        self._logprobs = "" if is_reasoning else ',"logprobs":[]'
        self._texts: list[str] = []

    def begin(self) -> list[Told]:
        """Return the events of an item and its part, both empty."""
        item, part = self._item(_STARTS, ""), self._part("")
        return [
            ("response.output_item.added", f'{self._place},"item":{item}'),
            ("response.content_part.added", f'{self._within},"part":{part}'),
        ]

    def add(self, text: str) -> list[Told]:
        """Take some more text; return the event that tells of it."""
        self._texts.append(text)
        delta = f'{self._within},"delta":{quoted(text)}{self._logprobs}'
        return [(f"response.{self._kind}.delta", delta)]

    def end(self, status: str) -> tuple[list[Told], str]:
        """Return the events of the whole text, and the item in JSON."""
        text = "".join(self._texts)
        part = self._part(text)
        item = self._item(status, part)
        done = f'{self._within},"text":{quoted(text)}{self._logprobs}'
        told = [
            (f"response.{self._kind}.done", done),
            ("response.content_part.done", f'{self._within},"part":{part}'),
            ("response.output_item.done", f'{self._place},"item":{item}'),
        ]
        return told, item

    def _part(self, text: str) -> str:
        extra = "" if self.is_reasoning else '"annotations":[],"logprobs":[],'
        return f'{{"type":"{self._kind}",{extra}"text":{quoted(text)}}}'

    def _item(self, status: str, part: str) -> str:
        kind = '"type":"message","role":"assistant"'
        if self.is_reasoning:
            kind = '"type":"reasoning","summary":[],"encrypted_content":null'
        return f'{{"id":"{self._id}",{kind},"status":"{status}","content":[{part}]}}'


class _Call:
    """A call of a tool: of a function, or of a custom tool, whose input is a text.

    Args:
        index: its place in the output.
        tool: the tool that is called.
        call_id: the id by which its output will name it.
    """

    def __init__(self, index: int, tool: CalledTool, call_id: str) -> None:
        self._input = CustomInput() if tool.is_custom else None
        kind = "custom_tool_call" if tool.is_custom else "function_call"
        self._member = INPUT if tool.is_custom else "arguments"
        self._changes = f"response.{kind}_{self._member}"
        item_id = f"{'ctc' if tool.is_custom else 'fc'}_{uuid.uuid4().hex}"
        self._place = f'"output_index":{index}'
        self._within = f'"item_id":"{item_id}",{self._place}'
        self._name = quoted(tool.name)
        namespace = f',"namespace":{quoted(tool.namespace)}' if tool.namespace else ""
        self._head = (
            f'"id":"{item_id}","type":"{kind}","call_id":{quoted(call_id)},'
            f'"name":{self._name}{namespace}'
        )
        self._texts: list[str] = []

    def begin(self) -> list[Told]:
        """Return the event of a call without arguments."""
        item = self._item(_STARTS, "")
        return [("response.output_item.added", f'{self._place},"item":{item}')]

    def add(self, arguments: str) -> list[Told]:
        """Take some more arguments; return the event that tells of them, if there is one."""
        return self._tell(arguments if self._input is None else self._input.push(arguments))

    def end(self, status: str) -> tuple[list[Told], str]:
        """Return the events of the whole arguments, and the call in JSON."""
        told = self._tell("" if self._input is None else self._input.finish())
        text = "".join(self._texts)
        item = self._item(status, text)
        done = f'{self._within},"name":{self._name},"{self._member}":{quoted(text)}'
        told.append((f"{self._changes}.done", done))
        told.append(("response.output_item.done", f'{self._place},"item":{item}'))
        return told, item

    def _tell(self, text: str) -> list[Told]:
        if not text:
            return []
        self._texts.append(text)
        return [(f"{self._changes}.delta", f'{self._within},"delta":{quoted(text)}')]

    def _item(self, status: str, text: str) -> str:
        return f'{{{self._head},"{self._member}":{quoted(text)},"status":"{status}"}}'


class ResponseOutput:
    """The items of one answer, which the pieces of an output become in their order.

    Args:
        told_as: returns the tool of a call by its name in the chat.
        tells_reasoning: whether reasoning is a part of the output.
    """

    def __init__(self, told_as: Callable[[str], CalledTool], *, tells_reasoning: bool) -> None:
        self._told_as = told_as
        self._tells_reasoning = tells_reasoning
        self._complete: list[str] = []
        """The complete items in JSON."""
        self._open: _Words | _Call | None = None
        """The item that grows."""
        self._space = ""
        """Space that begins a message or reasoning; alone it is none."""

    def take(self, pieces: Sequence[OutputPiece]) -> list[Told]:
        """Take some more pieces, each call's first one with its id; return the events of them."""
        told: list[Told] = []
        for piece in pieces:
            if piece.call is not None:
                told += self._take_call(piece)
            elif piece.content:
                told += self._take_words(piece.content, is_reasoning=False)
            elif piece.reasoning and self._tells_reasoning:
                told += self._take_words(piece.reasoning, is_reasoning=True)
        return told

    def finish(self, status: str) -> list[Told]:
        """End the last item with this status; an output without items is an empty message."""
        if self._open is not None:
            return self._end(status)
        empty, space = _Words(0, is_reasoning=False), self._space
        told = self._begin(empty)
        return [*told, *(empty.add(space) if space else ()), *self._end(status)]

    @property
    def items(self) -> str:
        """The complete items, as a list in JSON."""
        return f"[{','.join(self._complete)}]"

    def _take_words(self, text: str, *, is_reasoning: bool) -> list[Told]:
        words = self._open
        if isinstance(words, _Words) and words.is_reasoning is is_reasoning:
            return words.add(text)
        self._space += text
        if text.isspace():
            return []
        text = self._space
        begun = _Words(self._next_index, is_reasoning=is_reasoning)
        return [*self._begin(begun), *begun.add(text)]

    def _take_call(self, piece: OutputPiece) -> list[Told]:
        told: list[Told] = []
        if piece.name:
            call = _Call(self._next_index, self._told_as(piece.name), piece.call_id)
            told += self._begin(call)
        if piece.arguments and self._open is not None:
            told += self._open.add(piece.arguments)
        return told

    @property
    def _next_index(self) -> int:
        return len(self._complete) + (self._open is not None)

    def _begin(self, item: _Words | _Call) -> list[Told]:
        """End the item before, and begin another."""
        told = self._end("completed")
        self._open, self._space = item, ""
        return told + item.begin()

    def _end(self, status: str) -> list[Told]:
        if self._open is None:
            return []
        told, item = self._open.end(status)
        self._complete.append(item)
        self._open = None
        return told

"""The parts of a chat's output in answers: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from json.encoder import encode_basestring_ascii as quoted

from kvrelay.text.output_parsers.json_calls import is_json
from kvrelay.text.output_parsers.pieces import OutputParser, OutputPiece


class Spoken:
    """One choice's output, split into its parts.

    Args:
        parser: the parser that splits it.
        new_id: makes the id of a call, by its name and number, if the model has written none.
    """

    def __init__(self, parser: OutputParser, new_id: Callable[[str, int], str]) -> None:
        self._parser = parser
        self._new_id = new_id
        self._pieces: list[OutputPiece] = []
        """The pieces of a whole answer."""
        self._begun: list[tuple[str, str]] = []
        self._arguments: list[list[str]] = []
        """Of each call, its id and its name, and the parts of its arguments."""

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, all of which have arguments that clients can read."""
        return bool(self._begun) and all(is_json("".join(parts)) for parts in self._arguments)

    def push(self, text: str) -> list[str]:
        """Return the members of chunks that some more text completes; often none."""
        return [self._delta(piece) for piece in self._parser.push(text)]

    def finish(self, *, is_cut: bool) -> list[str]:
        """Return the members of the last chunks, for an output that was cut off or not."""
        return [self._delta(piece) for piece in self._parser.finish(is_cut=is_cut)]

    def take(self, text: str) -> None:
        """Take some more text of a whole answer."""
        self._pieces += self._parser.push(text)

    def message(self, *, is_cut: bool) -> str:
        """Return the member of a whole answer's choice, for all of the text that it was given."""
        self._pieces += self._parser.finish(is_cut=is_cut)
        for piece in self._pieces:
            self._note(piece)
        content = "".join([piece.content for piece in self._pieces])
        reasoning = "".join([piece.reasoning for piece in self._pieces])
        whole = zip(self._begun, map("".join, self._arguments), strict=True)
        calls = [_begun(*begun, arguments) for begun, arguments in whole]
        members = ['"role":"assistant"']
        members.append(f'"content":{quoted(content) if content or not calls else "null"}')
        if reasoning:
            members.append(f'"reasoning_content":{quoted(reasoning)}')
        if calls:
            members.append(f'"tool_calls":[{",".join(calls)}]')
        return f'"message":{{{",".join(members)}}}'

    def _delta(self, piece: OutputPiece) -> str:
        if piece.call is None:
            name = "reasoning_content" if piece.reasoning else "content"
            return f'"delta":{{"{name}":{quoted(piece.reasoning or piece.content)}}}'
        self._note(piece)
        if piece.name:
            call = _begun(*self._begun[-1], "", f'"index":{piece.call},')
        else:
            arguments = quoted(piece.arguments)
            call = f'{{"index":{piece.call},"function":{{"arguments":{arguments}}}}}'
        return f'"delta":{{"tool_calls":[{call}]}}'

    def _note(self, piece: OutputPiece) -> None:
        """Keep a call's id, name and arguments."""
        if piece.call is not None and piece.name:
            call_id = piece.call_id or self._new_id(piece.name, piece.call)
            self._begun.append((call_id, piece.name))
            self._arguments.append([])
        if piece.call is not None:
            self._arguments[-1].append(piece.arguments)


def _begun(call_id: str, name: str, arguments: str, index: str = "") -> str:
    function = f'{{"name":{quoted(name)},"arguments":{quoted(arguments)}}}'
    return f'{{{index}"id":{quoted(call_id)},"type":"function","function":{function}}}'

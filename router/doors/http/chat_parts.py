"""The parts of a chat's output in answers: content, reasoning and tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring_ascii as quoted

from kvrelay.text.output_parsers.pieces import OutputParser, OutputPiece


class Spoken:
    """One choice's output, split into its parts.

    Args:
        parser: the parser that splits it.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self.num_calls = 0

    def push(self, text: str) -> list[str]:
        """Return the members of chunks that some more text completes; often none."""
        return [self._delta(piece) for piece in self._parser.push(text)]

    def finish(self) -> list[str]:
        """Return the members of the last chunks."""
        return [self._delta(piece) for piece in self._parser.finish()]

    def message(self, text: str) -> str:
        """Return the member of a whole answer's choice, for all of the text."""
        pieces = [*self._parser.push(text), *self._parser.finish()]
        content = "".join([piece.content for piece in pieces])
        reasoning = "".join([piece.reasoning for piece in pieces])
        calls = self._calls(pieces)
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
        if piece.name:
            self.num_calls += 1
            call = _begun(piece.name, "", f'"index":{piece.call},')
        else:
            arguments = quoted(piece.arguments)
            call = f'{{"index":{piece.call},"function":{{"arguments":{arguments}}}}}'
        return f'"delta":{{"tool_calls":[{call}]}}'

    def _calls(self, pieces: Iterable[OutputPiece]) -> Sequence[str]:
        names: list[str] = []
        arguments: list[str] = []
        for piece in pieces:
            if piece.name:
                names.append(piece.name)
                arguments.append("")
            if piece.call is not None:
                arguments[-1] += piece.arguments
        self.num_calls = len(names)
        return [_begun(*call) for call in zip(names, arguments, strict=True)]


def _begun(name: str, arguments: str, index: str = "") -> str:
    function = f'{{"name":{quoted(name)},"arguments":{quoted(arguments)}}}'
    return f'{{{index}"id":"call_{uuid.uuid4().hex}","type":"function","function":{function}}}'

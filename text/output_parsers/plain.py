"""Outputs that have no format: content alone, the arguments of one call, or less than was found."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.text.output_parsers.pieces import OutputParser, OutputPiece


class NamedCallParser:
    """The arguments of one call, and nothing else.

    Args:
        name: of the tool.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The text, after the name."""
        if not text:
            return []
        name, self._name = self._name, ""
        return [
            *([OutputPiece(call=0, name=name)] if name else []),
            OutputPiece(call=0, arguments=text),
        ]

    def finish(self) -> Sequence[OutputPiece]:
        """Nothing."""
        return []


class ContentParser:
    """Content, and nothing else."""

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The text."""
        return [OutputPiece(content=text)] if text else []

    def finish(self) -> Sequence[OutputPiece]:
        """Nothing."""
        return []


class FirstCallParser:
    """What another parser finds, less all calls but the first.

    Args:
        parser: finds calls.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def push(self, text: str) -> Sequence[OutputPiece]:
        """What is sure after some more text."""
        return [piece for piece in self._parser.push(text) if not piece.call]

    def finish(self) -> Sequence[OutputPiece]:
        """The rest."""
        return [piece for piece in self._parser.finish() if not piece.call]

"""Outputs without a format: content alone, the arguments of one call, or the first call alone."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.text.output_parsers.pieces import OutputParser, OutputPiece


class NamedCallParser:
    """A parser of outputs that are the arguments of one call, and nothing else.

    Args:
        name: the tool's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The text as arguments; the first piece has the name."""
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
    """A parser of outputs that are content, and nothing else."""

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The text as content."""
        return [OutputPiece(content=text)] if text else []

    def finish(self) -> Sequence[OutputPiece]:
        """Nothing."""
        return []


class FirstCallParser:
    """A parser that drops all calls but the first from another parser's pieces.

    Args:
        parser: the parser that finds calls.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The pieces that are certain after some more text."""
        return [piece for piece in self._parser.push(text) if not piece.call]

    def finish(self) -> Sequence[OutputPiece]:
        """The remaining pieces."""
        return [piece for piece in self._parser.finish() if not piece.call]

"""Outputs without a format: content alone, the arguments of one call, or the first call alone."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.text.output_parsers.json_calls import is_json
from kvrelay.text.output_parsers.pieces import OutputParser, OutputPiece


class NamedCallParser:
    """A parser of outputs that are the arguments of one call, and nothing else.

    Args:
        name: the tool's name.
        is_whole: tell the call at its end, unless it was cut off.
    """

    def __init__(self, name: str, *, is_whole: bool = False) -> None:
        self._name = name
        self._held: list[str] | None = [] if is_whole else None

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The text as arguments; the first piece has the name."""
        if self._held is not None:
            self._held.append(text)
            return []
        return self._pieces(text)

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputPiece]:
        """The call, if it was held back."""
        text = "".join(self._held or ())
        return [] if is_cut and not is_json(text) else self._pieces(text)

    def _pieces(self, text: str) -> Sequence[OutputPiece]:
        if not text:
            return []
        name, self._name = self._name, ""
        return [
            *([OutputPiece(call=0, name=name)] if name else []),
            OutputPiece(call=0, arguments=text),
        ]


class CallsAloneParser:
    """A parser that drops all content from another parser's pieces: the output is held to calls.

    Args:
        parser: the parser that finds calls.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The pieces of calls, and of reasoning, that are certain after some more text."""
        return [piece for piece in self._parser.push(text) if not piece.content]

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputPiece]:
        """The remaining pieces of these."""
        return [piece for piece in self._parser.finish(is_cut=is_cut) if not piece.content]


class ContentParser:
    """A parser of outputs that are content, and nothing else."""

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The text as content."""
        return [OutputPiece(content=text)] if text else []

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputPiece]:
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

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputPiece]:
        """The remaining pieces."""
        return [piece for piece in self._parser.finish(is_cut=is_cut) if not piece.call]

"""Reasoning between two tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvrelay.text.output_parsers.held_text import EndingSpace, is_long, overlap
from kvrelay.text.output_parsers.pieces import OutputParser, OutputPiece


class ReasoningParser:
    """A parser of reasoning between two tags; another parser takes the text behind it.

    Args:
        rest: the parser of the text behind the reasoning.
        begins_inside: the prompt has begun the reasoning.
        skips_space: white space at the beginning does not belong to the text.
    """

    OPEN: Final = "<think>"
    CLOSE: Final = "</think>"

    def __init__(
        self, rest: OutputParser, *, begins_inside: bool, skips_space: bool = True
    ) -> None:
        self._rest = rest
        self._held = ""
        self._is_inside: bool | None = True if begins_inside else None
        """Whether the text is inside the reasoning; None: it is not known yet."""
        self._skips_space = skips_space
        """White space right behind a tag does not belong to the text."""
        self._space = EndingSpace()

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The pieces that are certain after some more text."""
        self._held += text
        if self._is_inside is None:
            begun = self._held.lstrip()
            waits = not is_long(len(self._held) - len(begun))
            if begun.startswith(self.OPEN) and waits:
                self._is_inside, self._held = True, begun.removeprefix(self.OPEN)
            elif self.OPEN.startswith(begun) and waits:
                return []
            else:
                self._is_inside = self._skips_space = False
        if self._is_inside:
            return self._inside()
        return self._behind()

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputPiece]:
        """The remaining pieces."""
        if self._is_inside:
            held, self._held = self._space.cut(self._held), ""
            return [OutputPiece(reasoning=held)] if held else []
        if self._is_inside is None:
            self._skips_space = False
        return [*self._behind(), *self._rest.finish(is_cut=is_cut)]

    def _inside(self) -> Sequence[OutputPiece]:
        if self._skips_space:
            self._held = self._held.lstrip()
            self._skips_space = not self._held
        at = self._held.find(self.CLOSE)
        if at < 0:
            possible = overlap(self._held, self.CLOSE)
            sure = self._space.cut(self._held[: len(self._held) - possible])
            self._held = self._held[len(sure) :]
            return [OutputPiece(reasoning=sure)] if sure else []
        said = self._space.cut(self._held[:at])
        self._held = self._held[at + len(self.CLOSE) :]
        self._is_inside, self._skips_space = False, True
        return [*([OutputPiece(reasoning=said)] if said else []), *self._behind()]

    def _behind(self) -> Sequence[OutputPiece]:
        text, self._held = self._held, ""
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return self._rest.push(text)

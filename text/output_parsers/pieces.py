"""The pieces of a chat's output while it arrives: reasoning, content, and tool calls.

The pieces do not depend on where the text is cut. Text that turns out to be no call is content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """A further piece of one part of an output."""

    content: str = ""
    reasoning: str = ""
    is_unclosed: bool = False
    """Whether the output has ended in its reasoning, of which this is the last piece."""
    call: int | None = None
    """The number of the call that the piece is a part of, from 0."""
    name: str = ""
    """The tool's name; the first piece of a call has it, whole."""
    call_id: str = ""
    """The call's id, beside the name, if the model has written one."""
    arguments: str = ""
    """A part of the call's arguments, in JSON."""


def all_pieces(step: Callable[[list[OutputPiece]], bool]) -> list[OutputPiece]:
    """Call `step` until it returns False; return the pieces that it added."""
    pieces: list[OutputPiece] = []
    while step(pieces):
        pass
    return pieces


class OutputParser(Protocol):
    """A parser of one output."""

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The pieces that are certain after some more text."""

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputPiece]:
        """The remaining pieces, as the output has ended.

        Args:
            is_cut: something else than the model has ended it, such as `max_tokens`.
        """


MakeParser: TypeAlias = Callable[[bool], OutputParser]
"""A function that makes a parser; True: for an output that is told at its end, as a whole."""

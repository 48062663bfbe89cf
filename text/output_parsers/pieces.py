"""What a chat's output is taken apart into, as it comes: reasoning, content, and calls of tools.

What is said does not depend on where the text is cut. What turns out to be no call is content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Some more of one part of an output."""

    content: str = ""
    reasoning: str = ""
    call: int | None = None
    """The call that it is a part of, from 0."""
    name: str = ""
    """Of the tool; the first piece of a call has it, whole."""
    arguments: str = ""
    """Of the call, in JSON."""


def all_pieces(step: Callable[[list[OutputPiece]], bool]) -> list[OutputPiece]:
    """What `step` adds, called until it says that nothing more can be taken for now."""
    pieces: list[OutputPiece] = []
    while step(pieces):
        pass
    return pieces


class OutputParser(Protocol):
    """Takes one output apart."""

    def push(self, text: str) -> Sequence[OutputPiece]:
        """What is sure after some more text."""

    def finish(self) -> Sequence[OutputPiece]:
        """The rest: the output has ended."""

"""How much of an output waits for what comes behind it."""

from __future__ import annotations

from typing import Final

_MOST_SPACE: Final = 1024
"""Characters of white space, or of a call's name, that wait for what comes behind them."""


def is_long(characters: int) -> bool:
    """Whether so much white space, or so long a name, waits no longer."""
    return characters > _MOST_SPACE


class EndingSpace:
    """Decides about white space at the end of a text that may be that before a tag.

    So much of it is held back, since all that is held is looked at with each new token. A longer
    run is a part of the text before it, however it was cut.
    """

    def __init__(self) -> None:
        self.is_long = False
        """The latest text has ended in such a run."""

    def cut(self, text: str) -> str:
        """The text, less white space at its end that is not too long."""
        bare = text.rstrip()
        goes_on = self.is_long and not bare
        self.is_long = goes_on or is_long(len(text) - len(bare))
        return text if self.is_long else bare


def overlap(text: str, tag: str) -> int:
    """Characters at the end of a text that a tag may begin with."""
    most = min(len(text), len(tag) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(tag[:n])), 0)

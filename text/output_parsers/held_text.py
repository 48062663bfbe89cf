"""The part of an output that is held back until its continuation is known."""

from __future__ import annotations

from typing import Final

_MOST_SPACE: Final = 1024
"""The most characters of white space, or of a call's name, that are held back."""


def is_long(characters: int) -> bool:
    """Whether white space, or a name, of this length is held back no longer."""
    return characters > _MOST_SPACE


class EndingSpace:
    """White space at the end of a text, which may turn out to stand before a tag.

    It is held back up to a bound, since everything held is examined again with each new token. A
    longer run is part of the text before it, wherever the text is cut.
    """

    def __init__(self) -> None:
        self.is_long = False
        """The latest text has ended in a run that is too long."""

    def cut(self, text: str) -> str:
        """The text without the white space at its end, unless that is too long."""
        bare = text.rstrip()
        goes_on = self.is_long and not bare
        self.is_long = goes_on or is_long(len(text) - len(bare))
        return text if self.is_long else bare


def overlap(text: str, tag: str) -> int:
    """The number of characters at the end of a text that a tag may begin with."""
    most = min(len(text), len(tag) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(tag[:n])), 0)

"""An amount of memory that is told as a part of a device's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_SHARE: Final = re.compile(r"(?P<part>[0-9]*\.[0-9]+)|(?P<percent>[0-9]+(?:\.[0-9]+)?)\s*%")
_AUTO: Final = 0.9


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """What a worker may take of its GPU's memory, weights and all else included."""

    part: float

    @classmethod
    def parse(cls, text: str) -> MemoryShare | None:
        """Read ``auto``, ``0.85`` or ``85%``; None: it is written otherwise, as whole bytes are.

        Raises ValueError, with a message that says what is wrong.
        """
        if text.strip() == "auto":
            return cls(_AUTO)
        match = _SHARE.fullmatch(text.strip())
        if match is None:
            return None
        part = float(match["part"] or float(match["percent"]) / 100)
        if not 0 < part <= 1:
            raise ValueError(f"{text!r}: a share is more than 0 and at most 1, or 100%")
        return cls(part)

    def __str__(self) -> str:
        return "auto" if self.part == _AUTO else f"{self.part:g}"

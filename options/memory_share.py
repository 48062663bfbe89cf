"""An amount of memory given as a share of a device's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_SHARE: Final = re.compile(r"(?P<part>[0-9]*\.[0-9]+)|(?P<percent>[0-9]+(?:\.[0-9]+)?)\s*%")
_AUTO: Final = 0.9


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The share of its GPU's memory that a worker may take, weights and all else included."""

    part: float
    is_auto: bool = False
    """Whether nobody has chosen the share; workers that share a GPU then divide it."""

    @classmethod
    def parse(cls, text: str) -> MemoryShare | None:
        """Read ``auto``, ``0.85`` or ``85%``; None: another form, such as whole bytes.

        Raises ValueError for a share out of range.
        """
        if text.strip() == "auto":
            return cls.auto()
        match = _SHARE.fullmatch(text.strip())
        if match is None:
            return None
        part = float(match["part"] or float(match["percent"]) / 100)
        if not 0 < part <= 1:
            raise ValueError(f"{text!r}: a share is more than 0 and at most 1, or 100%")
        return cls(part)

    @classmethod
    def auto(cls) -> MemoryShare:
        """The share of a worker that is told ``auto``."""
        return cls(_AUTO, is_auto=True)

    def __str__(self) -> str:
        return "auto" if self.is_auto else f"{self.part:g}"

"""The classes of characters in regular expressions: ASCII, as in JSON's patterns."""

from __future__ import annotations

import re
from typing import Final

_CLASSES: Final = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\x0B\x0C\r\x20"}
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)


def ascii_classes(regex: str) -> str:
    r"""A regular expression with the ASCII characters of `\d`, `\w` and `\s` alone.

    Rust's engine takes the digits of all scripts for `\d`, which nobody means. Those are `\p{Nd}`.
    """
    return _ESCAPE.sub(_expanded, regex)


def _expanded(found: re.Match[str]) -> str:
    name = found[1]
    members = _CLASSES.get(name.lower())
    if members is None:
        return found[0]
    return f"[{'^' if name.isupper() else ''}{members}]"  # a class may be inside another

"""Amounts of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"(?P<amount>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")


def parse_size(text: str) -> int:
    """Return the bytes in `512MiB`, `1.5 GiB`, `2GB` or `1048576`.

    Raises ValueError, with a message that says what is wrong.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match["unit"].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write bytes, or like 512MiB or 2GiB")
    unit = _UNITS[match["unit"].upper()]
    if "." in match["amount"]:
        return int(float(match["amount"]) * unit)
    return int(match["amount"]) * unit


def format_size(size: int) -> str:
    """Return the shortest exact spelling: `512MiB`; plain bytes if no unit divides."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        amount, rest = divmod(size, _UNITS[unit.upper()])
        if amount and not rest:
            return f"{amount}{unit}"
    return str(size)

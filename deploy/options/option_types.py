"""Types of option values that click does not have."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.sizes import parse_size
from kvrelay.options.memory_share import MemoryShare

T = TypeVar("T")


class ParsedParam(click.ParamType[T]):
    """A value that a function reads from its text.

    Args:
        name: the form of the text, for the help.
        parse: reads the text. It raises ValueError, whose message ends the command.
        kinds: the types of values that are taken as they are.
    """

    def __init__(self, name: str, parse: Callable[[str], T], *kinds: type) -> None:
        self.name = name
        self._parse = parse
        self._kinds = kinds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value."""
        if isinstance(value, self._kinds):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def comma_list(name: str, parse: Callable[[str], T]) -> ParsedParam[tuple[T, ...]]:
    """Return the type of one or more values between commas, each read by `parse`."""
    return ParsedParam(name, lambda text: tuple(parse(one) for one in text.split(",")), tuple)


def _parse_switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(f"{text!r} is neither on nor off")
    return text == "on"


def _positive_int(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _positive_float(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{text!r} is not a number above 0")
    return value


def _parse_memory(text: str) -> int | MemoryShare:
    return MemoryShare.parse(text) or parse_size(text)


SIZE = ParsedParam("size", parse_size, int)
"""An amount of memory: ``512MiB``, ``2GiB`` or plain bytes."""
MEMORY = ParsedParam("size|share|auto", _parse_memory, int, MemoryShare)
"""An amount of memory, or a part of a device's: ``auto``, ``0.85`` or ``85%``."""
SWITCH = ParsedParam("on|off", _parse_switch, bool)
ADDRESS = ParsedParam("host:port", Address.parse, Address)
INTS = comma_list("n,...", _positive_int)
FLOATS = comma_list("rate,...", _positive_float)
FILE = click.Path(path_type=Path)
"""The type of a path; the code that reads the file checks it."""

"""Command-line values that are lists: ``1,8,32`` and ``256/128,1024/64``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from kvrelay.deploy.load_generator.workload import Shape


class CommaList(click.ParamType[Any]):
    """One or more values between commas, each read by ``parse``."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Return the values; a bad one ends the command with its message."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._parse(item) for item in str(value).split(","))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _positive_int(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _positive_float(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{text!r} is not a number above 0")
    return value


SHAPES = CommaList("in/out,...", Shape.parse)
SLOTS = CommaList("n,...", _positive_int)
RATES = CommaList("rate,...", _positive_float)

"""The options of `kvrelay serve` as Markdown, as docs/configuration.md shows them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Final

from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.option_flags import shown_default, takes_no_value
from kvrelay.deploy.options.serve_options import ServeOptions
from kvrelay.options.declaration import Option, Section, options_of

_VALUES: Final[dict[type, str]] = {
    int: "integer",
    float: "number",
    bool: "`on`, `off`",
    str: "text",
    Path: "path",
    Address: "host:port",
}


def markdown() -> str:
    """Return a heading and a table for each section."""
    sections = groupby(options_of(ServeOptions), key=lambda one: one.section)
    return "\n\n".join(_section(heading, options) for heading, options in sections)


def _section(heading: Section, options: Iterable[Option]) -> str:
    rows = [f"| `{one.flag}` | {_value(one)} | {_default(one)} | {one.help} |" for one in options]
    head = ["| Option | Value | Default | What it does |", "| --- | --- | --- | --- |"]
    return "\n".join([f"### {heading}", "", *head, *rows])


def _value(option: Option) -> str:
    if takes_no_value(option):
        return "none"
    if option.choices:
        return ", ".join(f"`{one}`" for one in option.choices)
    if option.declaration.unit == "bytes":
        return "size, share, `auto`" if option.declaration.or_share else "size"
    return ", ".join(part for part in (_VALUES[option.kind], option.bounds) if part)


def _default(option: Option) -> str:
    default = shown_default(option)
    in_words = option.declaration.shown_default is not None
    return default if in_words or not default else f"`{default}`"


if __name__ == "__main__":
    print(markdown())  # noqa: T201

"""Declared options as click options: types, defaults, and help under headings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import click

from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.option_types import ADDRESS, FILE, MEMORY, SIZE, SWITCH
from kvrelay.deploy.options.sizes import format_size
from kvrelay.options.declaration import Option, Section, options_of


class DeclaredOption(click.Option):
    """A click option with the heading under which the help lists it."""

    def __init__(self, names: Sequence[str], *, section: Section, **attributes: Any) -> None:
        super().__init__(names, **attributes)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help lists declared options under headings, and others as click does."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the help."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is not None:
                sections.setdefault(_heading(one), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def declared_options(
    owner: type, only: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command every option that `owner` declares, or only the fields of these names."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for one in reversed(options_of(owner)):
            if only is None or one.name in only:
                command = _click_option(one)(command)
        return command

    return decorate


def shown_default(option: Option) -> str:
    """Return the default as a user would write it, or its description; empty if there is none."""
    if option.declaration.shown_default is not None:
        return option.declaration.shown_default
    if option.default is None:
        return ""
    if option.kind is bool:
        return "on" if option.default else "off"
    return str(_as_written(option))


def takes_no_value(option: Option) -> bool:
    """Return whether the option is a flag: a bool that defaults to False."""
    return option.kind is bool and not option.default


def type_of(option: Option) -> click.ParamType[Any]:
    """Return the click type that reads the option's value."""
    declared = option.declaration
    if option.choices:
        return click.Choice(option.choices)
    if option.kind is int and declared.unit == "bytes":
        return MEMORY if declared.or_share else SIZE
    if option.kind is int:
        return click.IntRange(_whole(declared.at_least), _whole(declared.at_most))
    if option.kind is float:
        least = declared.at_least if declared.more_than is None else declared.more_than
        return click.FloatRange(least, declared.at_most, min_open=declared.more_than is not None)
    return {bool: SWITCH, Path: FILE, Address: ADDRESS, str: click.STRING}[option.kind]


def _click_option(option: Option) -> Callable[[Callable[..., None]], Callable[..., None]]:
    is_flag = takes_no_value(option)
    attributes: dict[str, Any] = {"is_flag": True} if is_flag else {"type": type_of(option)}
    if option.default is not None:
        attributes["default"] = _as_written(option)
    if option.declaration.shown_default is not None or attributes.get("type") is SWITCH:
        attributes["show_default"] = shown_default(option)
    return click.option(
        option.flag,
        cls=DeclaredOption,
        section=option.section,
        metavar=option.declaration.metavar,
        help=option.help,
        **attributes,
    )


def _as_written(option: Option) -> object:
    """Return the default in the form that click reads, and that the help shows."""
    if isinstance(option.default, StrEnum):
        return option.default.value
    if option.declaration.unit == "bytes":
        return format_size(option.default)
    return str(option.default) if option.kind is Address else option.default


def _whole(bound: float | None) -> int | None:
    return None if bound is None else int(bound)


def _heading(parameter: click.Parameter) -> str:
    return parameter.section if isinstance(parameter, DeclaredOption) else "Options"

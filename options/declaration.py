"""The declaration of an option of `kvrelay serve`, as a field of the dataclass that uses it.

::

    class WorkerOptions:
        page_size: int = option(16, "Tokens in a page of KV.", Section.MEMORY, at_least=1)

From this field come the command line's ``--page-size``, the key of the TOML file, the help text and
the row in docs/configuration.md. So do the check of the value, and the default for code without a
command line, such as tests.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

from kvrelay.options.memory_share import MemoryShare

T = TypeVar("T")
_KEY: Final = "kvrelay.option"


class Section(StrEnum):
    """The headings that options stand under, in this order, in ``--help`` and in the docs."""

    MODEL = "Model"
    WORKERS = "Workers"
    MACHINES = "Ray and machines"
    MEMORY = "KV memory"
    REQUESTS = "Requests and steps"
    SPECULATION = "Speculation"
    TRANSFER = "Transfer between workers"
    ACCESS = "Addresses and access"
    RECOVERY = "Failure and drain"
    OBSERVING = "Traces and logs"
    DEBUGGING = "Tests and debugging"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Declaration:
    """The metadata of an option's field; see `option`."""

    help: str
    section: Section
    at_least: float | None
    more_than: float | None
    at_most: float | None
    choices: tuple[str, ...]
    check: Callable[[Any], object] | None
    unit: str
    metavar: str | None
    shown_default: str | None
    or_share: bool


def option(
    default: T,
    help: str,  # noqa: A002 (click's word)
    section: Section,
    *,
    at_least: float | None = None,
    more_than: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
    check: Callable[[Any], object] | None = None,
    unit: str = "",
    metavar: str | None = None,
    shown_default: str | None = None,
    or_share: bool = False,
) -> T:
    """Declare a dataclass field that is an option; the field's annotation is the option's type.

    Types: int, float, bool, str, Path, a StrEnum, or `Address`, each perhaps ``| None``; or
    ``int | MemoryShare``. A bool that defaults to False is a flag, one that defaults to True is
    ``on|off``.

    Args:
        default: the default of the field and of the option.
        help: what the option does, in one or two sentences.
        section: the heading that it stands under.
        at_least: the smallest number that is allowed.
        more_than: a bound that is not allowed itself, in place of `at_least`.
        at_most: the largest number that is allowed.
        choices: the words that are allowed; a StrEnum brings its own.
        check: raises ValueError for a value that is not allowed; the error says what it must be.
        unit: the unit of a number; an int of ``bytes`` can be written like ``512MiB``.
        metavar: the word for the value in the help.
        shown_default: the text in the help in place of the default.
        or_share: whether bytes may be given as a `MemoryShare`, too.
    """
    declaration = _Declaration(
        help=help,
        section=section,
        at_least=at_least,
        more_than=more_than,
        at_most=at_most,
        choices=choices,
        check=check,
        unit=unit,
        metavar=metavar,
        shown_default=shown_default,
        or_share=or_share,
    )
    field: T = dataclasses.field(default=default, metadata={_KEY: declaration})
    return field


@dataclass(frozen=True, slots=True)
class Option:
    """One declared option."""

    name: str
    """The field's name, e.g. ``page_size``."""
    kind: type
    """The field's type without ``| None`` and ``| MemoryShare``."""
    default: Any
    declaration: _Declaration

    @property
    def flag(self) -> str:
        """The option on the command line, e.g. ``--page-size``."""
        return flag_of(self.name)

    @property
    def help(self) -> str:
        """The description of the option's effect."""
        return self.declaration.help

    @property
    def section(self) -> Section:
        """The heading that it stands under."""
        return self.declaration.section

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that are allowed; empty if every value of the type is."""
        if issubclass(self.kind, StrEnum):
            return tuple(one.value for one in self.kind)
        return self.declaration.choices

    def checked(self, value: Any) -> Any:
        """Convert `value` to the field's type: a word of a StrEnum becomes its member.

        Raises ValueError, which says what the value must be, if it is not allowed.
        """
        if value is None:
            return None
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"must be one of {', '.join(self.choices)}, got {value!r}")
            return self.kind(value)
        if isinstance(value, str) and not value.strip() and self.default != "":
            raise ValueError("must not be empty")
        if isinstance(value, int | float) and not self._is_within_bounds(value):
            unit = f" {self.declaration.unit}" if self.declaration.unit else ""
            got = value if isinstance(value, int) else f"{value:g}"
            raise ValueError(f"must be {self.bounds}{unit}, got {got}")
        if self.declaration.check is not None:
            self.declaration.check(value)
        return value

    @property
    def bounds(self) -> str:
        """The allowed numbers, in words; empty if all are."""
        declared = self.declaration
        if declared.at_least is not None and declared.at_most is not None:
            return f"in [{declared.at_least:g}, {declared.at_most:g}]"
        if declared.more_than is not None:
            return f"more than {declared.more_than:g}"
        return "" if declared.at_least is None else f"at least {declared.at_least:g}"

    def _is_within_bounds(self, value: float) -> bool:
        declared = self.declaration
        return (
            math.isfinite(value)
            and (declared.at_least is None or value >= declared.at_least)
            and (declared.more_than is None or value > declared.more_than)
            and (declared.at_most is None or value <= declared.at_most)
        )


def options_of(owner: type) -> tuple[Option, ...]:
    """The options that a dataclass and its bases declare, by section; its own before a base's."""
    fields = {field.name: field for field in dataclasses.fields(owner)}
    kinds = typing.get_type_hints(owner)
    found = [
        Option(name, _kind_of(kinds[name]), fields[name].default, fields[name].metadata[_KEY])
        for declaring in owner.__mro__
        for name in vars(declaring).get("__annotations__", {})
        if name in fields and _KEY in fields[name].metadata
    ]
    order = list(Section)
    return tuple(sorted(found, key=lambda one: order.index(one.section)))


def values_for(owner: type, options: object) -> dict[str, Any]:
    """The values in `options` of all options that `owner` declares, by name."""
    return {one.name: getattr(options, one.name) for one in options_of(owner)}


def flag_of(name: str) -> str:
    """Spell a field's name as the command line does."""
    return "--" + name.replace("_", "-")


def _kind_of(annotation: Any) -> type:
    if isinstance(annotation, types.UnionType):
        others = (type(None), MemoryShare)
        [annotation] = (one for one in typing.get_args(annotation) if one not in others)
    kind: type = annotation
    return kind

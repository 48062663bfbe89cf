"""An option is declared once, and everything else about it follows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

import click
import pytest
from click.testing import CliRunner

from kvrelay.deploy.options.option_flags import SectionedCommand, declared_options
from kvrelay.options.declaration import Option, Section, option, options_of, values_for


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Base:
    part: float = option(0.5, "A part.", Section.MEMORY, at_least=0, at_most=1)
    colour: Colour = option(Colour.RED, "A colour.", Section.MODEL)
    wait: float = option(2.0, "A time.", Section.MEMORY, more_than=0, unit="seconds")


@dataclass(frozen=True, kw_only=True)
class Whole(Base):
    count: int | None = option(None, "A number.", Section.MODEL, at_least=1, shown_default="many")
    size: int = option(1 << 20, "A size.", Section.MEMORY, at_least=1, unit="bytes")
    plan: bool = option(True, "Whether to plan.", Section.MEMORY)
    loud: bool = option(False, "Whether to shout.", Section.MEMORY)
    name: str = option("you", "A name.", Section.MODEL)
    internal: int = 7


def one(name: str) -> Option:
    [found] = [one for one in options_of(Whole) if one.name == name]
    return found


def test_options_come_by_section_and_a_class_own_before_its_bases():
    names = [one.name for one in options_of(Whole)]
    assert names == ["count", "name", "colour", "size", "plan", "loud", "part", "wait"]


def test_a_part_of_the_options_is_handed_on_by_name():
    whole = Whole(colour=Colour.BLUE, count=3)
    assert values_for(Base, whole) == {"part": 0.5, "colour": Colour.BLUE, "wait": 2.0}
    assert Base(**values_for(Base, whole)) == Base(colour=Colour.BLUE)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("part", -0.5, "must be in [0, 1], got -0.5"),
        ("part", float("nan"), "must be in [0, 1], got nan"),
        ("wait", 0.0, "must be more than 0 seconds, got 0"),
        ("wait", float("inf"), "must be more than 0 seconds, got inf"),
        ("count", 0, "must be at least 1, got 0"),
        ("colour", "green", "must be one of red, blue, got 'green'"),
        ("name", " ", "must not be empty"),
    ],
)
def test_what_is_not_allowed_is_said(name: str, value: object, problem: str):
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        one(name).checked(value)


def test_a_word_of_an_enum_becomes_its_member():
    assert one("colour").checked("blue") is Colour.BLUE
    assert one("count").checked(None) is None


@click.command(cls=SectionedCommand, context_settings={"show_default": True})
@declared_options(Whole)
def command(**options: object) -> None:
    click.echo(sorted(options.items()))


def test_the_command_line_has_every_option_in_its_type():
    given = "--count 2 --size 2MiB --plan off --loud --colour blue --part 0.25 --wait 1"
    result = CliRunner().invoke(command, given.split())
    told = {"colour": "blue", "count": 2, "loud": True, "name": "you", "part": 0.25}
    told |= {"plan": False, "size": 2 << 20, "wait": 1.0}
    assert result.stdout == f"{sorted(told.items())}\n"


def test_the_command_line_has_the_declared_defaults():
    result = CliRunner().invoke(command)
    told = {"colour": "red", "count": None, "loud": False, "name": "you", "part": 0.5}
    told |= {"plan": True, "size": 1 << 20, "wait": 2.0}
    assert result.stdout == f"{sorted(told.items())}\n"


def test_the_help_has_headings_and_defaults():
    text = " ".join(CliRunner().invoke(command, ["--help"]).stdout.split())
    model, _, memory = text.partition("KV memory:")
    assert model.endswith(
        "Model: --count INTEGER RANGE A number. [default: (many); x>=1] "
        "--name TEXT A name. [default: you] --colour [red|blue] A colour. [default: red] "
    )
    assert "--size SIZE A size. [default: 1MiB]" in memory
    assert "--plan ON|OFF Whether to plan. [default: (on)] --loud Whether to shout. --" in memory

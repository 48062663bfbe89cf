"""The translation of a command's failure into one clear line and an exit status."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from kvrelay.deploy.errors import DeployError, OptionError
from kvrelay.deploy.logs import level_of, set_up_log
from kvrelay.model_runner.errors import ModelRunnerError
from kvrelay.options.observing import LogFormat
from kvrelay.router.errors import StartError

FAILED = 1
_CLEAR = (DeployError, ModelRunnerError, StartError, OSError)
"""Errors whose messages are written for the user."""


def with_clear_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--debug``, and print any failure as one line on standard error.

    Exit status: 0 done, 1 failed, 2 wrong usage, 128 + n ended by signal n.
    """

    @click.option("--debug", is_flag=True, help="Log more, and show the traceback of a failure.")
    @functools.wraps(command)
    def guarded(*, debug: bool, **options: Any) -> None:
        set_up_log(level_of(debug=debug), LogFormat(options.get("log_format", LogFormat.TEXT)))
        try:
            command(debug=debug, **options)
        except OptionError as error:
            _say_notes(error)
            raise click.UsageError(str(error)) from error
        except (click.ClickException, click.exceptions.Exit):
            raise
        except Exception as error:
            if debug:
                raise
            _fail(error)

    return guarded


def _fail(error: Exception) -> NoReturn:
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        text = f"the package {error.name} is missing"
    elif not isinstance(error, _CLEAR):
        text = f"{type(error).__name__}: {text} (--debug shows where)"
    click.echo(f"kvrelay: {text}", err=True)
    _say_notes(error)
    sys.exit(FAILED)


def _say_notes(error: Exception) -> None:
    """Print an error's notes, one a line: they say where to look further."""
    for note in getattr(error, "__notes__", ()):
        click.echo(f"kvrelay: {note}", err=True)

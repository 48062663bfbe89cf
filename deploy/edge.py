"""Where a command's failure becomes one clear line and an exit status."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from kvrelay.deploy.errors import DeployError, OptionError
from kvrelay.model_runner.errors import ModelRunnerError
from kvrelay.router.errors import StartError

FAILED = 1
_SAID = (DeployError, ModelRunnerError, StartError, OSError)
"""Their messages are for the user as they stand."""


def with_clear_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--debug``, and one line on stderr for any failure.

    Exit status: 0 done, 1 failed, 2 wrong usage, 128 + n ended by signal n.
    """

    @click.option("--debug", is_flag=True, help="Log more, and show the traceback of a failure.")
    @functools.wraps(command)
    def guarded(*, debug: bool, **options: Any) -> None:
        logging.basicConfig(
            level=logging.INFO if debug else logging.WARNING,
            format="%(levelname)s %(name)s: %(message)s",
        )
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
    elif not isinstance(error, _SAID):
        text = f"{type(error).__name__}: {text} (--debug shows where)"
    click.echo(f"kvrelay: {text}", err=True)
    _say_notes(error)
    sys.exit(FAILED)


def _say_notes(error: Exception) -> None:
    """Where to look further, a line each."""
    for note in getattr(error, "__notes__", ()):
        click.echo(f"kvrelay: {note}", err=True)

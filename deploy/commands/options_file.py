"""Options from a TOML file: the same names as on the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from kvrelay.deploy.options.option_types import MEMORY, SIZE, SWITCH

_TOML_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
}


def with_config_file(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--config``, a file of its other options."""
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=load_defaults,
        help="A TOML file with these options by name; an option on the command line wins.",
    )(command)


def load_defaults(ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """Read the file of an eager `--config`: its values become the command's defaults.

    An option on the command line therefore wins. Raises click.BadParameter, naming the file
    and the key, for unknown keys and for values of the wrong type.
    """
    if path is not None:
        ctx.default_map = {**(ctx.default_map or {}), **read_defaults(path, ctx.command)}
    return path


def read_defaults(path: Path, command: click.Command) -> dict[str, Any]:
    """Return the file's values by parameter name, checked against `command`'s options."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path}: not TOML: {error}") from error
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}") from error
    options = _options_of(command)
    defaults: dict[str, Any] = {}
    for key, value in table.items():
        option = options.get(key.replace("_", "-"))
        if option is None or option.name is None:
            raise click.BadParameter(f"{path}: unknown option {key!r}")
        if option.name in defaults:
            raise click.BadParameter(f"{path}: {key!r} is given twice")
        _check_type(path, key, value, option)
        defaults[option.name] = value
    return defaults


def _options_of(command: click.Command) -> Mapping[str, click.Option]:
    """Return the settable options by long name, without the dashes."""
    return {
        name.removeprefix("--"): param
        for param in command.params
        if isinstance(param, click.Option) and not param.is_eager
        for name in param.opts
        if name.startswith("--")
    }


def _check_type(path: Path, key: str, value: object, option: click.Option) -> None:
    expected = _toml_types(option)
    # A boolean is an int to Python, but not to somebody who writes TOML.
    if type(value) not in expected:
        names = " or ".join(_TOML_NAMES[kind] for kind in expected)
        raise click.BadParameter(f"{path}: {key!r} must be {names}, got {value!r}")


def _toml_types(option: click.Option) -> tuple[type, ...]:
    if option.is_flag:
        return (bool,)
    if isinstance(option.type, click.types.IntParamType):
        return (int,)
    if isinstance(option.type, click.types.FloatParamType):
        return (float, int)
    if option.type in (SIZE, MEMORY):
        return (int, str)
    if option.type is SWITCH:
        return (bool, str)
    return (str,)

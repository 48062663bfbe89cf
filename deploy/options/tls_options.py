"""The checks of options that name files for TLS, for all commands that have them."""

from __future__ import annotations

from pathlib import Path

from kvrelay.deploy.errors import OptionError
from kvrelay.net.tls import TlsFileError, TlsFiles
from kvrelay.options.declaration import flag_of


def check_together(**files: Path | None) -> None:
    """Raise OptionError, naming one that is missing, unless all files are given or none."""
    given = [name for name, path in files.items() if path is not None]
    missing = [name for name, path in files.items() if path is None]
    if given and missing:
        raise OptionError(flag_of(missing[0]), f"must be given with {flag_of(given[0])}")


def check_tls(prefix: str, files: TlsFiles | None, host: str | None = None) -> None:
    """Raise OptionError if one of the files cannot be used.

    Args:
        prefix: the beginning of the options' names: ``tls`` or ``front_tls``.
        files: the files; None: nothing is checked.
        host: the host that the certificate must name; None: any.
    """
    try:
        if files is not None:
            files.check(host)
    except TlsFileError as error:
        raise OptionError(flag_of(f"{prefix}_{error.field}"), error.problem) from error

"""The tokens of a running router, read again when their file changes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

from kvrelay.net.watched_files import WatchedFiles
from kvrelay.router.access.token_file import Tokens, read_tokens

_LOOK_SECONDS: Final = 2.0
_log = logging.getLogger(__name__)


class CurrentTokens:
    """The present tokens of a file.

    A new file that cannot be used changes nothing: the former tokens stay valid, and an error is
    logged.

    Raises:
        ValueError: the file cannot be used from the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = WatchedFiles([path])  # before the first read, so that no change is missed
        self._tokens = read_tokens(path)

    def __call__(self) -> Tokens:
        """The tokens that are valid now."""
        return self._tokens

    async def follow(self) -> None:
        """Look at the file from time to time, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Read the file again if it has changed."""
        if not self._files.changed():
            return
        try:
            self._tokens = read_tokens(self._path)
        except ValueError as error:
            _log.error("the tokens stay as they were: --auth-token-file: %s", error)
        else:
            _log.info("read the tokens again: %s", self._path)

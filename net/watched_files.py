"""Files that an operator may replace while a process runs: tokens and certificates."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path


class WatchedFiles:
    """A watch on the contents of some files.

    It compares digests of the contents. So a file may be written in place, replaced by another, or
    reached by a new link, as Kubernetes' secrets are.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._digests()

    def changed(self) -> bool:
        """Whether the contents have changed since the last call, or the start. Reads the files.

        A file that becomes unreadable is one change.
        """
        before, self._seen = self._seen, self._digests()
        return self._seen != before

    def _digests(self) -> tuple[bytes, ...]:
        return tuple(map(_digest, self._paths))


def _digest(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return b""

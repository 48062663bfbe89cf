"""Files that an operator may replace while a process runs: tokens and certificates."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path


class WatchedFiles:
    """Tells when the contents of some files have changed.

    It compares digests of what is in them, so it does not matter whether a file is written in
    place, replaced by another, or reached by a link that is set anew, as Kubernetes' secrets are.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._digests()

    def changed(self) -> bool:
        """Whether the contents are others than at the last call, or at the start. Reads the files.

        A file that cannot be read is a change, once.
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

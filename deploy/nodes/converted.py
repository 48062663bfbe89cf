"""The user's cache of converted models: ordinary checkpoints made from GGUF files.

::

    <root>/<name>-<sha256 prefix of the source>-<dtype>/    a checkpoint folder
        kvrelay-manifest.json                               sha256 of every file beside it

A folder gets its name only when it is complete. It is used only if every file
still has its digest; otherwise it is converted again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

MANIFEST: Final = "kvrelay-manifest.json"
_FORMAT: Final = 2
"""The version of the converter's output; raise it when that changes, to rebuild old folders."""

Convert = Callable[[Path, Path, str], None]
"""A function that writes a checkpoint: (source file, folder to fill, dtype)."""


class ConvertedModels:
    """Converted checkpoints by name, dtype and digest of their source."""

    def __init__(self, root: Path, convert: Convert) -> None:
        self._root = root
        self._convert = convert

    def get(
        self,
        name: str,
        source_sha256: str,
        dtype: str,
        source: Callable[[], Path],
        say: Callable[[str], None],
    ) -> Path:
        """Return the converted checkpoint's folder; convert the source first if there is none.

        `source` is called for the file only then: once a model is converted, its source may be
        gone. Two processes never convert the same model at once: the second waits.
        """
        folder = self._root / f"{name}-{source_sha256[:16]}-{dtype}"
        if _is_sound(folder, source_sha256):
            return folder
        origin = source()
        self._root.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(folder.name + ".lock"), say):
            if not _is_sound(folder, source_sha256):
                say(f"{name}: converting {origin.name}, once")
                self._build(folder, origin, source_sha256, dtype)
        return folder

    def _build(self, folder: Path, source: Path, source_sha256: str, dtype: str) -> None:
        with made_aside(folder) as made:
            self._convert(source, made, dtype)
            _write_manifest(made, source_sha256)


def sha256_of(path: Path) -> str:
    """Return the digest of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(folder: Path, source_sha256: str) -> None:
    files = {
        path.relative_to(folder).as_posix(): sha256_of(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"format": _FORMAT, "source_sha256": source_sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _is_sound(folder: Path, source_sha256: str) -> bool:
    """Return whether `folder` is complete, made from that source, and not changed since."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if (manifest["format"], manifest["source_sha256"]) != (_FORMAT, source_sha256):
            return False
        return all(sha256_of(folder / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


@contextmanager
def made_aside(folder: Path) -> Iterator[Path]:
    """Open a context to make another folder, which gets this name when all is well.

    The caller holds the folder's lock.
    """
    aside = folder.with_name(folder.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)  # a process that was killed may have left it
    aside.mkdir()
    try:
        made = aside / folder.name
        yield made
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def locked(path: Path, say: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Hold an exclusive lock, which the system drops if this process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that converts this model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

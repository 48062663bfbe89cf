"""The seeds of requests that set none: the same on all routers that share one key."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Final, Self

_LEAST_BYTES: Final = 16
_MOST_BYTES: Final = 4096
_SEED_BYTES: Final = 8


class Seeds:
    """A keyed hash from a token's name and a request's id to the request's seed.

    So a client that tries again with the same id gets the same tokens, on any router. Nobody
    without the key knows the seeds of others.

    Args:
        key: a secret of any length.
    """

    def __init__(self, key: bytes) -> None:
        self._key = hashlib.sha256(key).digest()

    @classmethod
    def of_file(cls, path: Path | None) -> Self:
        """Read the key from a file; None: draw a key for this router alone.

        Raises:
            ValueError: the file cannot be read, or its key is too short or too long.
        """
        if path is None:
            return cls(secrets.token_bytes(32))
        try:
            with path.open("rb") as file:
                key = file.read(_MOST_BYTES + 1).strip()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        if not _LEAST_BYTES <= len(key) <= _MOST_BYTES:
            raise ValueError(f"{path}: the key must have {_LEAST_BYTES} to {_MOST_BYTES} bytes")
        return cls(key)

    def draw(self, caller: str, request_id: str) -> int:
        """The seed of a request, below 2**64.

        Args:
            caller: the name of its token; empty if the router asks for none.
            request_id: the request's id.
        """
        parts = [part.encode() for part in (caller, request_id)]
        text = b"".join(len(part).to_bytes(4) + part for part in parts)
        return int.from_bytes(
            hashlib.blake2b(text, digest_size=_SEED_BYTES, key=self._key).digest()
        )

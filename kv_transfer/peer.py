"""What a worker tells its peers, and what it checks of what they tell."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.kv_transfer.errors import PeerRefusedError
from kvrelay.kv_transfer.spans import PoolLayout
from kvrelay.mem_cache.geometry import KVGeometry


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """All that a puller needs in order to read a worker's pool.

    The metadata are NIXL's opaque bytes. They are untrusted: a flipped byte in
    them can crash the process that loads them, so a digest travels with them
    and is checked first.
    """

    incarnation: str
    metadata: bytes
    metadata_sha256: bytes
    layouts: tuple[PoolLayout, ...]
    """One for each of its pools."""
    scratch: PoolLayout
    """Pages to probe the transport with."""

    def check(self, incarnation: str, own: Sequence[PoolLayout]) -> None:
        """Raise `PeerRefusedError` unless this is `incarnation` and its pages fit `own`."""
        if self.incarnation != incarnation:
            raise PeerRefusedError(f"expected worker {incarnation}, found {self.incarnation}")
        if hashlib.sha256(self.metadata).digest() != self.metadata_sha256:
            raise PeerRefusedError(f"agent metadata of {incarnation} does not match its digest")
        if not self.layouts or self.scratch.geometry != self.layouts[0].geometry:
            raise PeerRefusedError(f"scratch pages of {incarnation} are not like its pool's")
        mine, theirs = ([pool.geometry for pool in pools] for pools in (own, self.layouts))
        if len(mine) != len(theirs) or not all(map(KVGeometry.holds_same_tokens_as, mine, theirs)):
            raise PeerRefusedError(f"pages of {incarnation} ({theirs}) do not fit {mine}")

"""The hash that names a page of KV by all that its content depends on: the tokens up to its end.

A page's hash is SHA-256 over the hash of the page before it and its own tokens. Before the first
page stands the root: a hash of the model, the page size and the namespace. The namespace has tenant
and ``cache_salt``. So equal hashes mean equal prefixes of one tenant, and without the namespace a
hash reveals nothing about the tokens. Routers, workers and tiers of storage use the same hash.

::

    root = H(version, model, page size, namespace)      page k = H(page k - 1, tokens of page k)

For placement a part is enough. A *mark* is the first eight bytes of a page's hash, for each page
that ends at a multiple of `mark_tokens`. A mark stands for the whole prefix up to there.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import Final

from kvrelay.wire.model_digest import ModelDigest

HASH_BYTES: Final = 32
MARK_TOKENS: Final = 64
"""Tokens between two marks, unless a page is larger."""
_MARK_BYTES: Final = 8
_VERSION: Final = "kvrelay page 1"


class PageHashes:
    """The hashes of one model's pages. Immutable: any thread may call it.

    To hash a page takes about a microsecond.

    Args:
        model: the model that computes the pages' KV. Its tokenizer does not matter.
        page_size: tokens a page.
    """

    def __init__(self, model: ModelDigest, page_size: int) -> None:
        self.page_size = page_size
        self._page_bytes = page_size * 4
        self._pages_per_mark = max(1, MARK_TOKENS // page_size)
        self.mark_tokens = self._pages_per_mark * page_size
        """Tokens from one mark to the next."""
        parts = (_VERSION, model.config, model.weights, model.dtype, model.layout, model.draft)
        exact = (model.arithmetic,) if model.arithmetic else ()
        self._seed = "\n".join((*parts, *exact, str(page_size), "")).encode()

    def root(self, namespace: str) -> bytes:
        """The root of a namespace, which stands before its first page."""
        return hashlib.sha256(self._seed + namespace.encode()).digest()

    def extend(self, before: bytes, token_bytes: bytes) -> bytes:
        """The hashes of the whole pages of some tokens, one after the other.

        Args:
            before: the hash of the page before, or the root.
            token_bytes: four bytes a token, the lowest first; tokens behind the last whole page are
                left out.
        """
        size, sha256, hashes = self._page_bytes, hashlib.sha256, []
        for start in range(0, len(token_bytes) - size + 1, size):
            before = sha256(before + token_bytes[start : start + size]).digest()
            hashes.append(before)
        return b"".join(hashes)

    def marks(self, hashes: bytes, first_page: int = 0) -> list[int]:
        """The marks among the hashes of neighbouring pages.

        Args:
            hashes: as `extend` returns them.
            first_page: the place of the first of them in its prompt, from 0.
        """
        each = self._pages_per_mark
        first = (each - 1 - first_page) % each
        return [
            int.from_bytes(hashes[at : at + _MARK_BYTES], "little")
            for at in range(first * HASH_BYTES, len(hashes), each * HASH_BYTES)
        ]

    def marks_of(self, token_ids: Sequence[int], namespace: str) -> tuple[int, ...]:
        """The marks of a prompt, from its start."""
        hashes = self.extend(self.root(namespace), token_bytes(token_ids))
        return tuple(self.marks(hashes))


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as `PageHashes.extend` takes them."""
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()

"""The digest that names a conversation's history without its tokens.

It is the number of tokens, a hyphen, and the SHA-256 of their ids, four bytes each, little-endian,
in hexadecimal: ``12-9f86d0...``. The number lets whoever looks for a history hash only those of its
length. A digest tells nothing about the tokens to who does not know them.
"""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from typing import Final

FORM: Final = "[1-9][0-9]{0,9}-[0-9a-f]{64}"
"""Of all digests, as a regular expression."""


def history_digest(token_ids: array[int]) -> str:
    """The digest of a history, an array of type "I"; empty for an empty one."""
    if not token_ids:
        return ""
    if sys.byteorder == "big":
        token_ids = array("I", token_ids)
        token_ids.byteswap()
    return f"{len(token_ids)}-{hashlib.sha256(token_ids).hexdigest()}"


def digest_tokens(digest: str) -> int:
    """The tokens of the history that a digest names.

    Raises:
        ValueError: it is no digest.
    """
    if re.fullmatch(FORM, digest) is None:
        raise ValueError("must be a number of tokens, a hyphen and 64 hexadecimal digits")
    return int(digest.partition("-")[0])


def is_history(token_ids: array[int], digest: str) -> bool:
    """Whether this is the history that a digest names. Hashes only what has its length."""
    return digest.startswith(f"{len(token_ids)}-") and history_digest(token_ids) == digest

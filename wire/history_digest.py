"""The digest that names a conversation's history without its tokens.

It is the number of tokens, a hyphen, and the SHA-256 of their ids, four bytes each, little-endian,
in hexadecimal: ``12-9f86d0...``. Thanks to the number, a search for a history need only hash those
of its length. A digest reveals nothing about tokens that the reader does not know.
"""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from typing import Final

FORM: Final = "[1-9][0-9]{0,9}-[0-9a-f]{64}"
"""The form of all digests, as a regular expression."""


def history_digest(token_ids: array[int]) -> str:
    """The digest of a history, an array of type "I"; empty for an empty one."""
    if not token_ids:
        return ""
    if sys.byteorder == "big":
        token_ids = array("I", token_ids)
        token_ids.byteswap()
    return f"{len(token_ids)}-{hashlib.sha256(token_ids).hexdigest()}"


def digest_tokens(digest: str) -> int:
    """The number of tokens of the history that a digest names.

    Raises:
        ValueError: it is no digest.
    """
    if re.fullmatch(FORM, digest) is None:
        raise ValueError("must be a number of tokens, a hyphen and 64 hexadecimal digits")
    return int(digest.partition("-")[0])


def is_history(token_ids: array[int], digest: str) -> bool:
    """Whether `digest` names this history. Hashes only a history of the length that it names."""
    return digest.startswith(f"{len(token_ids)}-") and history_digest(token_ids) == digest

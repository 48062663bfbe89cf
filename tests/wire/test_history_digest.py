"""The digest of a history: what clients may compute themselves."""

from __future__ import annotations

import hashlib
import struct
from array import array

import pytest

from kvrelay.wire.history_digest import digest_tokens, history_digest, is_history


def test_it_is_what_the_interface_says() -> None:
    tokens = [5, 70_000, 3]
    digest = history_digest(array("I", tokens))
    assert digest == "3-" + hashlib.sha256(struct.pack("<3I", *tokens)).hexdigest()
    assert digest_tokens(digest) == 3
    assert history_digest(array("I")) == ""


def test_a_history_is_known_by_all_of_its_tokens() -> None:
    tokens = array("I", range(100))
    digest = history_digest(tokens)
    assert is_history(tokens, digest)
    assert not is_history(tokens[:99], digest)
    assert not is_history(array("I", [*range(99), 7]), digest)
    assert not is_history(tokens[:10], digest), "of a length that begins alike"


@pytest.mark.parametrize("digest", [
    "", "12", "0-" + 64 * "a", "-1-" + 64 * "a", "1-" + 63 * "a", "1-" + 64 * "A",
    "1-" + 64 * "a" + "\n", "99999999999-" + 64 * "a",
])  # fmt: skip
def test_what_is_none_is_refused(digest: str) -> None:
    with pytest.raises(ValueError, match="must be a number of tokens"):
        digest_tokens(digest)

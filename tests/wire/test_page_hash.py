"""The hash of a page depends on all that its KV depends on, and on nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import struct

import pytest

from kvrelay.wire.model_digest import ModelDigest
from kvrelay.wire.page_hash import HASH_BYTES, PageHashes, token_bytes

MODEL = ModelDigest("config", "weights", "tokenizer", "bfloat16", "layout", "")
TOKENS = list(range(1000, 1128))


def test_the_hashes_of_128_tokens_are_these():
    hashes = PageHashes(MODEL, 16)
    root = hashes.root("tenant/salt")
    assert root.hex() == "a4a8b2b9299a6cfcb7d8ff5eb3156b21ea530b49eb15b9156b00eef605cd3cb5"
    pages = hashes.extend(root, token_bytes(TOKENS))
    assert len(pages) == 8 * HASH_BYTES
    assert (
        pages[-HASH_BYTES:].hex()
        == "796d367021075310b22da8f79d92af62d412f93ef397715d66b616bef6ede632"
    )
    assert hashes.marks_of(TOKENS, "tenant/salt") == (2802671232686534315, 1176291767871761785)


def test_a_page_is_hashed_with_all_before_it():
    hashes = PageHashes(MODEL, 4)
    page = hashes.root("")
    for start in range(0, 128, 4):
        page = hashlib.sha256(page + struct.pack("<4I", *TOKENS[start : start + 4])).digest()
    assert hashes.extend(hashes.root(""), token_bytes(TOKENS))[-HASH_BYTES:] == page


def test_hashes_go_on_where_others_ended():
    hashes = PageHashes(MODEL, 4)
    whole = hashes.extend(hashes.root(""), token_bytes(TOKENS))
    first = hashes.extend(hashes.root(""), token_bytes(TOKENS[:20]))
    rest = hashes.extend(first[-HASH_BYTES:], token_bytes(TOKENS[20:]))
    assert first + rest == whole
    assert hashes.marks(first) + hashes.marks(rest, 5) == hashes.marks(whole)


@pytest.mark.parametrize(
    "change",
    ["namespace", "page_size", "config", "weights", "dtype", "layout", "draft", "token"],
)
def test_another_tenant_page_size_model_or_token_gives_other_marks(change: str):
    model, page_size, namespace, tokens = MODEL, 16, "tenant/salt", TOKENS
    if change == "namespace":
        namespace = "tenant/other"
    elif change == "page_size":
        page_size = 32
    elif change == "token":
        tokens = [0, *TOKENS[1:]]
    else:
        model = dataclasses.replace(MODEL, **{change: "other"})
    before = PageHashes(MODEL, 16).marks_of(TOKENS, "tenant/salt")
    after = PageHashes(model, page_size).marks_of(tokens, namespace)
    assert len(before) == len(after) == 2
    assert not {*before} & {*after}


def test_the_tokenizer_does_not_matter():
    other = dataclasses.replace(MODEL, tokenizer="other")
    assert PageHashes(MODEL, 16).root("") == PageHashes(other, 16).root("")


@pytest.mark.parametrize(
    ("page_size", "mark_tokens"), [(1, 64), (16, 64), (48, 48), (64, 64), (128, 128)]
)
def test_a_mark_stands_for_64_tokens_or_a_page(page_size: int, mark_tokens: int):
    hashes = PageHashes(MODEL, page_size)
    assert hashes.mark_tokens == mark_tokens
    tokens = list(range(3 * mark_tokens + page_size - 1))
    marks = hashes.marks_of(tokens, "")
    assert len(marks) == len(tokens) // mark_tokens
    assert hashes.marks_of(tokens[:mark_tokens], "") == marks[:1]
    assert hashes.marks_of(tokens[: mark_tokens - 1], "") == ()

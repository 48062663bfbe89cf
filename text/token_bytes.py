"""The most bytes of text that one token can stand for: a bound on tokens without tokenizing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

_BYTE_FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}
"""Steps that drop no text; Split and Punctuation drop none, either, unless they remove."""

Described = Mapping[str, Any]


def longest_token_bytes(tokenizer: Tokenizer) -> int | None:
    """The most bytes of UTF-8 that one token can stand for; None if there may be no such bound.

    A text of B bytes then has at least B divided by this many tokens. That holds if no step of
    the tokenizer drops or shortens text, and no unknown token stands for any length of it.
    """
    described = json.loads(tokenizer.to_str())
    added = described.get("added_tokens") or []
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None  # such a token takes in any number of spaces
    normalizers = list(_flat(described.get("normalizer"), "normalizers"))
    splitters = list(_flat(described.get("pre_tokenizer"), "pretokenizers"))
    if not all(map(_keeps, splitters)):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    has_byte_level = _has_byte_level([*normalizers, *splitters])
    if not _knows_every_byte(described["model"], vocabulary, has_byte_level):
        return None
    shrink = 1
    for normalizer in normalizers:
        factor = _shrinks_by(normalizer)
        if factor is None:
            return None
        shrink *= factor
    return shrink * max(len(token.encode()) for token in vocabulary)


def leaves_bytes_encoded(tokenizer: Tokenizer) -> bool:
    """Whether texts would show the letters that stand for bytes, such as `Ġ` for a space."""
    described = json.loads(tokenizer.to_str())
    before = [
        *_flat(described.get("normalizer"), "normalizers"),
        *_flat(described.get("pre_tokenizer"), "pretokenizers"),
    ]
    behind = _flat(described.get("decoder"), "decoders")
    return _has_byte_level(before) and not _has_byte_level(behind)


def _has_byte_level(steps: Iterable[Described]) -> bool:
    return any(step["type"] == "ByteLevel" for step in steps)


def _flat(part: Described | None, inner: str) -> Iterator[Described]:
    """The steps that a step of type Sequence lists under `inner`; else the step itself."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for one in part[inner]:
        yield from _flat(one, inner)


def _keeps(pre_tokenizer: Described) -> bool:
    if pre_tokenizer["type"] in {"Split", "Punctuation"}:
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _KEEPING_PRE_TOKENIZERS


def _knows_every_byte(
    model: Described, vocabulary: Mapping[str, int], has_byte_level: bool
) -> bool:
    """Whether every byte has a token: none is dropped or joins an unknown token."""
    if has_byte_level and model["type"] == "BPE":
        return all(mark in vocabulary for mark in pre_tokenizers.ByteLevel.alphabet())
    if model["type"] in {"BPE", "Unigram"} and model.get("byte_fallback"):
        return all(token in vocabulary for token in _BYTE_FALLBACK)
    return False


def _shrinks_by(normalizer: Described) -> int | None:
    """The factor by which a step can shorten a text; None: any factor."""
    match normalizer["type"]:
        case "ByteLevel" | "Prepend" | "NFD":
            return 1
        case "NFC":
            return 3  # three letters of Hangul, of three bytes each, become one of three bytes
        case "Replace":
            before = normalizer["pattern"].get("String")
            longer = before is not None and len(normalizer["content"].encode()) >= len(
                before.encode()
            )
            return 1 if longer else None
    return None

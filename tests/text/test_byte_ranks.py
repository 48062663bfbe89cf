"""Tokenizers that list tokens by rank, against merging by rank as plainly as can be."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvrelay.text import tokenizer
from kvrelay.text.chat_template import special_tokens_of
from kvrelay.text.tokenizer import TokenizerError, load_tokenizer, tokenizer_json

PIECES = (b"th", b"he", b"the", b" the", b"in", b"ing", b"\xe4\xb8", b"\xe4\xb8\xad", b"ab", b"xy")
RANKS = {bytes([byte]): byte for byte in range(256)} | {
    piece: 256 + rank for rank, piece in enumerate(PIECES)
}
WORDS = r"[^ ]+| ?[^ ]+"


def merged(text: str) -> list[int]:
    """The ranks of a text that is not cut before its pairs are merged."""
    parts = [bytes([byte]) for byte in text.encode()]
    while True:
        pairs = [(RANKS.get(a + b, 1 << 30), at) for at, (a, b) in enumerate(pairwise(parts))]
        rank, at = min(pairs, default=(1 << 30, 0))
        if rank == 1 << 30:
            return [RANKS[part] for part in parts]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    return made


def write_tekken(folder: Path, **content: Any) -> Path:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()}
        for token, rank in RANKS.items()
    ]
    config = {
        "pattern": WORDS,
        "default_num_special_tokens": 24,
        # The file lists more than the model has: the last piece is none of its tokens.
        "default_vocab_size": 24 + len(RANKS) - 1,
    }
    path = folder / "tekken.json"
    path.write_text(json.dumps({"config": config, "vocab": vocab, **content}))
    return path


def write_kimi(folder: Path, model_type: str, added: Mapping[int, Mapping[str, Any]]) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    described = {"added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


@pytest.mark.parametrize("word", ["there", "thing", "中国", "naïve", "😀", "ababa", "thethein"])
def test_tekken_merges_by_rank_behind_special_tokens(word: str, folder: Path) -> None:
    write_tekken(folder)
    made = load_tokenizer(folder).tokenizer
    bos, *ids = made.encode(word).ids
    assert (bos, made.token_to_id("<s>")) == (1, 1)
    assert ids == [24 + rank for rank in merged(word)]
    assert made.decode(ids) == word


def test_tekken_s_special_tokens_have_names(folder: Path) -> None:
    write_tekken(folder)
    made = load_tokenizer(folder).tokenizer
    assert made.get_vocab_size() == 24 + len(RANKS) - 1
    assert made.encode("[INST]the[/INST]", add_special_tokens=False).ids == [3, 24 + 258, 4]
    assert made.id_to_token(20) == "<SPECIAL_20>"
    assert special_tokens_of(folder) == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"
    }  # fmt: skip
    named = [{"rank": 0, "token_str": "<unk>"}, {"rank": 3, "token_str": "[THINK]"}]
    write_tekken(folder, special_tokens=named)
    again = load_tokenizer(folder).tokenizer
    assert again.id_to_token(3) == "[THINK]"
    assert again.id_to_token(4) == "<SPECIAL_4>"
    assert again.encode("the").ids == [24 + 258], "no <s> is named, so none is added"


def test_kimi_s_tokens_and_pattern(folder: Path) -> None:
    first = len(RANKS)
    added = {
        first: {"content": "[BOS]", "special": True},
        first + 2: {"content": "<think>", "special": False},
    }
    write_kimi(folder, "kimi_k2", added)
    made = load_tokenizer(folder).tokenizer
    assert made.get_vocab_size() == first + 256
    ids = made.encode("[BOS]the<think>").ids
    assert ids == [first, 258, first + 2]
    assert made.decode(ids, skip_special_tokens=True) == "the<think>"
    assert made.id_to_token(first + 1) == f"<|reserved_token_{first + 1}|>"
    pieces = [piece for piece, _ in made.pre_tokenizer.pre_tokenize_str("中文Ab it's 1234")]
    assert [made.decoder.decode([piece]) for piece in pieces] == [
        "中文", "Ab", " it's", " ", "123", "4"
    ]  # fmt: skip


def test_what_was_made_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tekken(folder)
    first = load_tokenizer(folder)
    with monkeypatch.context() as patched:
        patched.delattr(tokenizer, "read_tekken")
        again = load_tokenizer(folder)
        assert again.sha256 == first.sha256
        assert again.tokenizer.to_str() == first.tokenizer.to_str() == tokenizer_json(folder)
    write_tekken(folder, special_tokens=[])
    assert load_tokenizer(folder).sha256 != first.sha256


def test_what_is_kept_may_be_damaged(folder: Path, tmp_path: Path) -> None:
    write_tekken(folder)
    expected = load_tokenizer(folder).tokenizer.to_str()
    (kept,) = (tmp_path / "cache").rglob("*.json")
    kept.write_text(expected[:100])
    assert load_tokenizer(folder).tokenizer.to_str() == expected == kept.read_text()


def test_the_hash_is_of_what_a_tokenizer_is_made_of(folder: Path) -> None:
    """A change elsewhere in config.json must not make workers and router differ."""
    added = {len(RANKS) + at: {"content": f"<{at}>", "special": True} for at in (1, 0)}
    write_kimi(folder, "kimi_k2", added)
    first = load_tokenizer(folder).sha256
    config = {"torch_dtype": "bfloat16", "model_type": "kimi_k2"}
    (folder / "config.json").write_text(json.dumps(config))
    described = {"added_tokens_decoder": dict(reversed(added.items())), "model_max_length": 9}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    assert load_tokenizer(folder).sha256 == first
    added[len(RANKS)] = {"content": "<0>", "special": False}
    write_kimi(folder, "kimi_k2", added)
    assert load_tokenizer(folder).sha256 != first


def test_it_is_made_without_a_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    write_tekken(folder)
    assert load_tokenizer(folder).tokenizer.encode("the").ids == [1, 24 + 258]


def test_what_cannot_be_read_is_named(folder: Path) -> None:
    write_kimi(folder, "unheard_of", {})
    with pytest.raises(TokenizerError, match=r"tiktoken\.model: .*'unheard_of' is none whose patt"):
        load_tokenizer(folder)
    (folder / "tekken.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tekken\.json: cannot load the tokenizer: 'config'"):
        load_tokenizer(folder)
    (folder / "tekken.json").unlink()
    (folder / "tekken.json").mkdir()
    with pytest.raises(TokenizerError, match=r"tekken\.json: cannot load the tokenizer: Is a dir"):
        load_tokenizer(folder)
    (folder / "tekken.json").rmdir()
    for path in folder.iterdir():
        path.unlink()
    (folder / "tokenizer.model").touch()
    with pytest.raises(TokenizerError, match=r"SentencePiece alone is not read; make a tokenizer"):
        load_tokenizer(folder)

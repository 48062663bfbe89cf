from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import decoders

from kvrelay.text.token_bytes import leaves_bytes_encoded
from kvrelay.text.tokenizer import TokenizerError, load_tokenizer
from tests.checkpoints import make_tokenizer


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), ("{", "EOF while parsing"), ('{"model": {}}', "")],
)
def test_a_tokenizer_that_cannot_be_loaded_is_named(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TokenizerError, match=f"cannot load the tokenizer: {reason}") as refusal:
        load_tokenizer(tmp_path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


def test_settings_from_training_change_no_prompt(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    plain = tokenizer.encode("the quick brown fox").ids
    assert len(plain) > 2
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).tokenizer.encode("the quick brown fox").ids == plain


def test_a_tokenizer_that_shows_letters_for_bytes_is_known() -> None:
    tokenizer = make_tokenizer()
    assert not leaves_bytes_encoded(tokenizer)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    assert not leaves_bytes_encoded(tokenizer)
    tokenizer.decoder = decoders.Fuse()
    assert "Ġ" in tokenizer.decode(tokenizer.encode("the quick fox").ids)
    assert leaves_bytes_encoded(tokenizer)

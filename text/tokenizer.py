"""The loading of a checkpoint's tokenizer, for workers and the router alike.

A checkpoint without a tokenizer.json may have tekken.json or tiktoken.model. These take seconds to
read, so what was made of them is kept::

    <the user's cache>/kvrelay/tokenizers/<digest of the source>.json
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from kvrelay.options.user_cache import cache_home
from kvrelay.text.byte_ranks import (
    TEKKEN_NAME,
    describe_tiktoken,
    read_tekken,
    read_tiktoken,
    source_file,
)

TOKENIZER_NAME: Final = "tokenizer.json"
_SENTENCEPIECE_NAME: Final = "tokenizer.model"
_FORMAT: Final = b"1"
"""The version of what is made of other files; raise it when that changes, to make it again."""


class TokenizerError(Exception):
    """A checkpoint's tokenizer cannot be loaded; the message is one line and names the file."""


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer with the hash that identifies it."""

    tokenizer: Tokenizer
    sha256: str
    """The SHA-256 of tokenizer.json, or of what made it in its place, in hexadecimal."""


def load_tokenizer(model_path: Path) -> LoadedTokenizer:
    """The tokenizer in the checkpoint folder `model_path`, without truncation or padding.

    Raises:
        TokenizerError: there is none, or it is no tokenizer.
    """
    # The callers have threads of their own; the library's would not be bounded, and would have
    # it warn at each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = model_path / TOKENIZER_NAME
    try:
        tokenizer, sha256 = _read(model_path)
    except TokenizerError:
        raise
    except OSError as error:
        named = error.filename or path
        raise TokenizerError(f"{named}: cannot load the tokenizer: {error.strerror}") from error
    except Exception as error:  # the library raises nothing narrower
        raise _unusable(path, error) from error
    # A checkpoint may carry settings from its training that would change prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LoadedTokenizer(tokenizer, sha256)


def tokenizer_json(model_path: Path) -> str:
    """The checkpoint's tokenizer.json, or what is one in its place.

    Raises:
        TokenizerError: there is none, and other files are of no known form.
        OSError: it cannot be read.
    """
    source = _source(model_path)
    if source is None:
        return (model_path / TOKENIZER_NAME).read_text(encoding="utf-8")
    return _made_of(source)[1]


def _read(folder: Path) -> tuple[Tokenizer, str]:
    """The tokenizer and the hash of its source."""
    source = _source(folder)
    if source is not None:
        made, _, sha256 = _made_of(source)
        return made, sha256
    content = (folder / TOKENIZER_NAME).read_bytes()
    return Tokenizer.from_str(content.decode()), hashlib.sha256(content).hexdigest()


def _source(folder: Path) -> Path | None:
    """The file that a tokenizer is made of; None: there is a tokenizer.json, or nothing."""
    path = folder / TOKENIZER_NAME
    if path.exists():
        return None
    source = source_file(folder)
    if source is None and (folder / _SENTENCEPIECE_NAME).exists():
        raise TokenizerError(
            f"{folder / _SENTENCEPIECE_NAME}: SentencePiece alone is not read; make a {path.name}"
            " beside it, by transformers' AutoTokenizer: from_pretrained, then save_pretrained"
        )
    return source


def _made_of(path: Path) -> tuple[Tokenizer, str, str]:
    """The tokenizer that is made of a file, its text and the hash of its source.

    It is made once a machine if there is a cache.
    """
    is_tekken = path.name == TEKKEN_NAME
    digest = hashlib.sha256(_FORMAT + f" {path.name} ".encode() + path.read_bytes())
    try:
        if not is_tekken:
            digest.update(describe_tiktoken(path).encode())
        sha256 = digest.hexdigest()
        kept = _cache_file(sha256)
        if kept is not None:
            with suppress(Exception):  # it may be damaged, for which the library has no type
                content = kept.read_text(encoding="utf-8")
                return Tokenizer.from_str(content), content, sha256
        made = (read_tekken if is_tekken else read_tiktoken)(path)
    except Exception as error:  # whatever a file of another form meets
        raise _unusable(path, error) from error
    content = made.to_str()
    if kept is not None:
        with suppress(OSError):  # a cache that cannot be written is done without
            _write(kept, content)
    return made, content, sha256


def _cache_file(sha256: str) -> Path | None:
    with suppress(ValueError, RuntimeError):
        return cache_home() / "kvrelay" / "tokenizers" / f"{sha256}.json"
    return None


def _write(path: Path, content: str) -> None:
    """Write the file as a whole, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as aside:
        made = Path(aside, path.name)
        made.write_text(content, encoding="utf-8")
        made.replace(path)


def _unusable(path: Path, error: Exception) -> TokenizerError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return TokenizerError(f"{path}: cannot load the tokenizer: {reason}")

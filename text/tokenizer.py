"""The loading of a checkpoint's tokenizer, for workers and the router alike."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer


class TokenizerError(Exception):
    """A checkpoint's tokenizer cannot be loaded; the message is one line and names the file."""


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer with the hash that identifies it."""

    tokenizer: Tokenizer
    sha256: str
    """The SHA-256 of the bytes that it was made from, in hexadecimal."""


def load_tokenizer(model_path: Path) -> LoadedTokenizer:
    """The tokenizer in the checkpoint folder `model_path`, without truncation or padding.

    Raises:
        TokenizerError: tokenizer.json is missing, or is no tokenizer.
    """
    # The callers have threads of their own; the library's would not be bounded, and would have
    # it warn at each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = model_path / "tokenizer.json"
    try:
        content = path.read_bytes()
        tokenizer = Tokenizer.from_str(content.decode())
    except OSError as error:
        raise TokenizerError(f"{path}: cannot load the tokenizer: {error.strerror}") from error
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())
        raise TokenizerError(f"{path}: cannot load the tokenizer: {reason}") from error
    # A checkpoint may carry settings from its training that would change prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LoadedTokenizer(tokenizer, hashlib.sha256(content).hexdigest())

"""A vocabulary of single bytes, in the form that llguidance asks for."""

from __future__ import annotations

from llguidance import LLTokenizer

_BYTES = 256


class _Bytes:
    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = _BYTES

    def __init__(self) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(_BYTES)), b"<end>"]
        self.special_token_ids = [_BYTES]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def byte_vocabulary() -> LLTokenizer:
    """A token for each byte, and one that ends an output."""
    return LLTokenizer(_Bytes(), slices=[])  # type: ignore[arg-type]

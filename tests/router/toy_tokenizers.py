"""Small tokenizers of the two kinds that there are, with the hard characters in them."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "héllo wörld — “naïve café”, 日本語のテキスト, 中文字符, русский текст",
    "😀 😃 👩‍👩‍👧 🏳️‍🌈 emoji 🎉 and more 🎉🎉",
    "STOP stop ### User: answer\n\nUser: done END",
]


def byte_level_tokenizer() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen: any bytes, so characters split across tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_special_tokens([AddedToken("<|tool|>", special=True)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """As Llama 2: a leading space that decoding strips, bytes as a fallback."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = BpeTrainer(vocab_size=340, special_tokens=byte_tokens, show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:1], trainer)
    # The trainer makes tokens special that it is told of; byte tokens are not.
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(described))

"""Tokenizers without a tokenizer.json: tekken.json (Mistral) and tiktoken.model (Kimi).

Both list tokens by rank: pairs are merged in the order of their ranks. As a `Tokenizer` that is
byte-level BPE, with each split of a token into two tokens as a merge.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

TEKKEN_NAME: Final = "tekken.json"
TIKTOKEN_NAME: Final = "tiktoken.model"
_CONFIG_NAME: Final = "tokenizer_config.json"
_TEKKEN_NAMES: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""The first special tokens of a tekken.json that names none."""
_TEKKEN_ROLES: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_KIMI_SPECIAL: Final = 256
"""The ids behind Kimi's ranks; those without a name are reserved."""
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_PATTERN: Final = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_PATTERNS: Final = dict.fromkeys(
    ("kimi_k2", "kimi_k25", "kimi_linear", "kimi_vl", "deepseek_v3"), _KIMI_PATTERN
)
"""How texts are cut before pairs are merged, by `model_type`: tiktoken.model does not say it.

Moonlight is a ``deepseek_v3``; DeepSeek's own have a tokenizer.json.
"""


def read_tekken(path: Path) -> Tokenizer:
    """Read a tekken.json: special tokens have the lowest ids, and ranks come behind them.

    Raises whatever a file of another form meets.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    config = content["config"]
    special = config["default_num_special_tokens"]
    ranks = {
        base64.b64decode(one["token_bytes"]): one["rank"]
        for one in content["vocab"][: config["default_vocab_size"] - special]
    }
    given = content.get("special_tokens")
    named = dict(enumerate(_TEKKEN_NAMES))
    if given is not None:
        named = {one["rank"]: one["token_str"] for one in given}
    names = [named.get(index, f"<SPECIAL_{index}>") for index in range(special)]
    tokenizer = _make(ranks, config["pattern"], names)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    bos = _TEKKEN_ROLES["bos_token"]
    if bos in names:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B:1", special_tokens=[(bos, names.index(bos))]
        )
    return tokenizer


def read_tiktoken(path: Path) -> Tokenizer:
    """Read a tiktoken.model, a token and its rank a line, and its neighbours in the folder.

    Special tokens come behind the ranks. config.json's `model_type` tells the pattern. Raises
    whatever files of another form meet.
    """
    model_type = _model_type(path.parent)
    if model_type not in _PATTERNS:
        known = ", ".join(_PATTERNS)
        raise ValueError(f"model_type {model_type!r} is none whose pattern is known ({known})")
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    tokenizer = _make(ranks, _PATTERNS[model_type])
    described = _added_tokens(path.parent / _CONFIG_NAME)
    for token_id in range(len(ranks), len(ranks) + _KIMI_SPECIAL):
        one = described.get(token_id, {})
        name = one.get("content", f"<|reserved_token_{token_id}|>")
        added = AddedToken(name, normalized=False, special=one.get("special", True))
        (tokenizer.add_special_tokens if added.special else tokenizer.add_tokens)([added])
    return tokenizer


def describe_tiktoken(path: Path) -> str:
    """Describe all that `read_tiktoken` takes from the neighbours of `path`, in one text."""
    added = _added_tokens(path.parent / _CONFIG_NAME)
    tokens = [(token_id, one.get("content"), one.get("special")) for token_id, one in added.items()]
    return json.dumps([_model_type(path.parent), sorted(tokens, key=itemgetter(0))])


def tekken_roles(folder: Path) -> dict[str, str]:
    """Special tokens by their role, where tekken.json alone describes the tokenizer."""
    return dict(_TEKKEN_ROLES) if (folder / TEKKEN_NAME).exists() else {}


def source_file(folder: Path) -> Path | None:
    """The file that `read_tekken` or `read_tiktoken` reads; None: there is none."""
    return next(filter(Path.exists, (folder / TEKKEN_NAME, folder / TIKTOKEN_NAME)), None)


def _model_type(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])


def _added_tokens(path: Path) -> dict[int, Mapping[str, Any]]:
    if not path.exists():
        return {}
    described = json.loads(path.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
    return {int(token_id): one for token_id, one in described.items()}


def _make(ranks: Mapping[bytes, int], pattern: str, before: Iterable[str] = ()) -> Tokenizer:
    """Byte-level BPE of tokens with their `ranks`, which come `before` other tokens."""
    letters = _byte_letters()
    texts = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {name: index for index, name in enumerate(before)}
    first = len(vocabulary)
    vocabulary |= {texts[token]: rank + first for token, rank in ranks.items()}
    merges = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], texts[left], texts[right]))
    merges.sort()
    model = models.BPE(vocabulary, [(one[3], one[4]) for one in merges], ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte, as in GPT-2."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]

"""What a worker has loaded, in a few hashes: workers with the same ones compute the same tokens."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass, fields
from typing import Final

_SHOWN_DIGITS: Final = 12


@dataclass(frozen=True, slots=True)
class ModelDigest:
    """Describes a model as it was loaded, not as it lies on disk. All hashes are hexadecimal."""

    config: str
    """Hash of the configuration as it was understood."""
    weights: str
    """Hash over every byte of every tensor, in the type that it was cast to."""
    tokenizer: str
    """SHA-256 of tokenizer.json."""
    dtype: str
    """Of activations, e.g. ``bfloat16``; that of KV is part of `layout`."""
    layout: str
    """Hash of what a token's KV is in each pool. Page sizes and orders do not belong to it."""
    draft: str
    """Hash of the draft model's configuration and weights; empty: none drafts."""

    @property
    def name(self) -> str:
        """One hash for all of it: what operators are shown."""
        return hashlib.sha256("\n".join(astuple(self)).encode()).hexdigest()[:_SHOWN_DIGITS]

    def difference_from(self, other: ModelDigest) -> str:
        """Which parts differ from another model's, and how; empty if none does."""
        return ", ".join(
            f"{field.name} ({_short(mine)}, not {_short(theirs)})"
            for field in fields(self)
            if (mine := getattr(self, field.name)) != (theirs := getattr(other, field.name))
        )


NO_MODEL: Final = ModelDigest("", "", "", "", "", "")
"""Of pools whose KV no model computes."""


def _short(part: str) -> str:
    return part[:_SHOWN_DIGITS] or "none"

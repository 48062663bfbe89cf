"""Hashes of what a worker has loaded: workers with the same ones compute the same tokens."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass, fields
from typing import Final

_SHOWN_DIGITS: Final = 12


@dataclass(frozen=True, slots=True)
class ModelDigest:
    """A model as it was loaded, not as it lies on disk. All hashes are hexadecimal."""

    config: str
    """Hash of the configuration as it was understood."""
    weights: str
    """Hash over every byte of every tensor, in the type that it was cast to."""
    tokenizer: str
    """SHA-256 of tokenizer.json."""
    dtype: str
    """The dtype of activations, e.g. ``bfloat16``; the dtype of KV is part of `layout`."""
    layout: str
    """Hash of the form of a token's KV in each pool. Page sizes and orders are not part of it."""
    draft: str
    """Hash of the draft model's configuration and weights; empty if there is no draft model."""
    arithmetic: str = ""
    """The processor's ways to compute where equal bits are promised; empty where they are not."""

    @property
    def name(self) -> str:
        """One short hash of all parts, which operators are shown."""
        return hashlib.sha256("\n".join(astuple(self)).encode()).hexdigest()[:_SHOWN_DIGITS]

    def difference_from(self, other: ModelDigest) -> str:
        """The parts that differ from another model's, and how; empty if none differ."""
        return ", ".join(
            f"{field.name} ({_short(mine)}, not {_short(theirs)})"
            for field in fields(self)
            if (mine := getattr(self, field.name)) != (theirs := getattr(other, field.name))
        )


NO_MODEL: Final = ModelDigest("", "", "", "", "", "")
"""The digest for pools whose KV no model computes."""


def _short(part: str) -> str:
    is_hash = len(part) == hashlib.sha256().digest_size * 2
    return part[:_SHOWN_DIGITS] if is_hash else part or "none"

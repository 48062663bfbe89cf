"""How a request wants its tokens chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """A request's choice of sampling; the names and meanings of vLLM and OpenAI.

    A value out of range raises `ValueError` that starts with the field's name.
    """

    temperature: float = 1.0
    """0 picks the likeliest token."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens whose probability reaches it; in (0, 1]."""
    top_k: int = 0
    """Keep this many of the likeliest tokens (ties with the last are kept too); 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the likeliest; in [0, 1]."""
    frequency_penalty: float = 0.0
    """Taken off a logit for every time its token is in the output."""
    presence_penalty: float = 0.0
    """Taken off a logit if its token is in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    seed: int = 0
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside the sampled one; None reports nothing."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < math.inf, "temperature", "must be at least 0 and finite")
        _require(0 < self.top_p <= 1, "top_p", "must be in (0, 1]")
        _require(self.top_k >= 0, "top_k", "must be at least 0")
        _require(0 <= self.min_p <= 1, "min_p", "must be in [0, 1]")
        _require(math.isfinite(self.frequency_penalty), "frequency_penalty", "must be finite")
        _require(math.isfinite(self.presence_penalty), "presence_penalty", "must be finite")
        _require(
            0 < self.repetition_penalty < math.inf,
            "repetition_penalty",
            "must be positive and finite",
        )
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", "must be at least 0")
        _require(
            all(math.isfinite(bias) for bias in self.logit_bias.values()),
            "logit_bias",
            "must be finite",
        )

    @property
    def is_greedy(self) -> bool:
        """Whether no draw is made."""
        return self.temperature == 0

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before the temperature."""
        return bool(self.logit_bias) or (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
        )


def _require(holds: bool, field_name: str, rule: str) -> None:
    if not holds:
        raise ValueError(f"{field_name} {rule}")

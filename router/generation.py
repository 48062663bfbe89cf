"""A request after validation: every field concrete, nothing left to default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample and when to stop; ranges as in inference.proto, checked."""

    temperature: float
    top_p: float
    top_k: int
    """0: all."""
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    """Drawn if the client gave none."""
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int | None
    """None: no log-probabilities at all, not even of the chosen token."""
    logit_bias: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What the workers are asked to do."""

    request_id: str
    fingerprint: bytes
    """Digest of the body as the client sent it (a drawn seed is not in it):
    equal ones are the same request, tried again."""
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int

    @property
    def total_tokens(self) -> int:
        """Tokens that a decode worker must be able to hold for it."""
        return len(self.input_ids) + self.sampling.max_tokens

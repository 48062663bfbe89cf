"""What tests do with the samples of rows that are expected to have tokens."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.model_runner.sampling.sampler import Sampled
from kvrelay.wire.output import SampledToken


def as_tokens(samples: Iterable[Sampled]) -> list[SampledToken]:
    """`samples`, every one of which must be a token."""
    tokens = []
    for sample in samples:
        assert isinstance(sample, SampledToken), sample
        tokens.append(sample)
    return tokens

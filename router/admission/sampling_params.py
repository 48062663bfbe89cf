"""Sampling parameters of a client's message: checked, and every default filled in.

To add one, add a field in the proto and, with its default, in `wire.submit`. If not every value is
allowed, add a row in `_RANGES` or a check in `check_sampling_params`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.router.errors import InvalidField
from kvrelay.text.grammar import MAX_GRAMMAR_BYTES
from kvrelay.v1 import inference_pb2
from kvrelay.wire.messages import GENERATION_PARAMS
from kvrelay.wire.submit import FORMS, MAX_CHOICES, GenerationParams

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
"""The most characters of one stop string."""
MAX_TOKEN_RULES = 1024
"""The most entries of `stop_token_ids`, and of `logit_bias`."""
MAX_LOGPROBS = 20
MAX_ALTERNATIVES = 1024
"""The most texts of a structured output's `choice`."""
MAX_LOGIT_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class _Range:
    """The range of finite numbers that a field may have: from `low` to `high`."""

    low: float
    high: float
    above_low: bool = False
    """Whether `low` itself is excluded."""

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.above_low else value >= self.low
        return above and value <= self.high and math.isfinite(value)

    def __str__(self) -> str:
        left, right = "(" if self.above_low else "[", ")" if math.isinf(self.high) else "]"
        return f"{left}{self.low:g}, {self.high:g}{right}"


_RANGES = {
    "temperature": _Range(0.0, math.inf),
    "top_p": _Range(0.0, 1.0, above_low=True),
    "min_p": _Range(0.0, 1.0),
    "frequency_penalty": _Range(-2.0, 2.0),
    "presence_penalty": _Range(-2.0, 2.0),
    # Divided by a smaller number, a logit soon becomes infinite.
    "repetition_penalty": _Range(0.01, 2.0),
}


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise `InvalidField` for `field` unless every id is below `vocab_size`."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidField(
            field, f"token id {largest} is not in the vocabulary, whose ids are below {vocab_size}"
        )


def check_sampling_params(params: inference_pb2.SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidField` for the first field that is out of its range.

    `max_tokens` and `min_tokens` depend on the prompt: `Validator` checks them.
    """
    for field, allowed in _RANGES.items():
        value = getattr(params, field)
        if params.HasField(field) and value not in allowed:
            raise InvalidField(field, f"must be in {allowed}, got {value:g}")
    if params.top_k < -1:
        raise InvalidField(
            "top_k", f"must be at least 1, or 0 or -1 for all tokens, got {params.top_k}"
        )
    _check_logprobs(params)
    # There is no bound on n times max_tokens: each choice must fit alone, and where
    # they do not fit together the workers retract some for a while.
    if params.HasField("n") and not 1 <= params.n <= MAX_CHOICES:
        raise InvalidField("n", f"must be in [1, {MAX_CHOICES}], got {params.n}")
    _check_stop_strings(params)
    _check_token_rules(params, vocab_size)
    if params.HasField("structured_output"):
        _check_structured_output(params)


def _check_structured_output(params: inference_pb2.SamplingParams) -> None:
    """Check all but whether its grammar can be compiled, which `StructuredOutputs` checks."""
    field, wanted = "structured_output", params.structured_output
    given = [descriptor.name for descriptor, _ in wanted.ListFields()]
    if len(given) != 1:
        raise InvalidField(field, f"must have one of {', '.join(FORMS)}, got {len(given)}")
    num_bytes = wanted.ByteSize()
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidField(field, f"must have at most {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}")
    if len(wanted.choice) > MAX_ALTERNATIVES:
        raise InvalidField(
            f"{field}.choice",
            f"must have at most {MAX_ALTERNATIVES} texts, got {len(wanted.choice)}",
        )
    # The output would have to go on where the grammar lets it end.
    if params.ignore_eos:
        raise InvalidField("ignore_eos", f"is not allowed with {field}, which ends by itself")
    if params.min_tokens:
        raise InvalidField("min_tokens", f"is not allowed with {field}, which ends by itself")


def _check_logprobs(params: inference_pb2.SamplingParams) -> None:
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        if value > MAX_LOGPROBS:
            raise InvalidField(field, f"must be at most {MAX_LOGPROBS}, got {value}")


def _check_stop_strings(params: inference_pb2.SamplingParams) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidField(
            "stop", f"must have at most {MAX_STOP_STRINGS} strings, got {len(params.stop)}"
        )
    for stop in params.stop:
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise InvalidField(
                "stop",
                f"each string must have 1 to {MAX_STOP_LENGTH} characters, got one of {len(stop)}",
            )


def _check_token_rules(params: inference_pb2.SamplingParams, vocab_size: int) -> None:
    for field in ("stop_token_ids", "logit_bias"):
        entries = getattr(params, field)
        if len(entries) > MAX_TOKEN_RULES:
            raise InvalidField(
                field, f"must have at most {MAX_TOKEN_RULES} entries, got {len(entries)}"
            )
        check_token_ids(field, entries, vocab_size)
    for token_id, bias in params.logit_bias.items():
        if not abs(bias) <= MAX_LOGIT_BIAS:  # so that NaN is refused, too
            raise InvalidField(
                "logit_bias",
                f"must be in [{-MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], "
                f"got {bias:g} for token id {token_id}",
            )


def read_sampling_params(
    params: inference_pb2.SamplingParams, max_tokens: int, seed: int
) -> GenerationParams:
    """The checked parameters, each with the client's value or its default.

    `max_tokens` is already the client's value or the default; `seed` is the default seed.
    """
    given = inference_pb2.SamplingParams()
    given.CopyFrom(params)
    given.max_tokens = max_tokens
    given.top_k = max(params.top_k, 0)
    if not params.HasField("seed"):
        given.seed = seed
    return GENERATION_PARAMS.from_message(given)

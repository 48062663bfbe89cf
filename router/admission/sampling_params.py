"""Sampling parameters of a client's message: checked, and every default filled in.

The legal values of those that are one number or flag are in `wire.sampling_limits`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvrelay.router.admission.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from kvrelay.router.errors import InvalidField
from kvrelay.text.grammar import MAX_GRAMMAR_BYTES
from kvrelay.v1 import inference_pb2
from kvrelay.wire.messages import GENERATION_PARAMS
from kvrelay.wire.sampling_limits import (
    LIMITS,
    LOGIT_BIAS,
    MAX_ALTERNATIVES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TOKEN_RULES,
)
from kvrelay.wire.submit import FORMS, GenerationParams

_ALL_TOKENS: Final = -1
"""A `top_k` that clients may send for 0, as to vLLM."""


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise `InvalidField` for `field` unless every id is below `vocab_size`."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidField(
            field, f"token id {largest} is not in the vocabulary, whose ids are below {vocab_size}"
        )


def check_sampling_params(params: inference_pb2.SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidField` for the first field that is out of its range.

    `Validator` checks whether `max_tokens` and `min_tokens` go with the prompt and each other.
    """
    for field, limits in LIMITS.items():
        value = getattr(params, field)
        if not params.HasField(field) or value in limits:
            continue
        if field != "top_k":
            raise InvalidField(field, f"{limits.rule}, got {value:{limits.form}}")
        if value != _ALL_TOKENS:
            raise InvalidField(field, f"must be at least 1, or 0 or -1 for all tokens, got {value}")
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
        if bias not in LOGIT_BIAS:
            raise InvalidField(
                "logit_bias", f"{LOGIT_BIAS.rule}, got {bias:g} for token id {token_id}"
            )


def read_sampling_params(
    params: inference_pb2.SamplingParams,
    max_tokens: int,
    seed: int,
    defaults: SamplingDefaults = NO_DEFAULTS,
) -> GenerationParams:
    """The checked parameters, each with the client's value or its default.

    `max_tokens` is already the client's value or the default; `seed` is the default seed, and
    `defaults` are the model's own.
    """
    given = inference_pb2.SamplingParams()
    given.CopyFrom(params)
    given.max_tokens = max_tokens
    if params.top_k == _ALL_TOKENS:
        given.top_k = 0
    if not params.HasField("seed"):
        given.seed = seed
    defaults.fill(given)
    return GENERATION_PARAMS.from_message(given)

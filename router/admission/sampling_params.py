"""Sampling parameters of a client's message: checked, and every default filled in.

The legal values of those that are one number or flag are in `wire.sampling_limits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvrelay.router.admission.prompt_input import BegunReasoning, Encode
from kvrelay.router.admission.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from kvrelay.router.errors import InvalidField
from kvrelay.text.encoding import TooManyTokens
from kvrelay.text.grammar import MAX_GRAMMAR_BYTES
from kvrelay.v1 import inference_pb2
from kvrelay.wire.messages import GENERATION_PARAMS
from kvrelay.wire.sampling_limits import (
    LIMITS,
    LOGIT_BIAS,
    MAX_ALLOWED_TOKENS,
    MAX_ALTERNATIVES,
    MAX_BANNED_TOKENS,
    MAX_REASONING_TEXTS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TOKEN_RULES,
)
from kvrelay.wire.submit import FORMS, GenerationParams

_TOKEN_RULES: Final = {
    "stop_token_ids": MAX_TOKEN_RULES,
    "logit_bias": MAX_TOKEN_RULES,
    "allowed_token_ids": MAX_ALLOWED_TOKENS,
    "banned_sequences": MAX_TOKEN_RULES,
}
"""The fields with token ids, and the most entries of each."""
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
    _check_strings("stop", params.stop, MAX_STOP_STRINGS)
    _check_strings("bad_words", params.bad_words, MAX_TOKEN_RULES)
    _check_token_rules(params, vocab_size)
    if params.HasField("structured_output"):
        _check_structured_output(params)
    _check_reasoning(params)


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


def _check_reasoning(params: inference_pb2.SamplingParams) -> None:
    field, reasoning = "reasoning", params.reasoning
    if not params.HasField(field):
        if params.HasField("thinking_token_budget"):
            raise InvalidField("thinking_token_budget", f"is allowed with {field} alone")
        return
    for kind in ("begins", "ends", "ends_before"):
        texts = getattr(reasoning, kind)
        if len(texts) > MAX_REASONING_TEXTS:
            problem = f"must have at most {MAX_REASONING_TEXTS} texts, got {len(texts)}"
            raise InvalidField(f"{field}.{kind}", problem)
        if not all(0 < len(text) <= MAX_STOP_LENGTH for text in texts):
            problem = f"each text must have 1 to {MAX_STOP_LENGTH} characters"
            raise InvalidField(f"{field}.{kind}", problem)
    if not reasoning.ends:
        raise InvalidField(f"{field}.ends", "is missing")
    forced = reasoning.forced_end
    if forced and not any(end in forced for end in reasoning.ends):
        raise InvalidField(f"{field}.forced_end", "must have one of ends")
    if len(forced) > MAX_STOP_LENGTH:
        raise InvalidField(f"{field}.forced_end", f"must have at most {MAX_STOP_LENGTH} characters")


def _check_strings(field: str, strings: Sequence[str], most: int) -> None:
    if len(strings) > most:
        raise InvalidField(field, f"must have at most {most} strings, got {len(strings)}")
    for one in strings:
        if not 0 < len(one) <= MAX_STOP_LENGTH:
            raise InvalidField(
                field,
                f"each string must have 1 to {MAX_STOP_LENGTH} characters, got one of {len(one)}",
            )


def _check_token_rules(params: inference_pb2.SamplingParams, vocab_size: int) -> None:
    for field, most in _TOKEN_RULES.items():
        entries = getattr(params, field)
        if len(entries) > most:
            raise InvalidField(field, f"must have at most {most} entries, got {len(entries)}")
        if field != "banned_sequences":
            check_token_ids(field, entries, vocab_size)
    for banned in params.banned_sequences:
        if not banned.ids:
            raise InvalidField("banned_sequences", "has an empty one")
        check_token_ids("banned_sequences", banned.ids, vocab_size)
    _check_banned("banned_sequences", params)
    for token_id, bias in params.logit_bias.items():
        if bias not in LOGIT_BIAS:
            raise InvalidField(
                "logit_bias", f"{LOGIT_BIAS.rule}, got {bias:g} for token id {token_id}"
            )


def _check_banned(field: str, params: inference_pb2.SamplingParams) -> None:
    """Raise `InvalidField` for the field if all banned sequences together are too long."""
    tokens = sum([len(banned.ids) for banned in params.banned_sequences])
    if tokens > MAX_BANNED_TOKENS:
        raise InvalidField(field, f"must have at most {MAX_BANNED_TOKENS} tokens, got {tokens}")


def read_sampling_params(
    params: inference_pb2.SamplingParams,
    max_tokens: int,
    seed: int,
    defaults: SamplingDefaults = NO_DEFAULTS,
    encode: Encode | None = None,
    reasoning: BegunReasoning = BegunReasoning.AS_ASKED,
) -> GenerationParams:
    """The checked parameters, each with the client's value or its default.

    Args:
        params: the client's.
        max_tokens: the client's value or the default.
        seed: the default seed.
        defaults: the model's own.
        encode: tokenizes `bad_words`, without special tokens; None: there are none.
        reasoning: where the prompt ends.

    Raises:
        InvalidField: the bad words have too many tokens.
    """
    given = inference_pb2.SamplingParams()
    given.CopyFrom(params)
    given.max_tokens = max_tokens
    if params.top_k == _ALL_TOKENS:
        given.top_k = 0
    if not params.HasField("seed"):
        given.seed = seed
    defaults.fill(given)
    if given.bad_words and encode is not None:
        banned = [ids for word in given.bad_words for ids in _ways_to_write(word, encode)]
        given.banned_sequences.extend([inference_pb2.TokenIds(ids=ids) for ids in banned])
        _check_banned("bad_words", given)
    if params.HasField("reasoning") and reasoning is BegunReasoning.BEGUN:
        given.reasoning.begun = True
    elif reasoning is BegunReasoning.OVER:
        given.ClearField("reasoning")
        given.ClearField("thinking_token_budget")
    return GENERATION_PARAMS.from_message(given)


def _ways_to_write(word: str, encode: Encode) -> Sequence[Sequence[int]]:
    """Tokenize a word with a space before it and without, where these differ."""
    bare = word.lstrip() or word
    try:
        ways = {tuple(encode(text, MAX_BANNED_TOKENS)) for text in (bare, f" {bare}")}
    except TooManyTokens as error:
        raise InvalidField("bad_words", f"one has {error}, of {MAX_BANNED_TOKENS}") from error
    return sorted(filter(None, ways))

"""From a client's message to a request that a worker can run, or a named refusal.

Nothing is allocated for a request before it has passed here.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvrelay.router.errors import InvalidField
from kvrelay.router.generation import GenerationRequest, SamplingParams
from kvrelay.router.limits import Limits
from kvrelay.v1 import inference_pb2

Encode = Callable[[str], Sequence[int]]

MAX_REQUEST_ID_BYTES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_TOKEN_RULES = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_CHOICES = 16


@dataclass(frozen=True, slots=True)
class _Range:
    """The finite numbers from `low` to `high`."""

    default: float
    low: float
    high: float
    above_low: bool = False
    """`low` itself is out."""

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.above_low else value >= self.low
        return above and value <= self.high and math.isfinite(value)

    def __str__(self) -> str:
        left, right = "(" if self.above_low else "[", ")" if math.isinf(self.high) else "]"
        return f"{left}{self.low:g}, {self.high:g}{right}"


_RANGES = {
    "temperature": _Range(1.0, 0.0, math.inf),
    "top_p": _Range(1.0, 0.0, 1.0, above_low=True),
    "min_p": _Range(0.0, 0.0, 1.0),
    "frequency_penalty": _Range(0.0, -2.0, 2.0),
    "presence_penalty": _Range(0.0, -2.0, 2.0),
    # Below, a logit that is divided by it is soon infinite.
    "repetition_penalty": _Range(1.0, 0.01, 2.0),
}


@dataclass(frozen=True, slots=True)
class Validator:
    """Checks requests for one model.

    Args:
        encode: the tokenizer, special tokens added.
        max_message_bytes: of a request's message.
    """

    model_name: str
    encode: Encode
    default_max_tokens: int
    max_message_bytes: int

    def validate(self, message: inference_pb2.GenerateRequest, limits: Limits) -> GenerationRequest:
        """The request with every field concrete; safe to call from any thread.

        Raises:
            InvalidField: what cannot be served, by the field's name.
        """
        prompt_field = _prompt_field(message)
        self._check_envelope(message, prompt_field)
        params = message.sampling_params
        _check_sampling(params, limits.vocab_size)
        input_ids = self._input_ids(message, prompt_field, limits)
        max_tokens = self._max_tokens(params, prompt_field, len(input_ids), limits)
        return GenerationRequest(
            request_id=message.request_id or uuid.uuid4().hex,
            fingerprint=_fingerprint(message),
            input_ids=input_ids,
            sampling=_concrete(params, max_tokens),
            priority=message.priority,
        )

    def _check_envelope(self, message: inference_pb2.GenerateRequest, prompt_field: str) -> None:
        size = message.ByteSize()
        if size > self.max_message_bytes:
            raise InvalidField(
                prompt_field, f"message of {size} bytes, at most {self.max_message_bytes} are taken"
            )
        if len(message.request_id.encode()) > MAX_REQUEST_ID_BYTES:
            raise InvalidField("request_id", f"longer than {MAX_REQUEST_ID_BYTES} bytes")
        if message.model not in ("", self.model_name):
            raise InvalidField("model", f"{message.model!r} is not {self.model_name!r}")

    def _input_ids(
        self, message: inference_pb2.GenerateRequest, prompt_field: str, limits: Limits
    ) -> tuple[int, ...]:
        if prompt_field == "input_ids":
            input_ids = tuple(message.input_ids.ids)
        else:  # an empty text is no prompt, even where the tokenizer would add a token
            input_ids = tuple(self.encode(message.text)) if message.text else ()
        if not input_ids:
            raise InvalidField(prompt_field, "the prompt is empty")
        check_token_ids(prompt_field, input_ids, limits.vocab_size)
        return input_ids

    def _max_tokens(
        self,
        params: inference_pb2.SamplingParams,
        prompt_field: str,
        prompt_tokens: int,
        limits: Limits,
    ) -> int:
        """The output's limit: the client's, or the default cut to what fits."""
        room = _room(prompt_field, prompt_tokens, limits)
        if not params.HasField("max_tokens"):
            max_tokens = min(self.default_max_tokens, room)
        elif params.max_tokens < 1:
            raise InvalidField("max_tokens", "must be at least 1, got 0")
        else:
            max_tokens = params.max_tokens
            _check_total(prompt_tokens, max_tokens, limits)
        if params.min_tokens > max_tokens:
            raise InvalidField(
                "min_tokens", f"{params.min_tokens} is more than max_tokens, {max_tokens}"
            )
        return max_tokens


def _prompt_field(message: inference_pb2.GenerateRequest) -> str:
    field: str | None = message.WhichOneof("prompt")
    if field is None:
        raise InvalidField("text", "there is no prompt: neither text nor input_ids is set")
    return field


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises `InvalidField` naming `field` for an id that the vocabulary has not."""
    worst = max(token_ids, default=0)
    if worst >= vocab_size:
        raise InvalidField(field, f"token id {worst} is not below the vocabulary of {vocab_size}")


def _check_sampling(params: inference_pb2.SamplingParams, vocab_size: int) -> None:
    for field, allowed in _RANGES.items():
        value = getattr(params, field)
        if params.HasField(field) and value not in allowed:
            raise InvalidField(field, f"must be in {allowed}, got {value:g}")
    if params.top_k < -1:
        raise InvalidField("top_k", f"must be at least 1, or 0 or -1 for all, got {params.top_k}")
    _check_counts(params)
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidField("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(params.stop)}")
    if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in params.stop):
        raise InvalidField("stop", f"each string must have 1 to {MAX_STOP_LENGTH} characters")
    for field in ("stop_token_ids", "logit_bias"):
        if len(getattr(params, field)) > MAX_TOKEN_RULES:
            raise InvalidField(field, f"must have at most {MAX_TOKEN_RULES} entries")
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    check_token_ids("logit_bias", params.logit_bias, vocab_size)
    for token_id, bias in params.logit_bias.items():
        if not abs(bias) <= MAX_LOGIT_BIAS:  # so that NaN fails, too
            raise InvalidField(
                "logit_bias",
                f"must be in [{-MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], "
                f"got {bias:g} for token id {token_id}",
            )


def _check_counts(params: inference_pb2.SamplingParams) -> None:
    """How many outputs, and how many log-probabilities at each place.

    There is no bound on n times max_tokens: each choice must fit alone, and
    where they do not fit together the workers retract some for a while.
    """
    for field in ("logprobs", "prompt_logprobs"):
        if getattr(params, field) > MAX_LOGPROBS:
            raise InvalidField(
                field, f"must be at most {MAX_LOGPROBS}, got {getattr(params, field)}"
            )
    if params.HasField("n") and not 1 <= params.n <= MAX_CHOICES:
        raise InvalidField("n", f"must be in [1, {MAX_CHOICES}], got {params.n}")


def _room(prompt_field: str, prompt_tokens: int, limits: Limits) -> int:
    """Output tokens that fit after the prompt, at least one."""
    if prompt_tokens > limits.prefill_pool_tokens:
        raise InvalidField(
            prompt_field,
            f"a prompt of {prompt_tokens} tokens does not fit the largest pool "
            f"for prompts, which holds {limits.prefill_pool_tokens}",
        )
    total, holder = _tightest(limits)
    if prompt_tokens >= total:
        raise InvalidField(
            prompt_field,
            f"a prompt of {prompt_tokens} tokens leaves no room for output in {holder} of {total}",
        )
    return total - prompt_tokens


def _check_total(prompt_tokens: int, max_tokens: int, limits: Limits) -> None:
    total, holder = _tightest(limits)
    if prompt_tokens + max_tokens > total:
        raise InvalidField(
            "max_tokens",
            f"a prompt of {prompt_tokens} tokens plus max_tokens {max_tokens} "
            f"is {prompt_tokens + max_tokens}, more than {holder} of {total}",
        )


def _tightest(limits: Limits) -> tuple[int, str]:
    """What bounds prompt and output together, and its name."""
    return min(
        (limits.max_model_len, "the model's max_model_len"),
        (limits.decode_pool_tokens, "the largest pool for outputs"),
        # Prompt and output, too, if the request is resumed: its output is computed again there.
        (limits.prefill_pool_tokens, "the largest pool for prompts"),
    )


def _concrete(params: inference_pb2.SamplingParams, max_tokens: int) -> SamplingParams:
    def number(field: str) -> float:
        value: float = getattr(params, field)
        return value if params.HasField(field) else _RANGES[field].default

    return SamplingParams(
        temperature=number("temperature"),
        top_p=number("top_p"),
        top_k=max(params.top_k, 0),
        min_p=number("min_p"),
        frequency_penalty=number("frequency_penalty"),
        presence_penalty=number("presence_penalty"),
        repetition_penalty=number("repetition_penalty"),
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        skip_special_tokens=(
            params.skip_special_tokens if params.HasField("skip_special_tokens") else True
        ),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        logit_bias=tuple(params.logit_bias.items()),
        n=params.n if params.HasField("n") else 1,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        speculate=params.speculate if params.HasField("speculate") else True,
    )


def _fingerprint(message: inference_pb2.GenerateRequest) -> bytes:
    body = message.SerializeToString(deterministic=True)
    return hashlib.blake2b(body, digest_size=16).digest()

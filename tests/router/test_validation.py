"""Every bad field is named; a good request comes out with nothing left to default."""

from __future__ import annotations

import gc
import math
import sys
from typing import Any

import pytest

from kvrelay.router.admission.max_tokens import OutputLimit, max_tokens_of
from kvrelay.router.admission.sampling_params import check_sampling_params
from kvrelay.router.admission.seeds import Seeds
from kvrelay.router.admission.validation import Validator
from kvrelay.router.errors import InvalidField
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire import sampling_limits
from kvrelay.wire.submit import Reasoning

LIMITS = RequestLimits(
    vocab_size=100, max_model_len=64, prefill_pool_tokens=80, decode_pool_tokens=80
)
VALIDATOR = Validator(
    model_names=("toy",),
    encode=lambda text, most_tokens: [ord(character) % 128 for character in text],
    default_max_tokens=16,
    seeds=Seeds(b"key"),
)


def message(prompt: Any = (1, 2, 3), *, envelope: Any = None, **params: Any) -> pb.GenerateRequest:
    made = pb.GenerateRequest(
        sampling_params=pb.SamplingParams(**params), **(envelope or {"request_id": "r"})
    )
    if isinstance(prompt, str):
        made.text = prompt
    elif prompt is not None:
        made.input_ids.CopyFrom(pb.TokenIds(ids=prompt))
    return made


def validate(made: pb.GenerateRequest, limits: RequestLimits = LIMITS) -> GenerationRequest:
    return VALIDATOR.validate(made, limits)


BAD_SAMPLING: list[tuple[str, Any]] = [
    *[("temperature", bad) for bad in (math.nan, math.inf, -math.inf, -0.1)],
    *[("top_p", bad) for bad in (math.nan, 0.0, -0.5, 1.01)],
    *[("min_p", bad) for bad in (math.nan, -0.1, 1.1, math.inf)],
    *[("frequency_penalty", bad) for bad in (math.nan, -2.1, 2.1)],
    *[("presence_penalty", bad) for bad in (math.nan, -2.1, 2.1)],
    *[("repetition_penalty", bad) for bad in (math.nan, 0.0, 0.009, -1.0, 2.1, math.inf)],
    ("top_k", -2),
    ("max_tokens", 0),
    ("min_tokens", 17),  # more than the default max_tokens
    ("stop", ["x"] * 17),
    ("stop", ["ok", ""]),
    ("stop_token_ids", [100]),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
    ("n", 0),
    ("n", 17),
    *[("logit_bias", {5: bad}) for bad in (math.nan, 100.5, -101.0, math.inf)],
    ("logit_bias", {100: 1.0}),
]


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
def test_a_bad_sampling_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidField, match=f"^{field}: ") as caught:
        validate(message(**{field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "members"),
    [
        ("ends", {"begun": True}),
        ("ends", {"ends": [""]}),
        ("begins", {"ends": ["x"], "begins": ["y"] * 17}),
        ("ends_before", {"ends": ["x"], "ends_before": ["y" * 1025]}),
        ("forced_end", {"ends": ["x"], "forced_end": "y"}),
        ("forced_end", {"ends": ["x"], "forced_end": "x" * 1025}),
    ],
)
def test_reasoning_that_cannot_end_is_named(field: str, members: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as caught:
        validate(message(reasoning=pb.Reasoning(**members)))
    assert caught.value.field == f"reasoning.{field}"


def test_a_budget_is_for_reasoning_alone() -> None:
    with pytest.raises(InvalidField, match=r"^thinking_token_budget: .* reasoning"):
        validate(message(thinking_token_budget=1))
    params = validate(message(thinking_token_budget=1, reasoning=pb.Reasoning(ends=["x"]))).params
    assert (params.sampling.thinking_token_budget, params.stops.reasoning) == (
        1,
        Reasoning(ends=("x",)),
    )


@pytest.mark.parametrize(
    "field", [name for name, row in sampling_limits.LIMITS.items() if row.kind is not bool]
)
def test_the_bounds_that_a_message_names_are_legal(field: str) -> None:
    """As a client sends them, in 32 bits."""
    limits = sampling_limits.LIMITS[field]
    ends = [limits.least] * (not limits.above_least) + [limits.most] * math.isfinite(limits.most)
    for end in ends:
        params = pb.SamplingParams(reasoning=pb.Reasoning(ends=["x"]))
        setattr(params, field, limits.kind(end))
        check_sampling_params(params, 100)


BAD_ENVELOPES: list[tuple[str, pb.GenerateRequest]] = [
    ("text", message(None)),
    ("text", message("")),
    ("input_ids", message(())),
    ("input_ids", message((1, 100))),
    ("text", message("~")),  # encodes to an id that the model has not
    ("request_id", message(envelope={"request_id": "é" * 65})),
    ("model", message(envelope={"model": "other"})),
    ("text", message("x" * 1001)),
]


@pytest.mark.parametrize(("field", "bad"), BAD_ENVELOPES)
def test_a_bad_envelope_is_named(field: str, bad: pb.GenerateRequest) -> None:
    with pytest.raises(InvalidField, match=f"^{field}: "):
        validate(bad)


@pytest.mark.parametrize(
    ("field", "numbers", "prompt_tokens", "max_tokens", "limits"),
    [
        ("max_tokens", ("40", "25", "65", "64"), 40, 25, LIMITS),
        ("input_ids", ("49", "48"), 49, 1, RequestLimits(100, 64, 48, 99)),
        # Resumed, its output is computed again where prompts are.
        ("max_tokens", ("30", "20", "50", "48"), 30, 20, RequestLimits(100, 64, 48, 99)),
        ("input_ids", ("64",), 64, None, RequestLimits(100, 64, 99, 99)),
        ("max_tokens", ("30", "11", "41", "40"), 30, 11, RequestLimits(100, 64, 99, 40)),
        ("input_ids", ("41", "40"), 41, None, RequestLimits(100, 64, 99, 40)),
    ],
)
def test_what_does_not_fit_is_named_with_both_numbers(
    field: str,
    numbers: tuple[str, ...],
    prompt_tokens: int,
    max_tokens: int | None,
    limits: RequestLimits,
) -> None:
    with pytest.raises(InvalidField, match=f"^{field}: ") as caught:
        validate(message([1] * prompt_tokens, max_tokens=max_tokens), limits)
    assert all(number in str(caught.value) for number in numbers)


def test_what_just_fits_is_taken() -> None:
    assert validate(message([1] * 40, max_tokens=24)).total_tokens == 63
    assert validate(message([1] * 48, max_tokens=16)).total_tokens == 63


@pytest.mark.parametrize("prompt", [list(range(1, 99)), "".join(map(chr, range(1, 99)))])
def test_a_prompt_that_waits_takes_four_bytes_a_token(prompt: Any) -> None:
    ids = validate(message(prompt * 100), RequestLimits(100, 10_000, 10_000, 10_000)).input_ids
    assert list(ids) == list(range(1, 99)) * 100
    assert sys.getsizeof(ids) < 4 * len(ids) * 1.2
    assert gc.get_referents(ids) in ([], [type(ids)]), "no object for a token"


def test_unset_max_tokens_is_the_default_or_what_fits() -> None:
    assert validate(message([1] * 10)).params.stops.max_tokens == 16
    assert validate(message([1] * 46), RequestLimits(100, 64, 99, 50)).params.stops.max_tokens == 4


@pytest.mark.parametrize(
    ("limit", "asked", "default", "most"),
    [
        (OutputLimit.CUT, 99, None, (24, False)),
        (OutputLimit.CUT, None, None, (24, False)),
        (OutputLimit.CUT, None, 5, (5, False)),
        (OutputLimit.OPEN, 99, None, (24, False)),
        (OutputLimit.OPEN, 7, None, (7, False)),
        (OutputLimit.OPEN, None, None, (24, True)),
        (OutputLimit.OPEN, None, 5, (5, False)),
        (OutputLimit.NOTHING, None, None, (1, False)),
    ],
)
def test_the_most_tokens_by_endpoint(
    limit: OutputLimit, asked: int | None, default: int | None, most: tuple[int, bool]
) -> None:
    params = pb.SamplingParams(max_tokens=asked)
    assert max_tokens_of(params, 40, LIMITS, limit, default) == most


def test_every_default_is_concrete() -> None:
    request = validate(message())
    params = request.params
    sampling = params.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0, 0)
    assert sampling.repetition_penalty == 1
    assert params.stops.skip_special_tokens
    assert sampling.logprobs is None
    assert (params.n, params.prompt_logprobs, params.speculate) == (1, None, True)
    assert request.priority == 0


def test_zero_is_not_unset() -> None:
    params = validate(
        message(
            temperature=0.0,
            seed=0,
            logprobs=0,
            prompt_logprobs=0,
            skip_special_tokens=False,
            speculate=False,
        )
    ).params
    assert (params.sampling.temperature, params.sampling.seed) == (0, 0)
    assert (params.sampling.logprobs, params.prompt_logprobs) == (0, 0)
    assert not params.stops.skip_special_tokens
    assert not params.speculate


@pytest.mark.parametrize(("field", "most"), [("n", 16), ("prompt_logprobs", 20)])
def test_the_most_that_is_allowed_is_taken(field: str, most: int) -> None:
    assert getattr(validate(message(**{field: most})).params, field) == most


@pytest.mark.parametrize("top_k", [0, -1])
def test_both_spellings_of_all_tokens_are_one(top_k: int) -> None:
    assert validate(message(top_k=top_k)).params.sampling.top_k == 0


def test_a_seed_that_is_not_given_follows_from_the_id_and_is_not_in_the_fingerprint() -> None:
    first, again = validate(message()), validate(message())
    other = validate(message(envelope={"request_id": "other"}))
    unnamed = [validate(message(envelope={"model": "toy"})) for _ in range(2)]
    seeds = [one.params.sampling.seed for one in (first, again, other, *unnamed)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 4
    assert first.fingerprint == again.fingerprint
    assert validate(message(seed=1)).fingerprint != first.fingerprint


def test_the_order_of_a_map_is_not_in_the_fingerprint() -> None:
    biases = dict.fromkeys(range(20), 1.0)
    backwards = dict(reversed(biases.items()))
    assert (
        validate(message(logit_bias=biases)).fingerprint
        == validate(message(logit_bias=backwards)).fingerprint
    )


def test_a_missing_id_is_made() -> None:
    made = {validate(message(envelope={"model": "toy"})).request_id for _ in range(3)}
    assert len(made) == 3
    assert "" not in made

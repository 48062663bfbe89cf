"""Sampling parameters as OpenAI's and vLLM's clients call them, in the router's own message.

The legal values are checked for every door in `router.admission.sampling_params`. Here only values
are refused that JSON allows and the message cannot hold.
"""

from __future__ import annotations

from typing import Final

from kvrelay.router.doors.http.fields import INT32, UINT32, Fields, Schema
from kvrelay.router.errors import InvalidField
from kvrelay.v1 import inference_pb2
from kvrelay.wire.sampling_limits import LIMITS

_READ_APART: Final = ("max_tokens", "logprobs", "prompt_logprobs", "top_k")
"""The parameters that have other names here, or other values."""
_SIMPLE: Final = {name: row.kind for name, row in LIMITS.items() if name not in _READ_APART}
"""The other parameters that are one number or one flag, by name."""
_LARGEST_FLOAT32: Final = 3.4028234e38
_BIASES: Final[Schema] = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": ["number", "null"]},
}
"""The schema of biases by token id."""


def read_sampling(fields: Fields, *max_tokens_names: str) -> inference_pb2.SamplingParams:
    """Read all sampling parameters except those of log-probabilities.

    Args:
        fields: the request's fields.
        max_tokens_names: the names of `max_tokens`; the first one present counts.
    """
    params = inference_pb2.SamplingParams()
    for name, kind in _SIMPLE.items():
        value = _read_simple(fields, name, kind)
        if value is not None:
            setattr(params, name, value)
    for name in max_tokens_names:
        count = fields.integer(name, 0, UINT32)
        if count is not None and not params.HasField("max_tokens"):
            params.max_tokens = count
    _read_others(fields, params)
    return params


def _read_simple(fields: Fields, name: str, kind: type) -> float | None:
    if kind is bool:
        return fields.optional_flag(name)
    if kind is int:
        return fields.integer(name, 0, UINT32)
    number = fields.number(name)
    if number is not None and abs(number) > _LARGEST_FLOAT32:
        raise fields.error(name, "is too large")
    return number


def _read_others(fields: Fields, params: inference_pb2.SamplingParams) -> None:
    top_k = fields.integer("top_k", -INT32, INT32)
    if top_k is not None:
        params.top_k = top_k
    seed = fields.integer("seed", -(1 << 63), (1 << 64) - 1)
    if seed is not None:
        params.seed = seed & ((1 << 64) - 1)  # a negative one is as good as any other
    params.stop.extend(fields.strings("stop"))
    params.stop_token_ids.extend(fields.token_ids("stop_token_ids"))
    for token_id, bias in _logit_bias(fields).items():
        params.logit_bias[token_id] = bias


def _logit_bias(fields: Fields) -> dict[int, float]:
    members = fields.members("logit_bias", _BIASES) or {}
    biases = Fields(members, "logit_bias")
    read = {}
    for name in members:
        if not (name.isascii() and name.isdecimal()) or int(name[:11]) > UINT32:
            raise InvalidField("logit_bias", "must have token ids as its names")
        read[int(name)] = min(max(biases.number(name) or 0.0, -1e30), 1e30)
    return read

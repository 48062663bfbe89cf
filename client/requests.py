"""Requests made from a caller's prompt and fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from kvrelay.v1 import inference_pb2 as pb

Prompt: TypeAlias = str | Iterable[int]
"""A text, or token ids."""

_OWN_FIELDS: Final = frozenset(
    {"request_id", "priority", "model", "cache_salt", "session_id", "rewind_to", "queue_turn"}
)


def make_request(prompt: Prompt | pb.GenerateRequest, **fields: Any) -> pb.GenerateRequest:
    """Make a request from a prompt and fields; return a whole message as it is.

    Args:
        prompt: text, token ids, or a whole request.
        fields: fields of `GenerateRequest` and of its `SamplingParams`, as ``max_tokens=32``; a
            field that is None is not set.

    Raises:
        ValueError: there is no such field, a field cannot hold its value, or a whole message and
            fields were given.
        TypeError: a field cannot hold its value.
    """
    if isinstance(prompt, pb.GenerateRequest):
        if fields:
            raise ValueError(f"{', '.join(fields)}: the request is given as a whole")
        return prompt
    given = {name: value for name, value in fields.items() if value is not None}
    own = {name: given.pop(name) for name in _OWN_FIELDS & given.keys()}
    request = pb.GenerateRequest(sampling_params=pb.SamplingParams(**given), **own)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.input_ids.ids.extend(prompt)
    return request

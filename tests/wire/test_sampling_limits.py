"""The table of legal values speaks of what the messages have."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import pytest

from kvrelay.v1 import inference_pb2
from kvrelay.wire.sampling_limits import LIMITS
from kvrelay.wire.submit import GenerationParams, SamplingParams, StopConditions

HINTS = {
    name: hint
    for kind in (GenerationParams, SamplingParams, StopConditions)
    for name, hint in typing.get_type_hints(kind).items()
}
"""The types of all fields, by name."""


def test_every_number_and_flag_has_its_row() -> None:
    """But for the seed, every value of which is legal."""
    scalars = {
        field.name
        for field in inference_pb2.SamplingParams.DESCRIPTOR.fields
        if not field.is_repeated and field.message_type is None
    }
    assert LIMITS.keys() == scalars - {"seed"}
    for name, limits in LIMITS.items():
        assert HINTS[name] in (limits.kind, limits.kind | None), name


@pytest.mark.parametrize("name", [name for name, row in LIMITS.items() if row.kind is not bool])
def test_a_dataclass_refuses_what_the_table_refuses(name: str) -> None:
    limits = LIMITS[name]
    of: type[GenerationParams | SamplingParams | StopConditions] = next(
        kind
        for kind in (SamplingParams, StopConditions, GenerationParams)
        if name in {field.name for field in dataclasses.fields(kind)}
    )
    whole: dict[str, Any] = {}
    if of is StopConditions:
        whole = {"max_tokens": 1}
    elif of is GenerationParams:
        whole = {"sampling": SamplingParams(), "stops": StopConditions(max_tokens=1)}
    too_much = [limits.most + 1] * math.isfinite(limits.most)
    for value in (limits.least - 1, *too_much):
        with pytest.raises(ValueError, match=f"^{name}: must be "):
            of(**(whole | {name: limits.kind(value)}))

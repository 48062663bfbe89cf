"""The events that a client is sent, as bytes."""

from __future__ import annotations

import pytest

from kvrelay.router.doors.grpc_service import _DELTA, EventBytes
from kvrelay.router.requests.events import Delta
from kvrelay.v1 import inference_pb2
from kvrelay.wire.output import SampledToken, TokenLogprob

PLAIN, SCORED = SampledToken(7), SampledToken(7, -0.5, (TokenLogprob(7, -0.5),))


@pytest.mark.parametrize(
    "delta",
    [
        Delta(0, (PLAIN,), ""),
        Delta(0, (), "x"),
        Delta(5, (PLAIN, SampledToken(8)), " two", 3),
        Delta(5, (SCORED,), "y", 1),
        Delta(0, (), "", prompt_logprobs=(SCORED,)),
    ],
    ids=["first", "text alone", "two tokens", "log-probabilities", "of the prompt"],
)
def test_a_delta_is_written_as_its_fields_say(delta: Delta) -> None:
    write = EventBytes("a")
    write(Delta(9, (PLAIN, PLAIN, PLAIN), "before", 2))  # of which nothing may be left
    said = inference_pb2.GenerateResponse.FromString(write(delta))
    assert said == inference_pb2.GenerateResponse(request_id="a", delta=_DELTA.to_message(delta))
    assert said.HasField("delta")
    assert _DELTA.from_message(said.delta) == delta

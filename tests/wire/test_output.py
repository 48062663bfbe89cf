from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.wire.load import WorkerLoad
from kvrelay.wire.output import (
    EndReason,
    EngineOutputs,
    NextTokens,
    PhaseTimings,
    RequestEnd,
    RequestOutput,
    SampledToken,
)
from kvrelay.wire.submit import RequestKey

PLAIN = RequestOutput(RequestKey("router", "a", 7, choice=2), 5, (SampledToken(40),))


def test_outputs_of_one_token_are_packed_and_the_others_stay_as_they_are():
    ended = RequestOutput(PLAIN.key, 6, (SampledToken(41),), RequestEnd(EndReason.LENGTH))
    step = EngineOutputs((PLAIN, ended, PLAIN), WorkerLoad(waiting_requests=1))
    packed = step.packed()
    assert packed.outputs == (ended,)
    assert packed.load == step.load
    assert packed.next_tokens == NextTokens((7, 7), (2, 2), (5, 5), (40, 40))
    assert list(packed.next_tokens) == [(7, 2, 5, 40)] * 2


@pytest.mark.parametrize(
    "more",
    [
        {"tokens": ()},
        {"tokens": (SampledToken(40), SampledToken(41))},
        {"tokens": (SampledToken(40, -1.5),)},
        {"end": RequestEnd(EndReason.STOP)},
        {"timings": PhaseTimings(decode_seconds=1.0)},
        {"cached_tokens": 3},
        {"prompt_logprobs": (SampledToken(40, -1.5),)},
    ],
)
def test_nothing_that_the_lists_cannot_say_is_packed(more):
    step = EngineOutputs((replace(PLAIN, **more),))
    assert step.packed() is step

"""A field that is forgotten in a dataclass, in its proto or between them fails here."""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import pytest

from kvrelay.router.requests.events import ChoiceEnd, Delta
from kvrelay.v1 import hand_over_pb2, inference_pb2, worker_pb2
from kvrelay.wire import hand_over, messages
from kvrelay.wire.codec import Codec
from kvrelay.wire.hand_over import FromDecode, FromPrefill, HandOverEnd, Sequenced
from kvrelay.wire.load import WorkerLoad
from kvrelay.wire.output import (
    EngineOutputs,
    FailureReason,
    RequestOutput,
    SampledToken,
    TokenLogprob,
)
from kvrelay.wire.sampling_limits import LIMITS
from kvrelay.wire.submit import (
    AttachRequest,
    CancelRequest,
    GenerationParams,
    RequestKey,
    RouterCommand,
    SamplingParams,
    StopConditions,
    SubmitRequest,
)

LOAD = Codec(WorkerLoad, inference_pb2.WorkerLoad)
CASES: list[tuple[Codec[Any, Any], str, Any]] = [
    (messages.AGENT, "agent", None),
    (messages.HAND_OVER_OPEN, "open", None),
    *(
        (messages.FROM_DECODE, f"from_decode_{kind.__name__}", kind)
        for kind in typing.get_args(FromDecode)
    ),
    *(
        (messages.FROM_PREFILL, f"from_prefill_{kind.__name__}", kind)
        for kind in typing.get_args(FromPrefill)
    ),
    *(
        (messages.ATTACH_REQUEST, f"router_command_{kind.__name__}", kind)
        for kind in typing.get_args(RouterCommand)
    ),
    (messages.GENERATION_PARAMS, "generation_params", None),
    (LOAD, "load", None),
    (messages.ENGINE_OUTPUTS, "engine_outputs", None),
    (messages.WORKER_STATUS, "worker_status", None),
    (messages.PAGE_OWNERS, "page_owners", None),
    (messages.TIMINGS, "timings", None),
    (Codec(Delta, inference_pb2.GenerateDelta), "delta", None),
    (Codec(ChoiceEnd, inference_pb2.ChoiceEnd), "choice_end", None),
]
CODECS = {name: (codec, {"message": union, "command": union}) for codec, name, union in CASES}


def filled(hint: Any, numbers: Iterator[int], hints: Mapping[str, Any]) -> Any:
    """A value of a type in which every field differs from its default, and from every other."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        rest = [case for case in arguments if case is not type(None)]
        return filled(rest[-1], numbers, hints)
    if origin in (tuple, frozenset):
        return origin(filled(arguments[0], numbers, hints) for _ in range(2))
    if origin is not None and issubclass(origin, Mapping):
        key, value = (filled(one, numbers, hints) for one in arguments)
        return {key: value}
    if hint is bool:
        return True
    if hint in (int, float, str, bytes):
        number = next(numbers)
        return {int: number, float: number / 64, str: f"s{number}", bytes: b"%d" % number}[hint]
    if issubclass(hint, Enum):
        return list(hint)[-1]
    of = typing.get_type_hints(hint) | {k: v for k, v in hints.items() if v is not None}
    names = (
        hint._fields
        if issubclass(hint, tuple)
        else [field.name for field in dataclasses.fields(hint)]
    )
    return hint(**{name: legal(name, filled(of[name], numbers, {})) for name in names})


def legal(name: str, value: Any) -> Any:
    """The value, or a legal one where the field of this name has limits."""
    limits = LIMITS.get(name)
    if limits is None or not isinstance(value, limits.kind) or value in limits:
        return value
    return limits.kind(limits.most - value % 7)


OF_CLIENTS = {"bad_words"}
"""The fields that a router reads, and sends on in others."""


def unset(message: Any, where: str) -> Iterator[str]:
    """Fields that are not set, in the message and those in it."""
    for field in message.DESCRIPTOR.fields:
        if field.name in OF_CLIENTS:
            continue
        path = f"{where}.{field.name}"
        values = getattr(message, field.name)
        values = list(values) if field.is_repeated else [values]
        oneof = field.containing_oneof
        if oneof is not None and message.WhichOneof(oneof.name) != field.name:
            continue
        if not values or (field.message_type is None and not any(values)):
            yield path
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        for value in values:
            if field.message_type is not None and not is_map:
                yield from unset(value, path)


def without_router(value: Any) -> Any:
    """As a router receives it: outputs come on its own stream."""
    if not isinstance(value, EngineOutputs):
        return value
    outputs = (dataclasses.replace(one, key=one.key._replace(router="")) for one in value.outputs)
    return dataclasses.replace(value, outputs=tuple(outputs))


def first_choice(value: Any) -> Any:
    """As it is opened: a stream is for all choices."""
    if not isinstance(value, hand_over.Open):
        return value
    return dataclasses.replace(value, key=value.key._replace(choice=0))


def of_the_stream(value: Any) -> Any:
    """As a worker receives it: a router's stream names the router, a command all choices."""
    if not isinstance(value, AttachRequest) or not isinstance(
        value.command, SubmitRequest | CancelRequest
    ):
        return value
    key = value.command.key._replace(router="", choice=0)
    return AttachRequest(dataclasses.replace(value.command, key=key))


@pytest.mark.parametrize("name", CODECS)
def test_every_field_of_a_dataclass_comes_back_and_every_field_of_its_message_is_set(name: str):
    codec, hints = CODECS[name]
    value = filled(codec.kind, itertools.count(1), hints)
    message = codec.to_message(value)
    received = type(message).FromString(message.SerializeToString())
    assert codec.from_message(received) == of_the_stream(first_choice(without_router(value)))
    assert not list(unset(received, type(message).__name__))


def test_what_is_not_set_is_read_as_the_default():
    assert LOAD.from_message(inference_pb2.WorkerLoad()) == WorkerLoad()
    assert messages.ENGINE_OUTPUTS.from_message(worker_pb2.AttachResponse()) == EngineOutputs(())
    message = worker_pb2.AttachResponse(outputs=[worker_pb2.RequestOutput(request_id="r")])
    (output,) = messages.ENGINE_OUTPUTS.from_message(message).outputs
    assert output == RequestOutput(RequestKey("", "r", 0), 0)


def test_a_parameter_that_is_not_set_is_read_as_the_default_and_zero_is_set():
    message = inference_pb2.SamplingParams(max_tokens=5)
    read = messages.GENERATION_PARAMS.from_message(message)
    assert read == GenerationParams(SamplingParams(), StopConditions(5))
    zeros = GenerationParams(SamplingParams(temperature=0, logprobs=0), StopConditions(5))
    sent = messages.GENERATION_PARAMS.to_message(zeros)
    assert sent.HasField("temperature")
    assert messages.GENERATION_PARAMS.from_message(sent) == zeros


def test_a_command_that_breaks_a_rule_of_its_dataclass_is_refused():
    message = worker_pb2.AttachRequest()
    message.submit.sampling_params.top_p = 2
    with pytest.raises(ValueError, match=r"^top_p: must be in \(0, 1\]"):
        messages.ATTACH_REQUEST.from_message(message)


def test_a_token_without_log_probabilities_is_its_id_alone():
    outputs = EngineOutputs((RequestOutput(RequestKey("", "r", 1), 5, (SampledToken(7),)),))
    message = messages.ENGINE_OUTPUTS.to_message(outputs)
    assert (list(message.outputs[0].token_ids), len(message.outputs[0].logprobs)) == ([7], 0)
    assert messages.ENGINE_OUTPUTS.from_message(message) == outputs


def test_a_reason_that_is_not_known_yet_is_a_failure():
    ended = hand_over_pb2.HandOverEnded(reason=99)  # type: ignore[arg-type]
    message = hand_over_pb2.HandOverResponse(ended=ended)
    assert messages.FROM_PREFILL.from_message(message).message == hand_over.Ended(
        HandOverEnd.FAILED
    )


def test_every_failure_reason_can_be_sent():
    causes = worker_pb2.RequestEnd.DESCRIPTOR.enum_types_by_name["Cause"].values_by_name
    names = {cause.removeprefix("CAUSE_").lower() for cause in causes}
    assert names == {*FailureReason, "unspecified"}


def test_a_message_that_is_not_known_yet_is_refused():
    with pytest.raises(ValueError, match="unknown message of HandOverRequest: None"):
        messages.FROM_DECODE.from_message(hand_over_pb2.HandOverRequest(number=1))


def test_a_field_that_its_message_lacks_is_refused_at_once():
    @dataclasses.dataclass
    class Unfit:
        waiting_requests: int
        no_such_field: int

    with pytest.raises(TypeError, match=r"Unfit\.no_such_field is no field of WorkerLoad"):
        Codec(Unfit, inference_pb2.WorkerLoad)


def test_a_sequenced_message_is_read_as_it_was_sent():
    heartbeat = Sequenced(3, hand_over.Heartbeat())
    assert (
        messages.FROM_DECODE.from_message(messages.FROM_DECODE.to_message(heartbeat)) == heartbeat
    )


CERTAIN = SampledToken(5, 0.0, (TokenLogprob(5, 0.0),))
LIKELY = SampledToken(6, -0.5, (TokenLogprob(6, -0.5),))


@pytest.mark.parametrize("tokens", [(CERTAIN, LIKELY), (LIKELY, CERTAIN), (CERTAIN,)])
def test_a_log_probability_of_zero_is_one(tokens: tuple[SampledToken, ...]) -> None:
    """A model can be so sure of a token that its log-probability is 0."""
    output = RequestOutput(RequestKey("r", "1", 1), 0, tokens, prompt_logprobs=tokens)
    codec = messages.ENGINE_OUTPUTS
    [there] = codec.from_message(codec.to_message(EngineOutputs((output,)))).outputs
    assert there.tokens == there.prompt_logprobs == tokens
    deltas = Codec(Delta, inference_pb2.GenerateDelta)
    delta = deltas.from_message(deltas.to_message(Delta(0, tokens, "", prompt_logprobs=tokens)))
    assert delta.tokens == delta.prompt_logprobs == tokens

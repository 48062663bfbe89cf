"""The messages that a client is sent, from the events of its request."""

from __future__ import annotations

from kvrelay.router.events import ChoiceEnd, Completion, Delta, Event
from kvrelay.v1 import inference_pb2
from kvrelay.wire.codec import Codec
from kvrelay.wire.messages import TIMINGS

_DELTA = Codec(Delta, inference_pb2.GenerateDelta)
_CHOICE_END = Codec(ChoiceEnd, inference_pb2.ChoiceEnd)


def event_bytes(request_id: str, event: Event) -> bytes:
    """One event of a request's stream: a GenerateResponse, serialized."""
    if isinstance(event, Delta):
        if event.prompt_logprobs or (event.tokens and event.tokens[0].logprob is not None):
            delta = _DELTA.to_message(event)
            response = inference_pb2.GenerateResponse(request_id=request_id, delta=delta)
        else:
            response = _plain_delta(request_id, event)
    else:
        complete = _completion_message(event)
        response = inference_pb2.GenerateResponse(request_id=request_id, complete=complete)
    return bytes(response.SerializeToString())


def _plain_delta(request_id: str, event: Delta) -> inference_pb2.GenerateResponse:
    """By hand, in half the time: nearly all events are a delta of one token."""
    response = inference_pb2.GenerateResponse(request_id=request_id)
    delta = response.delta
    delta.index, delta.text, delta.choice = event.index, event.text, event.choice
    delta.token_ids.extend([token.token_id for token in event.tokens])
    return response


def _completion_message(completion: Completion) -> inference_pb2.GenerateComplete:
    choices = list(map(_CHOICE_END.to_message, completion.choices))
    first = choices[0]
    matched = first.WhichOneof("matched_stop")
    return inference_pb2.GenerateComplete(
        finish_reason=first.finish_reason,
        **({matched: getattr(first, matched)} if matched else {}),
        choices=choices,
        usage=inference_pb2.Usage(
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            cached_tokens=completion.cached_tokens,
        ),
        timings=TIMINGS.to_message(completion.timings),
        seed=completion.seed,
        history_digest=completion.history_digest,
    )

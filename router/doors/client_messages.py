"""The messages that a client receives, made from the events of its request."""

from __future__ import annotations

from typing import Any

from kvrelay.router.requests.events import ChoiceEnd, Completion, Delta, Event
from kvrelay.v1 import inference_pb2
from kvrelay.wire.codec import Codec
from kvrelay.wire.messages import TIMINGS

_DELTA = Codec(Delta, inference_pb2.GenerateDelta)
_CHOICE_END = Codec(ChoiceEnd, inference_pb2.ChoiceEnd)


class EventBytes:
    """The `Form` of a gRPC stream: each event is a GenerateResponse, serialized.

    Args:
        request_id: the id of the request whose events they are.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._plain = inference_pb2.GenerateResponse(request_id=request_id)
        """The message that is refilled for each delta without logprobs: nearly all events."""

    def __call__(self, event: Event) -> bytes:
        """Serialize an event."""
        if isinstance(event, Delta):
            if event.prompt_logprobs or (event.tokens and event.tokens[0].logprob is not None):
                response = self._response(delta=_DELTA.to_message(event))
            else:
                response = self._fill_in(event)
        else:
            response = self._response(complete=_completion_message(event))
        return bytes(response.SerializeToString())

    def _fill_in(self, event: Delta) -> inference_pb2.GenerateResponse:
        delta = self._plain.delta
        delta.index, delta.text, delta.choice = event.index, event.text, event.choice
        delta.token_ids[:] = [token.token_id for token in event.tokens]
        return self._plain

    def _response(self, **event: Any) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(request_id=self._request_id, **event)


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

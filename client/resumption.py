"""The continuation of a stream that begins again, without what was delivered before."""

from __future__ import annotations

from array import array
from collections import defaultdict

from kvrelay.client.errors import Diverged
from kvrelay.v1 import inference_pb2 as pb


class _Output:
    """The delivered part of one output, and how far the present stream has come in it."""

    __slots__ = ("text_seen", "text_told", "tokens")

    def __init__(self) -> None:
        self.tokens = array("I")
        self.text_told = 0
        """Characters that were delivered."""
        self.text_seen = 0
        """Characters that the present stream has had."""


class Resumption:
    """A filter over a request's streams, one after the other: each token passes once.

    Every stream has all of the request's tokens, from the first on. Streams may cut them into
    different deltas, and may hold back different parts of the text for a while.
    """

    def __init__(self) -> None:
        self._outputs: defaultdict[int, _Output] = defaultdict(_Output)
        self._scores_told = 0
        self._scores_seen = 0

    def begin(self) -> None:
        """Note that a stream begins, with the request's first event."""
        self._scores_seen = 0
        for output in self._outputs.values():
            output.text_seen = 0

    def take(self, response: pb.GenerateResponse) -> pb.GenerateResponse | None:
        """Return the event without the part that was delivered before; None: nothing is left of it.

        Raises:
            Diverged: a token differs from the one delivered before, or is not the next one.
        """
        if not response.HasField("delta"):
            return response
        delta = response.delta
        output = self._outputs[delta.choice]
        tokens = self._known_tokens(output, delta)
        output.tokens.extend(delta.token_ids[tokens:])
        text = max(output.text_told - output.text_seen, 0)
        output.text_seen += len(delta.text)
        output.text_told = max(output.text_told, output.text_seen)
        scores = max(self._scores_told - self._scores_seen, 0)
        self._scores_seen += len(delta.prompt_logprobs)
        self._scores_told = max(self._scores_told, self._scores_seen)
        return response if not (tokens or text or scores) else _cut(response, tokens, text, scores)

    @staticmethod
    def _known_tokens(output: _Output, delta: pb.GenerateDelta) -> int:
        """Count the tokens of a delta that were delivered before."""
        known = len(output.tokens) - delta.index
        if known < 0 and delta.token_ids:
            raise Diverged(f"token {delta.index} came after {len(output.tokens)} tokens")
        same = list(output.tokens[delta.index : delta.index + len(delta.token_ids)])
        if list(delta.token_ids[: len(same)]) != same:
            raise Diverged(
                f"a retry gives other tokens from {delta.index} on than those that were delivered: "
                "set a seed, or let the routers have one --seed-key-file; and below float32 serve "
                "with --batch-invariant"
            )
        return len(same)


def _cut(
    response: pb.GenerateResponse, tokens: int, text: int, scores: int
) -> pb.GenerateResponse | None:
    """Cut the given numbers of tokens, characters and prompt's scores from an event's start."""
    delta = response.delta
    rest = pb.GenerateDelta(
        index=delta.index + tokens,
        token_ids=delta.token_ids[tokens:],
        text=delta.text[text:],
        logprobs=delta.logprobs[tokens:],
        choice=delta.choice,
        prompt_logprobs=delta.prompt_logprobs[scores:],
    )
    if not (rest.token_ids or rest.text or rest.prompt_logprobs):
        return None
    return pb.GenerateResponse(request_id=response.request_id, delta=rest)

"""Limits on live requests: those of a token, and the room for grammars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvrelay.router.callers import Caller
from kvrelay.router.errors import GrammarsFull, InvalidField, OverLimit
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.metrics import TOKEN_REFUSALS, RouterMetrics
from kvrelay.router.requests.live_request import LiveRequest

FIELD: Final = "structured_output"
"""The field of a request that has its grammar."""


class TokenLimits:
    """A refusal of requests of callers that have reached their tokens' limits.

    No counter is kept that could drift: a caller's use is taken from its live requests.

    Args:
        metrics: counts the refusals, by token.
        retry_after_ms: the time after which a refused caller should try again.
    """

    def __init__(self, metrics: RouterMetrics, retry_after_ms: int) -> None:
        self._metrics = metrics
        self._retry_after_ms = retry_after_ms

    def check_live(self, caller: Caller, live: Iterable[LiveRequest], validating: int) -> None:
        """Raise `OverLimit` unless one more request may be validated, whatever its prompt.

        Args:
            caller: the caller that asks.
            live: all requests.
            validating: the number of the caller's requests in validation.
        """
        most = caller.max_live_requests
        if most is not None:
            taken = len(_of(caller, live)) + validating
            if taken >= most:
                have = f"{taken} requests are live, of {most}"
                self._refuse(caller, "max_live_requests", have)
        self.check_queued(caller, live, 1)

    def check_queued(self, caller: Caller, live: Iterable[LiveRequest], more_tokens: int) -> None:
        """Raise `OverLimit` unless a prompt of `more_tokens` may wait for its first token."""
        most = caller.max_queued_prompt_tokens
        if most is None:
            return
        waiting = [one for one in _of(caller, live) if not one.streaming]
        queued = sum(len(one.request.input_ids) for one in waiting)
        if queued + more_tokens > most:
            have = f"prompts of {queued} tokens wait, of {most}, and {more_tokens} would come"
            self._refuse(caller, "max_queued_prompt_tokens", have)

    def check_grammars(self, caller: Caller, taken_bytes: int, more_bytes: int) -> None:
        """Raise `OverLimit` unless a grammar of `more_bytes` has room beside the caller's."""
        most = caller.max_grammar_bytes
        if most is not None and taken_bytes + more_bytes > most:
            have = f"grammars have {taken_bytes} bytes, of {most}, and {more_bytes} would come"
            self._refuse(caller, "max_grammar_bytes", have)

    def _refuse(self, caller: Caller, limit: str, have: str) -> None:
        self._metrics.count(TOKEN_REFUSALS, token=caller.name, limit=limit)
        raise OverLimit(caller, limit, have, self._retry_after_ms)


class GrammarRoom:
    """A bound on the grammars of live requests, of one caller and of all.

    Workers hold them as long as the requests live. Equal grammars are compiled once, and count
    once. As in `TokenLimits`, no counter is kept that could drift: the sum is taken over the live
    requests.

    Args:
        most_bytes: the most bytes of all grammars together.
        token_limits: refuses requests over the limit of a token.
        retry_after_ms: the time after which a refused client should try again.
    """

    def __init__(self, most_bytes: int, token_limits: TokenLimits, retry_after_ms: int) -> None:
        self._most_bytes = most_bytes
        self._token_limits = token_limits
        self._retry_after_ms = retry_after_ms

    def check(self, request: GenerationRequest, live: Iterable[GenerationRequest]) -> None:
        """Check that the request's grammar has room beside those of all live requests.

        Raises:
            InvalidField: it alone takes more than is allowed.
            OverLimit: the caller's would take more than its token allows.
            GrammarsFull: all would take more than the router allows.
        """
        grammar, caller = request.grammar, request.caller
        if grammar is None:
            return
        own_most = caller.max_grammar_bytes
        self._check_alone(grammar.num_bytes, own_most)
        others = [one for one in live if one.grammar is not None]
        if own_most is not None:
            own = _bytes_of([one for one in others if one.caller.name == caller.name], request)
            self._token_limits.check_grammars(caller, own, grammar.num_bytes)
        taken = _bytes_of(others, request)
        if taken + grammar.num_bytes > self._most_bytes:
            have = f"grammars of {taken} bytes are live, and one of {grammar.num_bytes} would come"
            raise GrammarsFull(have, self._retry_after_ms)

    def _check_alone(self, num_bytes: int, own_most: int | None) -> None:
        for most, limit in (
            (own_most, "max_grammar_bytes in --auth-token-file"),
            (self._most_bytes, "--max-grammar-bytes"),
        ):
            if most is not None and num_bytes > most:
                problem = f"its grammar takes {num_bytes} bytes, of {most} ({limit})"
                raise InvalidField(FIELD, problem)


def _of(caller: Caller, live: Iterable[LiveRequest]) -> list[LiveRequest]:
    """The live requests of the caller."""
    return [one for one in live if one.request.caller.name == caller.name]


def _bytes_of(requests: Iterable[GenerationRequest], beside: GenerationRequest) -> int:
    """The bytes of the requests' grammars, each counted once, without the one of `beside`."""
    sizes = {one.grammar.key: one.grammar.num_bytes for one in requests if one.grammar is not None}
    if beside.grammar is not None:
        sizes.pop(beside.grammar.key, None)
    return sum(sizes.values())

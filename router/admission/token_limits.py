"""The limits of a token, beside the router's own."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.router.callers import Caller
from kvrelay.router.errors import OverLimit
from kvrelay.router.metrics import TOKEN_REFUSALS, RouterMetrics
from kvrelay.router.requests.live_request import LiveRequest


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


def _of(caller: Caller, live: Iterable[LiveRequest]) -> list[LiveRequest]:
    """The live requests of the caller."""
    return [one for one in live if one.request.caller.name == caller.name]

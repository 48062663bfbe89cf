"""The limits that a token has of its own, beside those of the router."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.router.callers import Caller
from kvrelay.router.errors import OverLimit
from kvrelay.router.metrics import TOKEN_REFUSALS, RouterMetrics
from kvrelay.router.requests.live_request import LiveRequest


class TokenLimits:
    """Refuses requests of callers who have as much on this router as their tokens allow.

    Nothing is counted here that could go astray: what a caller has is read off its live requests.

    Args:
        metrics: count the refusals, by token.
        retry_after_ms: when a caller that was refused should try again.
    """

    def __init__(self, metrics: RouterMetrics, retry_after_ms: int) -> None:
        self._metrics = metrics
        self._retry_after_ms = retry_after_ms

    def check_live(self, caller: Caller, live: Iterable[LiveRequest], validating: int) -> None:
        """Raises `OverLimit` unless one more request may be validated, whatever its prompt.

        Args:
            caller: who asks.
            live: all requests.
            validating: those of the caller that are on their way to be live.
        """
        most = caller.max_live_requests
        if most is not None:
            taken = len(_of(caller, live)) + validating
            if taken >= most:
                have = f"{taken} requests are live, of {most}"
                self._refuse(caller, "max_live_requests", have)
        self.check_queued(caller, live, 1)

    def check_queued(self, caller: Caller, live: Iterable[LiveRequest], more_tokens: int) -> None:
        """Raises `OverLimit` unless a prompt of so many tokens may wait for its first token."""
        most = caller.max_queued_prompt_tokens
        if most is None:
            return
        waiting = [one for one in _of(caller, live) if not one.streaming]
        queued = sum(len(one.request.input_ids) for one in waiting)
        if queued + more_tokens > most:
            have = f"prompts of {queued} tokens wait, of {most}, and {more_tokens} would come"
            self._refuse(caller, "max_queued_prompt_tokens", have)

    def check_grammars(self, caller: Caller, taken_bytes: int, more_bytes: int) -> None:
        """Raises `OverLimit` unless a grammar of so many bytes has room beside the caller's."""
        most = caller.max_grammar_bytes
        if most is not None and taken_bytes + more_bytes > most:
            have = f"grammars have {taken_bytes} bytes, of {most}, and {more_bytes} would come"
            self._refuse(caller, "max_grammar_bytes", have)

    def _refuse(self, caller: Caller, limit: str, have: str) -> None:
        self._metrics.count(TOKEN_REFUSALS, token=caller.name, limit=limit)
        raise OverLimit(caller, limit, have, self._retry_after_ms)


def _of(caller: Caller, live: Iterable[LiveRequest]) -> list[LiveRequest]:
    """Those requests that are the caller's."""
    return [one for one in live if one.request.caller.name == caller.name]

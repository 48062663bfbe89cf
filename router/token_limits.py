"""The limits that a token has of its own, beside those of the router."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.router.callers import Caller
from kvrelay.router.errors import OverLimit
from kvrelay.router.live_request import LiveRequest
from kvrelay.router.metrics import TOKEN_REFUSALS, RouterMetrics


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

    def check_live(self, caller: Caller, own: Sequence[LiveRequest], validating: int) -> None:
        """Raises `OverLimit` unless one more request may be validated, whatever its prompt.

        Args:
            caller: who asks.
            own: its live requests.
            validating: its requests that are on their way to be live.
        """
        most = caller.max_live_requests
        if most is not None and len(own) + validating >= most:
            have = f"{len(own) + validating} requests are live, of {most}"
            self._refuse(caller, "max_live_requests", have)
        self.check_queued(caller, own, 1)

    def check_queued(self, caller: Caller, own: Sequence[LiveRequest], more_tokens: int) -> None:
        """Raises `OverLimit` unless a prompt of so many tokens may wait for its first token."""
        most = caller.max_queued_prompt_tokens
        if most is None:
            return
        queued = sum(len(live.request.input_ids) for live in own if not live.streaming)
        if queued + more_tokens > most:
            have = f"prompts of {queued} tokens wait, of {most}, and {more_tokens} would come"
            self._refuse(caller, "max_queued_prompt_tokens", have)

    def _refuse(self, caller: Caller, limit: str, have: str) -> None:
        self._metrics.count(TOKEN_REFUSALS, token=caller.name, limit=limit)
        raise OverLimit(caller, limit, have, self._retry_after_ms)

"""Room for the grammars of live requests: workers hold them as long as the requests live."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.router.admission.structured_outputs import FIELD
from kvrelay.router.admission.token_limits import TokenLimits
from kvrelay.router.errors import GrammarsFull, InvalidField
from kvrelay.router.generation import GenerationRequest


class GrammarRoom:
    """A bound on the grammars of live requests, of one caller and of all.

    Equal grammars are compiled once, and count once. As in `TokenLimits`, no counter is kept that
    could drift: the sum is taken over the live requests.

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


def _bytes_of(requests: Iterable[GenerationRequest], beside: GenerationRequest) -> int:
    """The bytes of the requests' grammars, each counted once, without the one of `beside`."""
    sizes = {one.grammar.key: one.grammar.num_bytes for one in requests if one.grammar is not None}
    if beside.grammar is not None:
        sizes.pop(beside.grammar.key, None)
    return sum(sizes.values())

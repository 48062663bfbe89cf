"""Output tokens put in order: two workers deliver them in any order."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvrelay.wire.output import SampledToken


class TokenMerge:
    """A merge of tokens by their index; the first token that comes for an index stays.

    Tokens at ``[0, len(taken_ids))`` were taken. Later ones wait for a token before them.
    """

    def __init__(self) -> None:
        self._taken = array("i")
        self._early: dict[int, SampledToken] = {}

    @property
    def taken_ids(self) -> Sequence[int]:
        """The ids of the tokens that were taken; the sequence grows with them."""
        return self._taken

    def add(self, index: int, tokens: Sequence[SampledToken]) -> int:
        """Add tokens whose first is at `index`; indexes that have a token keep it.

        Returns how many of the tokens differ from the one that stays.
        """
        contradicted = 0
        for position, token in enumerate(tokens, start=index):
            if position < len(self._taken):
                known = self._taken[position]
            else:
                known = self._early.setdefault(position, token).token_id
            contradicted += known != token.token_id
        return contradicted

    def take(self) -> tuple[SampledToken, ...]:
        """Take and return the next tokens, up to the first that is missing."""
        ready = []
        while (token := self._early.pop(len(self._taken), None)) is not None:
            ready.append(token)
            self._taken.append(token.token_id)
        return tuple(ready)

    def take_next(self, index: int, token_id: int) -> bool:
        """Take a token if it is the next and no other waits; return whether it was taken."""
        if self._early or index != len(self._taken):
            return False
        self._taken.append(token_id)
        return True

    def forget_early(self) -> None:
        """Drop the tokens that wait for a token before them."""
        self._early.clear()

    @property
    def gapless(self) -> bool:
        """Whether at least one token was taken, and none waits for a token before it."""
        return bool(self._taken) and not self._early

"""Output tokens in order, whatever order two workers deliver them in."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.router.events import Token


class TokenMerge:
    """Puts tokens in the order of their index; each index counts once.

    ``[0, len(taken_ids))`` taken; above, tokens that wait for one before them.
    """

    def __init__(self) -> None:
        self._taken: list[int] = []
        self._early: dict[int, Token] = {}

    @property
    def taken_ids(self) -> Sequence[int]:
        """The ids of the tokens that were taken; a view that grows with them."""
        return self._taken

    def add(self, index: int, tokens: Sequence[Token]) -> int:
        """Adds tokens whose first is at `index`; those known already are ignored.

        Returns how many of them were known as another token.
        """
        contradicted = 0
        for position, token in enumerate(tokens, start=index):
            if position < len(self._taken):
                known = self._taken[position]
            else:
                known = self._early.setdefault(position, token).token_id
            contradicted += known != token.token_id
        return contradicted

    def take(self) -> tuple[Token, ...]:
        """The tokens after those taken that have no gap before them."""
        ready = []
        while (token := self._early.pop(len(self._taken), None)) is not None:
            ready.append(token)
            self._taken.append(token.token_id)
        return tuple(ready)

    def forget_early(self) -> None:
        """Drops the tokens that wait for one before them."""
        self._early.clear()

    @property
    def gapless(self) -> bool:
        """There is output and none of it waits for a token before it."""
        return bool(self._taken) and not self._early

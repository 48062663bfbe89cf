"""Output tokens in order, whatever order two workers deliver them in."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.router.events import Token


class TokenMerge:
    """Puts tokens in the order of their index; each index counts once.

    ``[0, next_index)`` taken; above, tokens that wait for one before them.
    """

    def __init__(self) -> None:
        self.next_index = 0
        self._early: dict[int, Token] = {}

    def add(self, index: int, tokens: Sequence[Token]) -> None:
        """Adds tokens whose first is at `index`; those known already are ignored."""
        for position, token in enumerate(tokens, start=index):
            if position >= self.next_index:
                self._early.setdefault(position, token)

    def take(self) -> tuple[Token, ...]:
        """The tokens from `next_index` on that have no gap before them."""
        ready = []
        while (token := self._early.pop(self.next_index, None)) is not None:
            ready.append(token)
            self.next_index += 1
        return tuple(ready)

    @property
    def gapless(self) -> bool:
        """There is output and none of it waits for a token before it."""
        return self.next_index > 0 and not self._early

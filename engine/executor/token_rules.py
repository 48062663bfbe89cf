"""The tokens that a client allows and bans, as masks of an output's next tokens.

They follow from the output's tokens alone, as a grammar's masks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from kvrelay.engine.executor.token_state import TokenState
from kvrelay.model_runner.sampling.sampler import TokenMasks
from kvrelay.wire.submit import BannedSequence

_MADE: Final = 4
"""The latest rules that are kept, for the other choices of their requests."""


class TokenRules:
    """The rules of one request, whose choices share them.

    Args:
        allowed_ids: the tokens that are allowed; none: all are.
        sequences: the sequences that are banned.
        vocab_size: the tokens of the vocabulary.
    """

    def __init__(
        self,
        allowed_ids: Sequence[int],
        sequences: Sequence[BannedSequence],
        vocab_size: int,
    ) -> None:
        allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
        allowed[list(allowed_ids) or slice(vocab_size)] = True
        self._ends: dict[int, list[tuple[list[int], int]]] = {}
        """Banned tokens by the one before them, each with all that are before it."""
        self.reach = max([len(banned.ids) for banned in sequences], default=1) - 1
        """The most tokens before one that matter for it."""
        for banned in sequences:
            *before, last = banned.ids
            if before:
                self._ends.setdefault(before[-1], []).append((before, last))
            else:
                allowed[last] = False
        self._allowed = np.packbits(allowed, bitorder="little").view(np.uint32)

    def masks(self, output_ids: Sequence[int], draft_ids: Sequence[int]) -> TokenMasks:
        """Return the masks of the output's next token, and of the one after each draft.

        Args:
            output_ids: the output, of which the last `reach` tokens are enough.
            draft_ids: the drafts.
        """
        masks = np.repeat(self._allowed[None], len(draft_ids) + 1, axis=0)
        for count in range(len(masks)) if self._ends else ():
            for token_id in self._banned_behind([*output_ids, *draft_ids[:count]]):
                masks[count, token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        return masks.view(np.int32)

    def cut(self, output_ids: Sequence[int], draft_ids: Sequence[int]) -> Sequence[int]:
        """Cut drafts before the first that is banned."""
        masks = self.masks(output_ids, draft_ids).view(np.uint32)
        for count, token_id in enumerate(draft_ids):
            if not masks[count, token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1):
                return draft_ids[:count]
        return draft_ids

    def _banned_behind(self, token_ids: list[int]) -> Iterator[int]:
        """Yield the tokens that would end a banned sequence of two or more."""
        for before, last in self._ends.get(token_ids[-1], ()) if token_ids else ():
            if token_ids[-len(before) :] == before:
                yield last


def rules_of(state: TokenState, vocab_size: int) -> TokenRules:
    """Return a request's rules, which are made once."""
    if state.rules is None:
        params = state.params.sampling
        state.rules = _made_rules(params.allowed_token_ids, params.banned_sequences, vocab_size)
    return state.rules


_made_rules = lru_cache(_MADE)(TokenRules)
